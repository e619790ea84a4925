"""Test worlds: a `World` is a set of ranks on this machine that start quickly and serve many calls."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.mesh import build_mesh
from armillary.core.testing.groups import share_device

R = TypeVar("R")

PRELOAD = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor.compile_fx")
"""Modules that the server imports once for all ranks."""

TEST_PACKAGES = ("accelerate", "armillary", "datasets", "diffusers", "hypothesis", "pytest", "transformers", "trl")
"""Packages whose modules the server imports too, if this process has imported them. The server does not import test
modules: these may query GPUs, and after that a process cannot fork ranks that use GPUs."""


def fork_context() -> ForkServerContext:
    """Returns a context whose processes are forked from a server that has imported `PRELOAD` and `TEST_PACKAGES`."""
    context = multiprocessing.get_context("forkserver")
    packages = sorted(name for name in sys.modules if name.partition(".")[0] in TEST_PACKAGES)
    context.set_forkserver_preload([*PRELOAD, *packages])
    return context


MAX_CALLS = 100
"""Number of calls after which `Worlds` replaces the ranks of a world."""

GRACE = 2.0
"""Seconds that `run` waits for the errors of other ranks after the first rank has failed."""


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time. The message has the traceback or the stack of each such rank."""


class World:
    """`size` ranks on this machine, with one thread each. Use as a context manager, or call `close`.

    Args:
        timeout: seconds for one `run`, and for each collective.
        backend: "gloo", or "staged" for ranks that share one GPU (`testing.groups`).
    """

    def __init__(self, size: int, timeout: float = 300.0, backend: str = "gloo") -> None:
        self.size: int = size
        self.timeout: float = timeout
        self.backend: str = backend
        self._folder: Path | None = None
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., R], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[R]:
        """Calls `function(*args, **kwargs)` on every rank and returns the results in rank order.

        The function must be importable (defined at the top level of a module); arguments and results must pickle.
        Tensors are passed by value.

        Raises:
            RankFailed: a rank raised, died, or did not answer within `timeout` seconds.
        """
        limit = self.timeout if timeout is None else timeout
        # Pickled before the first send: otherwise a value that cannot be pickled could leave a call on some ranks only.
        request = pickle.dumps((function, args, kwargs))
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send_bytes(request)
        answers = self._receive(time.monotonic() + limit)
        if all(answers.get(rank, ("missing",))[0] == "ok" for rank in range(self.size)):
            if len({answers[rank][2] for rank in range(self.size)}) > 1:
                # The last element of an "ok" answer is the number of process groups that the rank has created. If
                # these differ, ranks would give the next group different names and wait for each other forever.
                self.close()
            return [answers[rank][1] for rank in range(self.size)]
        message = self._error_message(answers, limit)
        self.close(kill=True)
        raise RankFailed(message)

    def close(self, kill: bool = False) -> None:
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
        context = fork_context()
        self._folder = Path(tempfile.mkdtemp(prefix="armillary-world-"))
        for rank in range(self.size):
            connection, rank_connection = context.Pipe()
            arguments = (rank, self.size, self._folder, rank_connection, self.timeout, self.backend)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            rank_connection.close()  # only the rank's copy is left, so its death closes the connection
            self._ranks.append((process, connection))

    def _receive(self, deadline: float) -> dict[int, tuple[Any, ...]]:
        """Returns the answers by rank, until the deadline or `GRACE` seconds after the first failure."""
        answers: dict[int, tuple[Any, ...]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), seconds):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = "dead", None
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _error_message(self, answers: dict[int, tuple[Any, ...]], limit: float) -> str:
        tracebacks = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"}
        dead_ranks = [rank for rank, answer in answers.items() if answer[0] == "dead"]
        silent_ranks = [rank for rank in range(self.size) if rank not in answers]
        lines: list[str] = []
        for rank in dead_ranks:
            process = self._ranks[rank][0]
            process.join(1)  # it has closed its connection, and its exit code follows
            lines.append(f"rank {rank} died (exit code {process.exitcode})")
        lines += [f"rank {rank} raised:\n{traceback}" for rank, traceback in tracebacks.items()]
        stacks = self._stacks(silent_ranks)
        other_failed = tracebacks or dead_ranks
        reason = "had not answered when another rank failed" if other_failed else f"did not answer within {limit:g} s"
        lines += [f"rank {rank} {reason}; it is in {stacks[rank]}" for rank in silent_ranks]
        return f"{len(lines)} of {self.size} ranks failed\n" + "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        assert self._folder is not None
        for rank in ranks:
            pid = self._ranks[rank][0].pid
            if pid is not None and self._ranks[rank][0].is_alive():
                os.kill(pid, STACKS)
        time.sleep(0.3 if ranks else 0)  # the signal handler of each rank writes its stack to a file
        innermost: dict[int, str] = {}
        for rank in ranks:
            # The 4 innermost frames outside torch and multiprocessing, innermost first, from faulthandler's dump.
            stack = stack_file(self._folder, rank)
            frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack.read_text() if stack.exists() else "")
            own_frames = [f for f in frames if not {"torch", "multiprocessing"} & set(Path(f[0]).parts)]
            shown = [f"{name} ({Path(file).name}:{line})" for file, line, name in own_frames[:4]]
            innermost[rank] = " < ".join(shown) or "no Python frame that could be read"
        return innermost


class Worlds:
    """Test worlds, one for each size: `worlds(4).run(...)`.

    Worlds are reused, and replaced after `MAX_CALLS` calls, because tests leave state in the ranks.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self._calls: Counter[int] = Counter()

    def __call__(self, size: int) -> World:
        if self._calls[size] == MAX_CALLS:
            self._worlds.pop(size).close()
            self._calls[size] = 0
        self._calls[size] += 1
        return self._worlds.setdefault(size, World(size))

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


# -- one rank of a world ----------------------------------------------------------------------------------------------

STACKS = signal.SIGUSR1
"""The signal on which a rank writes its stack."""


def serve(rank: int, size: int, folder: Path, connection: Connection, timeout: float, backend: str) -> None:
    """Joins the world, then answers each request, a pickled (function, args, kwargs), until `connection` closes."""
    # The rank shares memory with the server from which it was forked, until one of them writes to it. A garbage
    # collection writes to every object that it visits; frozen objects are not visited.
    gc.freeze()
    stacks = stack_file(folder, rank).open("w")
    faulthandler.register(STACKS, file=stacks, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    share_device()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    # Wait until all ranks are connected: a rank that destroys the group at once would make gloo fail on a slower rank.
    dist.all_reduce(torch.zeros(1))
    with suppress(EOFError):  # the connection is closed
        while request := connection.recv_bytes():
            connection.send_bytes(_answer(request))
    if dist.is_initialized():
        dist.destroy_process_group()


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


@cache
def mesh(device: str = "cpu", **sizes: Any) -> DeviceMesh:
    """Returns `build_mesh(device, **sizes)`, such as `mesh(ring=2, ulysses=2)`, built once per process."""
    return build_mesh(device, **sizes)


def _answer(request: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(("ok", function(*args, **kwargs), group_count()))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def group_count() -> int:
    return cast(Any, dist).distributed_c10d._world.group_count
