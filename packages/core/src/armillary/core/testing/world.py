"""Starting ranks quickly, and never waiting for them for ever.

Ranks are forked from a server that has imported torch once, and stay up for any number of calls. When one fails or
hangs, the error says which, where each rank stands, and the world is replaced by a fresh one at the next call.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self, TypeVar

from armillary.core.testing.rank import STACKS, serve, stack_file

R = TypeVar("R")

PRELOAD = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor.compile_fx")
"""Imported once by the server that ranks are forked from, rather than by each rank that builds a mesh or compiles."""

OF_TESTS = ("accelerate", "armillary", "diffusers", "hypothesis", "pytest", "transformers", "trl")
"""What is here of them is imported there too: each rank imports the module of its function, a test. Not that itself: it
may ask for GPUs, and a process that has done so has none for those that it forks."""

FRESH = 32
"""Times that `Worlds` hands out the same ranks before it replaces them."""

KEPT = 4
"""Ranks, at most, of a world that is kept while others run."""

GRACE = 2.0
"""Seconds that the other ranks get once one has failed: enough to fail for their own reasons, not to wait for it."""


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time. Names each, with its traceback or where it stood."""


class World:
    """`size` ranks on this machine, one thread each. Use as a context manager, or call `close`.

    Args:
        size: how many ranks.
        timeout: seconds that one `run` may take, and that a collective may wait.
        backend: of their process groups: "gloo", or "staged" for ranks that share one GPU (`testing.staged`).
    """

    def __init__(self, size: int, timeout: float = 300.0, backend: str = "gloo") -> None:
        self.size, self.timeout, self.backend = size, timeout, backend
        self._folder: Path | None = None
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., R], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[R]:
        """Calls `function(*args, **kwargs)` on every rank; returns what each returned, in rank order.

        The function must be importable (defined at the top level of a module) and everything that goes in or out must
        pickle. Tensors travel by value.

        Raises:
            RankFailed: a rank raised, died, or had not answered after `timeout` seconds.
        """
        limit = self.timeout if timeout is None else timeout
        request = pickle.dumps((function, args, kwargs))
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send_bytes(request)
        answers = self._collect(time.monotonic() + limit)
        if all(answers.get(rank, ("missing",))[0] == "ok" for rank in range(self.size)):
            if len({answers[rank][2] for rank in range(self.size)}) > 1:
                self.close()  # their next groups would have other names each, and never meet
            return [answers[rank][1] for rank in range(self.size)]
        message = self._explain(answers, limit)
        self.close(kill=True)
        raise RankFailed(message)

    def close(self, kill: bool = False) -> None:
        """Ends the ranks. A later `run` starts new ones."""
        for process, connection in self._ranks:
            connection.close()
            if kill:
                process.kill()
        for process, _ in self._ranks:
            process.join(5)
            process.kill()
            process.join()
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        ours = sorted(name for name in sys.modules if name.partition(".")[0] in OF_TESTS)
        context.set_forkserver_preload([*PRELOAD, *ours])
        self._folder = Path(tempfile.mkdtemp(prefix="armillary-world-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            told = (rank, self.size, self._folder, theirs, self.timeout, self.backend)
            process = context.Process(target=serve, args=told, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, deadline: float) -> dict[int, tuple[Any, ...]]:
        """Answers by rank. Stops at the deadline, or a little after the first failure."""
        answers: dict[int, tuple[Any, ...]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = _read(connection)
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _explain(self, answers: dict[int, tuple[Any, ...]], limit: float) -> str:
        failed = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"}
        dead = [rank for rank, answer in answers.items() if answer[0] == "dead"]
        missing = [rank for rank in range(self.size) if rank not in answers]
        lines = [f"rank {rank} died (exit code {self._exit_code(rank)})" for rank in dead]
        lines += [f"rank {rank} raised:\n{text}" for rank, text in failed.items()]
        places = self._where(missing)
        late = "had not answered when another rank failed" if failed or dead else f"did not answer within {limit:g} s"
        lines += [f"rank {rank} {late}; it stands in {places[rank]}" for rank in missing]
        return f"{len(lines)} of {self.size} ranks failed\n" + "\n".join(lines)

    def _exit_code(self, rank: int) -> int | None:
        process = self._ranks[rank][0]
        process.join(1)
        return process.exitcode

    def _where(self, ranks: list[int]) -> dict[int, str]:
        """The innermost place outside torch and the standard library, for each rank."""
        assert self._folder is not None
        for rank in ranks:
            pid = self._ranks[rank][0].pid
            if pid is not None and self._ranks[rank][0].is_alive():
                os.kill(pid, STACKS)
        time.sleep(0.3 if ranks else 0)
        return {rank: _innermost(stack_file(self._folder, rank)) for rank in ranks}


class Worlds:
    """A world of each size that is asked for, kept for some calls: `worlds(4).run(...)`.

    The first call in fresh ranks takes several times as long as another. But what tests leave in them adds up, and
    ranks that wait wake a hundred times a second, for gloo: so large worlds end where another size is asked for.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self._calls: Counter[int] = Counter()

    def __call__(self, size: int) -> World:
        for other in list(self._worlds):
            if self._calls[other] == FRESH or (other > KEPT and other != size):
                self._worlds.pop(other).close()
                self._calls[other] = 0
        self._calls[size] += 1
        return self._worlds.setdefault(size, World(size))

    def close(self) -> None:
        """Ends the ranks."""
        for world in self._worlds.values():
            world.close()


def _read(connection: Connection) -> tuple[Any, ...]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return "dead", None


def _innermost(stack: Path) -> str:
    """The innermost frames outside torch and multiprocessing, innermost first, from what faulthandler wrote."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack.read_text() if stack.exists() else "")
    ours = [f for f in frames if not {"torch", "multiprocessing"} & set(Path(f[0]).parts)]
    shown = [f"{name} ({Path(file).name}:{line})" for file, line, name in ours[:4]]
    return " < ".join(shown) or "no Python frame that could be read"
