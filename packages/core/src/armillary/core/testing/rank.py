"""One rank of a test world: a loop that receives functions, calls them and sends back their results."""

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
    """Joins the world, then answers each pickled (function, args, kwargs) by `_answer`."""
    gc.freeze()  # a collection would copy the memory of everything that the server imported into each rank
    stacks = stack_file(folder, rank).open("w")
    faulthandler.register(STACKS, file=stacks, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    share_device()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    # Until all ranks are connected: a function that destroys the group at once would make gloo fail on a slower rank.
    dist.all_reduce(torch.zeros(1))
    while (request := _receive(connection)) is not None:
        connection.send_bytes(_answer(request))
    if dist.is_initialized():
        dist.destroy_process_group()


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


@cache
def mesh(
    *,
    pipe: int | None = None,
    replicate: int = 1,
    shard: int = 1,
    nodes: int | None = None,
    devices: int | None = None,
    ring: int = 1,
    ulysses: int = 1,
    tp: int = 1,
    device: str = "cpu",
) -> DeviceMesh:
    """Returns this rank's mesh with these axes, such as `mesh(ring=2, ulysses=2)`, built once per process."""
    return build_mesh(
        device,
        pipe=pipe,
        replicate=replicate,
        shard=shard,
        nodes=nodes,
        devices=devices,
        ring=ring,
        ulysses=ulysses,
        tp=tp,
    )


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except EOFError:
        return None


def _answer(request: bytes) -> bytes:
    """Returns ("ok", result, number of groups made) or ("error", text), pickled."""
    try:
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(("ok", function(*args, **kwargs), group_count()))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def group_count() -> int:
    """Returns the number of process groups made so far, by which torch names the next one."""
    return cast(Any, dist).distributed_c10d._world.group_count
