"""Starting torchrun in a test, watching what it prints, and reaching for its ranks."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent

PATIENCE = 900.0
"""Seconds after which whoever waits gives up. No test expects to wait so long."""


def environment() -> dict[str, str]:
    """This environment's programs first, no GPU, and none of torchrun's variables."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{ours['PATH']}"
    return {**ours, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *flags: str) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(ranks), "-m", "armillary.train", *flags]


TRAINER = str(HERE / "forked_rank.py")
"""A script that trains."""


def forked(*options: str, flags: Sequence[str], script: str = TRAINER) -> list[str]:
    """torchrun with these options for ranks that train, without each importing it all again."""
    return [sys.executable, str(HERE / "forked.py"), *options, script, *flags]


class Launch:
    """A command that runs in `folder`, what it prints in a file. Whatever is left of it is killed at the end."""

    def __init__(self, command: list[str], folder: Path, popen: Callable[..., subprocess.Popen] = subprocess.Popen):
        self.folder, self.path = folder, folder / f"launch-{time.monotonic_ns()}.txt"
        with self.path.open("w") as file:
            options = {"cwd": folder, "env": environment(), "stdout": file, "stderr": subprocess.STDOUT}
            self.process = popen(command, start_new_session=True, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.ranks().values()] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def printed(self) -> str:
        return self.path.read_text(errors="replace")

    def wait(self) -> int:
        """The exit code, when it has ended."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.printed}") from None

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Waits until something that matches is printed after character `after`; returns where the match ends."""
        end = time.monotonic() + PATIENCE
        while (match := re.compile(pattern, re.MULTILINE).search(self.printed, after)) is None:
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.printed}"
            assert time.monotonic() < end, f"never printed {pattern!r}:\n{self.printed}"
            time.sleep(0.05)
        return match.end()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that torchrun has started here and that still run, by rank, as each has left it."""
        running = children(self.process.pid)
        left = {int(file.stem.removeprefix("rank-")): file.read_text() for file in self.folder.glob("rank-*.pid")}
        return {rank: int(pid) for rank, pid in left.items() if pid and int(pid) in running}

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """To these ranks, or to torchrun itself."""
        started = self.ranks()
        for pid in [started[rank] for rank in ranks] or [self.process.pid]:
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
