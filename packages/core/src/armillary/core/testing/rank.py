"""One rank of a test world: a process that receives functions, calls them and sends back their results."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import signal
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.mesh import build_mesh
from armillary.core.testing import staged  # pyright: ignore[reportUnusedImport] # noqa: F401 - registers the backend
from armillary.core.testing.gloo import share_device

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
    while (request := _receive(connection)) is not None:
        connection.send_bytes(_answer(request))
    if dist.is_initialized():
        dist.destroy_process_group()


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


@cache
def mesh(device: str = "cpu", **sizes: Any) -> DeviceMesh:
    """Returns `build_mesh(device, **sizes)`, such as `mesh(ring=2, ulysses=2)`, built once per process."""
    return build_mesh(device, **sizes)


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except EOFError:
        return None


def _answer(request: bytes) -> bytes:
    """Calls the function. Returns ("ok", result, `group_count()`) or ("error", traceback), pickled."""
    try:
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(("ok", function(*args, **kwargs), group_count()))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def group_count() -> int:
    """Returns the number of process groups that this rank has created. torch names the next group by it."""
    return cast(Any, dist).distributed_c10d._world.group_count
