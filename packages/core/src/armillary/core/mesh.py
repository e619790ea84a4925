"""The named axes that every other part hangs off."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from armillary.core import compat
from armillary.core.checked import integer
from armillary.core.rendezvous import rendezvous

AXES: tuple[str, ...] = ("replicate", "shard", "ring", "ulysses", "tp")
"""Outermost to innermost: the axis that talks most sits on the fastest links (USP, arXiv 2405.07719, tip 7)."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TIMEOUT = timedelta(minutes=10)


def build_mesh(
    device_type: str,
    *,
    replicate: int = 1,
    shard: int = 1,
    ring: int = 1,
    ulysses: int = 1,
    tp: int = 1,
    timeout: timedelta = TIMEOUT,
    high_priority: Sequence[str] = (),
    max_ctas: int | None = None,
) -> DeviceMesh:
    """A `DeviceMesh` with all five axes, in the order of `AXES`.

    Starts the default process group if nobody has: from torchrun's environment, or alone where there is none. Creates
    the axes' groups, so every rank of the world must call it.

    Args:
        device_type: "cpu" (gloo) or "cuda" (nccl).
        timeout: how long a collective or exchange on any axis may wait before it raises.
        high_priority: axes, such as "ring", with communicators of their own on CUDA streams of high priority: of two
            kernels that could start at once, one of theirs does, and attention does not keep it waiting. Without, an
            axis of all ranks shares the default group's communicator, and waits for FSDP's collectives. On "cpu" none.
        max_ctas: thread blocks, at most, of one NCCL kernel on these axes; by default NCCL decides.

    Raises:
        ValueError: an axis below 1, axes whose product is not the number of ranks, a device type without a backend,
            a timeout that is none, an unknown axis of high priority, or max_ctas below 1. Raised before any
            communication.
    """
    given = dict(zip(AXES, (replicate, shard, ring, ulysses, tp), strict=True))
    sizes = {name: integer(f"axis {name}", size) for name, size in given.items()}
    check_axes(sizes, world_size())
    backend_of(device_type)
    check_timeout(timeout)
    unknown = [name for name in high_priority if name not in AXES]
    if unknown:
        raise ValueError(f"high_priority={tuple(high_priority)}: no axis {unknown[0]!r}; known: {', '.join(AXES)}")
    if max_ctas is not None and integer("max_ctas", max_ctas) < 1:
        raise ValueError(f"max_ctas={max_ctas}: at least 1, or None for as many as NCCL takes")
    if not dist.is_initialized():
        start_process_group(device_type, timeout)
    above = [name for name in high_priority if device_type == "cuda" and sizes[name] > 1]
    override: dict[int | str, Any] = {name: compat.high_priority(timeout, max_ctas) for name in above}
    if override and compat.has_several_backends():
        # torch hands the options to each backend of a group, and gloo replaces NCCL's by defaults, timeout included.
        override = {name: (backend_of(device_type), options) for name, options in override.items()}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES, backend_override=override or None)
    for name in AXES:
        compat.set_timeout(timeout, mesh[name].get_group())
    return mesh


def check_axes(sizes: dict[str, int], world: int) -> None:
    """Refuses axes that do not multiply out to `world` ranks, with the numbers."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"axis {name}={size}: every axis needs at least 1 rank")
    if prod(sizes.values()) != world:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{product} = {prod(sizes.values())} ranks, but {world} are running; "
            f"make the axes multiply to {world} or start {prod(sizes.values())} ranks"
        )


def backend_of(device_type: str) -> str:
    """The backend whose collectives take tensors of a kind of device."""
    if not isinstance(device_type, str) or device_type not in BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"no backend for device type {device_type!r}; known: {', '.join(BACKENDS)}")
    return BACKENDS[device_type]


def check_timeout(timeout: timedelta) -> None:
    """Refuses what is no time to wait."""
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"timeout={timeout!r}: a datetime.timedelta above 0 is needed, such as timedelta(minutes=10)")


def world_size() -> int:
    """Ranks of the default process group; before it starts, those that torchrun announced; else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start_process_group(
    device_type: str, timeout: timedelta = TIMEOUT, host_too: bool = False, bind: bool = True
) -> None:
    """Starts the default process group: from torchrun's environment, or one rank alone where there is none.

    Args:
        host_too: collectives of tensors in the host's memory will be needed beside those of the device's.
        bind: NCCL is told this rank's GPU. Then it connects at once, and communicators are split from each other.
            Not where `host_too`: torch cannot reliably split groups of several backends. From torch 2.15 on NCCL is
            always told (`binds_device`).

    Raises:
        ValueError: a device type without a backend, or without a device here.
        TimeoutError: other ranks have not come.
    """
    alone = backend_of(device_type)
    check_timeout(timeout)
    device = own_device(device_type)
    both = ",".join(f"{kind}:{backend}" for kind, backend in BACKENDS.items())
    backend = both if host_too and device is not None else alone
    bound = device if device is not None and binds_device(bind, host_too) else None
    start = partial(dist.init_process_group, backend, timeout=timeout, device_id=bound)
    if "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        start(store=rendezvous(store, rank, ranks, timeout), rank=rank, world_size=ranks)
    else:
        start(store=dist.HashStore(), rank=0, world_size=1)


def binds_device(bind: bool, host_too: bool) -> bool:
    """Whether the default process group is bound to this rank's GPU: if asked for, or where NCCL binds it anyway.

    Left to itself it would take the GPU of LOCAL_RANK, which is not that of a caller who has chosen another.
    """
    return (bind and not host_too) or compat.nccl_binds_devices()


def own_device(device_type: str) -> torch.device | None:
    """This rank's accelerator, from now on the current one: the caller's choice, or the launcher's. None for "cpu".

    Raises:
        ValueError: there is none here.
    """
    if device_type == "cpu":
        return None
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device type {device_type!r}, but no such device is here; 'cpu' would do")
    if not torch.cuda.is_initialized():  # else the caller has chosen, as by torch.cuda.set_device
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)  # a rank may see its own alone
    return torch.device(device_type, torch.cuda.current_device())


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh as this rank sees it: the unit that every primitive communicates on.

    `timeout` is how long the host waits for the others; None where the device does the waiting. `device` is the type of
    device whose tensors go on it, `mesh` the 1-D mesh that it was taken from, where there is one.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup
    timeout: timedelta | None
    device: str = "cpu"
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh | Axis) -> Axis:
        """The axis of a 1-D mesh, such as `mesh["ring"]`; an axis is itself.

        Raises:
            ValueError: the mesh has several axes, or not this rank; or it is no mesh.
        """
        if isinstance(mesh, Axis):
            return mesh
        check_axis(mesh)
        return replace(cls.on(mesh, 0), mesh=mesh)

    @classmethod
    def on(cls, mesh: DeviceMesh, place: int) -> Axis:
        """The axis that dim `place` of a mesh is."""
        names = mesh.mesh_dim_names
        group, device = mesh.get_group(place), mesh.device_type
        timeout = compat.host_timeout(group, device)
        name = names[place] if names else "axis" if mesh.ndim == 1 else f"#{place}"
        return cls(name, mesh.get_local_rank(place), mesh.size(place), group, timeout, device)

    @classmethod
    def alone(cls, name: str) -> Axis:
        """An axis of one rank, without a process group: nothing is ever sent on it."""
        return cls(name, 0, 1, cast(dist.ProcessGroup, None), None)

    def duplicate(self) -> Axis:
        """The same axis with a communicator of its own, so that what goes on it waits for nothing on this one.

        The first call creates a group, so every rank of the axis must make it, in the same order. Later calls return
        the same one, so that a method for each layer does not mean a communicator for each layer.
        """
        return self if self.size == 1 else replace(self, group=_subgroup(self, None))

    def part(self, ranks: Sequence[int]) -> Axis:
        """The axis of some of this one's ranks, in rising order, this rank among them.

        The first call creates a group, so every rank of the part must make it, in the same order.
        """
        chosen = tuple(ranks)
        group = _subgroup(self, chosen)
        return replace(self, rank=chosen.index(self.rank), size=len(chosen), group=group, mesh=None)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied model communicates where the model did

    def ranks(self) -> list[int]:
        """Global ranks along this axis, in axis order."""
        return dist.get_process_group_ranks(self.group)

    def everywhere(self) -> list[list[int]]:
        """`ranks` of this axis on all ranks of the mesh that it was cut from; where that is not known, this rank's."""
        return [self.ranks()] if self.mesh is None else compat.rows_of(self.mesh)


def check_axis(mesh: DeviceMesh) -> None:
    """Refuses what is not one axis of a mesh with this rank in it."""
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        hint = "; DeviceMesh.from_group makes one of it" if isinstance(mesh, dist.ProcessGroup) else ""
        raise ValueError(f"{type(mesh).__name__} is no mesh axis: a 1-D DeviceMesh is needed, as mesh['ring']{hint}")
    if mesh.ndim != 1:
        axes = ", ".join(mesh.mesh_dim_names or [f"#{i}" for i in range(mesh.ndim)])
        raise ValueError(f"one mesh axis is needed, got {mesh.ndim} ({axes}); pick one, as in mesh['ring']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not one of the ranks {mesh.mesh.tolist()} of {mesh}")


Asked = tuple[tuple[int, ...] | None, timedelta | None]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Asked, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of ranks of a group, by what was asked for. They go when it goes."""


def _subgroup(axis: Axis, ranks: tuple[int, ...] | None) -> dist.ProcessGroup:
    """A group of some ranks of the axis; of all (None) for its duplicate, which stays apart from the part with all."""
    known = _made.setdefault(axis.group, {})
    if (ranks, axis.timeout) not in known:
        known[ranks, axis.timeout] = _new_group(axis, ranks)
    return known[ranks, axis.timeout]


def _new_group(axis: Axis, ranks: tuple[int, ...] | None) -> dist.ProcessGroup:
    everyone = axis.ranks()
    chosen = everyone if ranks is None else [everyone[rank] for rank in ranks]
    which = "duplicate" if ranks is None else f"part {' '.join(map(str, ranks))}"
    name = f"{axis.group.group_name} {which} {axis.timeout}"
    made = compat.new_group(chosen, name, axis.timeout, compat.priority_options(axis.group, axis.device))
    for used in (axis.group, made) if ranks is None else (made,):
        _connect(used, axis.device)
    return made


def _connect(group: dist.ProcessGroup, device: str) -> None:
    """Has all ranks of a group use it together.

    NCCL connects a group at its first use, and wants all of its ranks there; an exchange may be of some only. Not by a
    barrier: where the group has a backend for the host too, that would connect gloo alone, and elsewhere it would guess
    which device is this rank's.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)
