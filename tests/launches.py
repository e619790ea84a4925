"""Starts torchrun in a test, follows its output and signals its ranks."""

import ast
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Self

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main as run_torchrun
from torch.distributed.run import parse_args

import armillary.train.cli
import armillary.train.loop  # noqa: F401  ranks are forked from a server that imports these modules
from armillary.core.testing import fork_context

HERE = Path(__file__).parent

PATIENCE = 900.0
"""Time-out in seconds of every wait. No passing test waits that long."""


def environment() -> dict[str, str]:
    """Returns the environment with this virtual environment's programs first, no GPU, and no variables of torchrun."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return {**inherited, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *flags: str) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(ranks), "-m", "armillary.train", *flags]


TRAINER = str(HERE / "forked_rank.py")
"""A script that trains."""


def forked(*options: str, flags: Sequence[str], script: str = TRAINER) -> list[str]:
    """Command line of torchrun that forks its ranks, for another host."""
    return [sys.executable, str(HERE / "forked.py"), *options, script, *flags]


def agent(*options: str, flags: Sequence[str], script: str = TRAINER) -> Callable[[], None]:
    """Returns a function that runs torchrun as `forked` does, in a process forked after the imports."""
    return partial(run_forking, ["--start-method", "fork", "--run-path", *options, script, *flags])


def run_forking(arguments: list[str]) -> None:
    """Runs torchrun, whose ranks wait until all of them are forked.

    glibc's resolver has a lock that a fork may copy while a thread holds it. Threads of the agent lock it whenever a
    rank connects, and a rank forked at that moment hangs in its first look-up of a name. So no rank connects until
    all are forked.

    The agent names the calling function in each log record: torch searches the source files of all loaded modules for
    it, which takes half of the processor time of a launch. Here records have no such name.
    """
    dynamic_rendezvous.get_method_name = lambda: "unnamed"
    ranks, agent_pid = int(parse_args(arguments).nproc_per_node), os.getpid()

    def wait() -> None:
        while os.getppid() == agent_pid and len(children(agent_pid)) < ranks:
            time.sleep(0.005)

    os.register_at_fork(after_in_child=wait)
    run_torchrun(arguments)


def python(script: str) -> Callable[[], None]:
    """Returns a function that runs a script like `python script`."""
    return partial(_run_script, script)


def _run_script(script: str) -> None:
    """Runs a script by its absolute path: ranks that it starts read it again, from another folder."""
    run_path(str(Path(script).absolute()), run_name="__main__")


def pages_agent(*options: str, script: str, wrapper: str | None = None) -> Callable[[], None]:
    """Returns a function that runs `torchrun *options script`, for a script in the current folder.

    The agent imports the imports of all scripts there once, before it forks the ranks: the module of a model takes
    seconds on each rank, and one script names it while another loads it by its name.

    Args:
        wrapper: a script that the ranks run instead, with the script's name as its argument.
    """
    return partial(_run_pages_agent, options, script, wrapper)


def _run_pages_agent(options: Sequence[str], script: str, wrapper: str | None) -> None:
    for path in sorted(Path().glob("*.py")):
        run_imports(path.read_text())
    gc.freeze()
    if wrapper is None:
        agent(*options, flags=[], script=script)()
    else:
        agent(*options, flags=[script], script=wrapper)()


def run_imports(script: str) -> None:
    """Imports everything that a script imports at its top level."""
    tree = ast.parse(script)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(tree, "script", "exec"), {})
    if "accelerate" in sys.modules:
        import datasets  # noqa: F401  as accelerate does when it prepares a loader
    if "transformers" in sys.modules:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # fills its cache: each process would compile 865 patterns


class Forked:
    """Like `subprocess.Popen`, for a function: forks a process from the server of `World`'s ranks."""

    def __init__(self, function: Callable[[], None], folder: Path, output: Path) -> None:
        self.process = fork_context().Process(target=call, args=(function, folder, output, environment()))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        return self.process.exitcode


def call(function: Callable[[], None], folder: Path, output: Path, variables: dict[str, str]) -> None:
    """Runs the function of a `Forked` process in a new session, with `variables` as its whole environment."""
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    gc.freeze()  # the imported modules, which torchrun's ranks share
    torch.set_num_threads(1)
    # torch makes a new thread pool at the first call in a fork; when two threads of gloo race, one may find none.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    function()


class Launch:
    """A command or function running in `folder`, with its output in a file. Kills its processes on exit."""

    def __init__(
        self,
        program: list[str] | Callable[[], None],
        folder: Path,
        popen: Callable[..., subprocess.Popen] = subprocess.Popen,
    ) -> None:
        self.folder, self.path = folder, folder / f"launch-{time.monotonic_ns()}.txt"
        if not isinstance(program, list):
            self.path.touch()
            self.process = Forked(program, folder, self.path)
            return
        with self.path.open("w") as file:
            options = {"cwd": folder, "env": environment(), "stdout": file, "stderr": subprocess.STDOUT}
            self.process = popen(program, start_new_session=True, **options)

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
        """Waits for the end and returns the exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.printed}") from None

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Waits until the output after character `after` matches; returns the end of the match."""
        end = time.monotonic() + PATIENCE
        while (match := re.compile(pattern, re.MULTILINE).search(self.printed, after)) is None:
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.printed}"
            assert time.monotonic() < end, f"never printed {pattern!r}:\n{self.printed}"
            time.sleep(0.05)
        return match.end()

    def ranks(self) -> dict[int, int]:
        """Process ids of torchrun's running ranks, by rank, from the files that the ranks wrote."""
        running = children(self.process.pid)
        written = {int(file.stem.removeprefix("rank-")): file.read_text() for file in self.folder.glob("rank-*.pid")}
        return {rank: int(pid) for rank, pid in written.items() if pid and int(pid) in running}

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """Signals these ranks, or torchrun if there are none."""
        started = self.ranks()
        for pid in [started[rank] for rank in ranks] or [self.process.pid]:
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
