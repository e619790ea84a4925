"""Process groups of tests and simulations: staged through host memory, on a shared gloo device, and fake.

    "staged"       a backend of torch.distributed for ranks that share one GPU: it copies messages through host memory
    share_device   makes the gloo groups of a long-lived rank share one device
    fake_world     a mesh of many ranks in one process, whose groups communicate nothing

Importing this module registers the backend: `dist.init_process_group("staged", ...)`, `World(4, backend="staged")`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from importlib import import_module
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend "fake"
from torch.utils._pytree import tree_leaves, tree_map_only

from armillary.core import compat
from armillary.core.mesh import build_mesh, check_axes

STAGED = "staged"
DEVICES = ("cpu", "cuda")


class StagedWork(cast(Any, dist)._Work):
    """A work of gloo on host copies. `wait` also copies received values to their targets, on the current stream.

    Args:
        arriving: pairs (target, host copy that gloo writes to).
        longest: time-out of `wait` if none is passed.
    """

    def __init__(self, work: dist.Work, arriving: list[tuple[Tensor, Tensor]], longest: timedelta) -> None:
        super().__init__()
        self.work, self.arriving, self.longest = work, arriving, longest

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait(timeout or self.longest)  # gloo ignores the group's time-out in sends and receives
        for target, host in self.arriving:
            target.copy_(host)
        self.arriving = []
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and not self.arriving


def stage_operation(name: str, arrives: bool = True) -> Callable[..., StagedWork]:
    """Returns the method of `StagedGroup` that runs gloo's operation `name` on host copies.

    Args:
        arrives: True if the operation writes to its first argument, where torch's operations have their output.
    """

    def start(self: StagedGroup, *args: Any, **options: Any) -> StagedWork:
        copies = tree_map_only(Tensor, on_host, args)
        work = getattr(self.host, name)(*copies, **options)
        pairs = zip(tree_leaves(args[0]), tree_leaves(copies[0]), strict=True) if arrives else ()
        return StagedWork(work, list(pairs), self.longest)

    return start


def on_host(x: Tensor) -> Tensor:
    """Returns a contiguous copy in host memory. Waits until it is complete."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class StagedGroup(dist.ProcessGroup):
    """A process group whose operations are gloo's, on host copies."""

    # NCCL refuses two ranks on one GPU, and gloo cannot send or receive CUDA tensors. CPU tensors are copied too, so
    # that tests on the CPU run the same code as on a GPU.

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # with a store, torch 2.11 would not create the subclass
        self.host = dist.ProcessGroup(store, rank, size)
        gloo, kind = cast(Any, dist).ProcessGroupGloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
        for group, devices in ((self.host, DEVICES[:1]), (self, DEVICES)):
            cast(Any, group)._set_default_backend(kind)
            for device in devices:  # also on this group, where torch looks for the time-out
                cast(Any, group)._register_backend(torch.device(device), kind, gloo)

    @property
    def longest(self) -> timedelta:
        """The time-out of operations."""
        return cast(timedelta, compat.host_timeout(self, "cpu"))

    def barrier(self, *_: Any, **__: Any) -> StagedWork:  # pyright: ignore[reportIncompatibleMethodOverride]
        return StagedWork(self.host.barrier(), [], self.longest)

    # torch 2.13 renames some operations; these have both names.
    # fmt: off
    allreduce, allreduce_coalesced, broadcast, reduce = map(
        stage_operation, ("allreduce", "allreduce_coalesced", "broadcast", "reduce"))
    allgather, gather, scatter, reduce_scatter, alltoall = map(
        stage_operation, ("allgather", "gather", "scatter", "reduce_scatter", "alltoall"))
    _allgather_base, _reduce_scatter_base, alltoall_base = map(
        stage_operation, ("_allgather_base", "_reduce_scatter_base", "alltoall_base"))
    allgather_into_tensor_coalesced, reduce_scatter_tensor_coalesced = map(
        stage_operation, ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"))
    all_gather_single, reduce_scatter_single, all_to_all_single = map(
        stage_operation, ("all_gather_single", "reduce_scatter_single", "all_to_all_single"))
    all_gather_single_coalesced, reduce_scatter_single_coalesced = map(
        stage_operation, ("all_gather_single_coalesced", "reduce_scatter_single_coalesced"))
    recv, recv_anysource = map(stage_operation, ("recv", "recv_anysource"))
    send = stage_operation("send", arrives=False)
    # fmt: on


dist.Backend.register_backend(STAGED, StagedGroup, devices=list(DEVICES))


THREADS = 2
"""Threads that run the operations of one group; the number that torch uses."""


def share_device() -> None:
    """Makes all gloo groups that this process creates from now on share one device. Uses private options of torch."""
    gloo = cast(Any, dist).ProcessGroupGloo
    original, device = gloo.__init__, gloo.create_default_device()

    @wraps(original)
    def init_with_shared_device(
        group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
    ) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], THREADS, timeout
        original(group, store, rank, size, options)

    # torch creates every gloo group through this constructor.
    gloo.__init__ = init_with_shared_device


@contextmanager
def fake_world(rank: int = 0, device: str = "cpu", /, **axes: int) -> Generator[DeviceMesh]:
    """Context manager that yields the mesh as one rank sees it, on a process group that communicates nothing.

    Receive buffers keep their contents. Enter this context, and build attention methods, before a `FakeTensorMode`:
    meshes and process groups need tensors with values.

    Args:
        rank: the rank that this process stands for.
        axes: sizes of the mesh's axes, as in `build_mesh`.

    Raises:
        ValueError: an axis below 1, a rank outside the mesh, or a default process group that exists already.
    """
    # Collectives on fake tensors. Imported here, because it takes as long as torch, and not every command needs it.
    import_module("torch.distributed._tools.fake_collectives")
    ranks = prod(axes.values())
    check_axes(axes, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}; choose from 0 to {ranks - 1}")
    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks is there already; simulate in a process without one"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield build_mesh(device, **cast(Any, axes))
    finally:
        dist.destroy_process_group()
