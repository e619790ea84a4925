"""Meshes, their axes, and the process groups of both."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from armillary.core import compat
from armillary.core.argument_checks import integer

ALL_AXES: tuple[str, ...] = ("pipe", "replicate", "shard", "nodes", "devices", "ring", "ulysses", "tp")
"""All names of axes, outermost to innermost. Neighbouring ranks of the innermost axis are on the same node, so the axis
that communicates most gets the fastest links (USP, arXiv 2405.07719, tip 7)."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Backend of torch.distributed by device type."""
TIMEOUT = timedelta(minutes=10)
"""Default time-out of collectives and exchanges."""

STORE_POLL = 0.05
"""Seconds between two polls of the rendezvous store."""
THREAD_FOLDER, GLOO_THREAD = Path("/proc/self/task"), "pt_gloo_runloop"
"""The threads of this process, and the name that torch gives to those of gloo groups."""
THREAD_POLL, MAX_WAIT = 0.01, 10.0
"""Seconds between two polls of gloo's threads, and maximum seconds in total."""


def build_mesh(
    device_type: str,
    *,
    pipe: int | None = None,
    replicate: int = 1,
    shard: int = 1,
    nodes: int | None = None,
    devices: int | None = None,
    ring: int = 1,
    ulysses: int = 1,
    tp: int = 1,
    timeout: timedelta = TIMEOUT,
    high_priority: Sequence[str] = (),
    max_ctas: int | None = None,
) -> DeviceMesh:
    """Builds a `DeviceMesh` with the axes `replicate`, `shard`, `ring`, `ulysses` and `tp`, and others on request.

    Outermost first: `pipe`, `replicate`, `shard`, `nodes`, `devices`, `ring`, `ulysses`, `tp`. Every rank of the world
    must call it. If there is no default process group, starts one: with the ranks of torchrun's environment, or without
    that environment with a single rank.

    Args:
        device_type: "cpu" (gloo) or "cuda" (nccl).
        replicate, shard, ring, ulysses, tp: number of ranks on each axis; the product over all axes must be the world
            size.
        pipe: number of pipeline stages (`torch.distributed.pipelining`); None for a mesh without this axis.
        nodes, devices: sizes of two sequence axes instead of `ring`, for methods that treat the networks between and
            within nodes differently, such as `Ring(mesh["nodes"], inner=TokenRing(mesh["devices"]))`. None for a mesh
            without these axes.
        timeout: the time that a collective or exchange on any axis may wait before it raises.
        high_priority: names of axes, such as "ring". Each gets a separate communicator on a CUDA stream of high
            priority, so that its NCCL kernels start before queued attention kernels. Without it, an axis that contains
            all ranks shares the default group's communicator, where its messages queue behind FSDP's. Ignored on "cpu".
        max_ctas: maximum number of thread blocks of an NCCL kernel on the axes of `high_priority`; by default NCCL
            decides.

    Raises:
        ValueError: an axis below 1, axes whose product is not the world size, a device type without a backend or
            without a device on this machine, an invalid timeout, an unknown name in `high_priority`, or `max_ctas`
            below 1. Raised before any communication.
        TimeoutError, torch.distributed.DistError: as `start_process_group`.
    """
    # Checked before the rendezvous: a rank that raises after it would leave the other ranks waiting.
    arguments = zip(ALL_AXES, (pipe, replicate, shard, nodes, devices, ring, ulysses, tp), strict=True)
    sizes = {name: integer(f"axis {name}", size) for name, size in arguments if size is not None}
    check_axes(sizes, world_size())
    backend_of(device_type)
    check_timeout(timeout)
    unknown = [name for name in high_priority if name not in ALL_AXES]
    if unknown:
        raise ValueError(f"high_priority={tuple(high_priority)}: no axis {unknown[0]!r}; known: {', '.join(ALL_AXES)}")
    if max_ctas is not None and integer("max_ctas", max_ctas) < 1:
        raise ValueError(f"max_ctas={max_ctas} must be at least 1, or None for NCCL's choice")
    if not dist.is_initialized():
        start_process_group(device_type, timeout)
    priority_axes = [name for name in high_priority if device_type == "cuda" and sizes.get(name, 1) > 1]
    override: dict[int | str, Any] = {name: compat.high_priority(timeout, max_ctas) for name in priority_axes}
    if override and compat.has_several_backends():
        # torch passes options without a backend's name to every backend of the group: gloo ignores NCCL's options and
        # overwrites them with its defaults, time-out included. So NCCL is named.
        override = {name: (backend_of(device_type), options) for name, options in override.items()}
    names, shape = tuple(sizes), tuple(sizes.values())
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=override or None)
    # init_device_mesh has no time-out argument: torch gives each new group the default of its backend.
    for name in names:
        compat.set_timeout(timeout, mesh[name].get_group())
    return mesh


def check_axes(sizes: dict[str, int], world: int) -> None:
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
    if not isinstance(device_type, str) or device_type not in BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"no backend for device type {device_type!r}; known: {', '.join(BACKENDS)}")
    return BACKENDS[device_type]


def check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"timeout={timeout!r}: a datetime.timedelta above 0 is needed, such as timedelta(minutes=10)")


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh as this rank sees it: the unit that every primitive communicates on.

    Args:
        name: the axis' name in the mesh.
        rank: index of this rank on the axis.
        size: number of ranks on the axis.
        group: process group of the axis.
        timeout: the time that the host may wait for other ranks; None on CUDA, where the stream waits instead.
        device: device type of the tensors that are sent.
        mesh: the 1-D mesh that `of` was given; otherwise None.
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
        """Returns the axis of a 1-D mesh, such as `mesh["ring"]`; an axis is returned unchanged.

        Raises:
            ValueError: not a mesh, a mesh of several axes, or a mesh without this rank.
        """
        if isinstance(mesh, Axis):
            return mesh
        if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            hint = "; DeviceMesh.from_group converts a process group" if isinstance(mesh, dist.ProcessGroup) else ""
            kind = type(mesh).__name__
            raise ValueError(f"{kind} is not a mesh axis: a 1-D DeviceMesh is needed, as mesh['ring']{hint}")
        if mesh.ndim != 1:
            axes = ", ".join(mesh.mesh_dim_names or [f"#{i}" for i in range(mesh.ndim)])
            raise ValueError(f"one mesh axis is needed, got {mesh.ndim} ({axes}); pick one, as in mesh['ring']")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not one of the ranks {mesh.mesh.tolist()} of {mesh}")
        return replace(cls.on(mesh, 0), mesh=mesh)

    @classmethod
    def on(cls, mesh: DeviceMesh, mesh_dim: int) -> Axis:
        names = mesh.mesh_dim_names
        group, device = mesh.get_group(mesh_dim), mesh.device_type
        timeout = compat.host_timeout(group, device)
        name = names[mesh_dim] if names else "axis" if mesh.ndim == 1 else f"#{mesh_dim}"
        return cls(name, mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim), group, timeout, device)

    @classmethod
    def alone(cls, name: str) -> Axis:
        """Returns an axis of one rank without a process group, for calls that communicate nothing."""
        return cls(name, 0, 1, cast(dist.ProcessGroup, None), None)

    def duplicate(self) -> Axis:
        """Returns this axis with a second communicator, whose messages do not queue behind those of the first.

        The first call creates a process group, so every rank of the axis must make it, in the same order as its other
        calls that create groups. Later calls return the same group.
        """
        return self if self.size == 1 else replace(self, group=_subgroup(self, None))

    def part(self, ranks: Sequence[int]) -> Axis:
        """Returns the axis over `ranks`, indices on this axis in rising order that include this rank.

        The first call for these ranks creates a process group, so each of them must make it, as in `duplicate`.
        """
        indices = tuple(ranks)
        group = _subgroup(self, indices)
        return replace(self, rank=indices.index(self.rank), size=len(indices), group=group, mesh=None)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied model communicates over the same group

    def ranks(self) -> list[int]:
        """Returns the global ranks of this axis, in axis order."""
        return dist.get_process_group_ranks(self.group)

    def parallel_ranks(self) -> list[list[int]]:
        """Returns the global ranks of each 1-D slice of the mesh along this axis; without `mesh` only of this axis."""
        return [self.ranks()] if self.mesh is None else compat.parallel_ranks(self.mesh)


def divide_axis(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """Returns a mesh of several axes, outermost first, over the ranks of a 1-D mesh in their order.

    The first call creates process groups as `Axis.part` does: only the ranks of the mesh take part.

    Args:
        sizes: number of ranks on each new axis, by name.

    Raises:
        ValueError: sizes that do not multiply to the number of ranks; not a 1-D mesh.
    """
    axis = Axis.of(mesh)
    check_axes(sizes, axis.size)
    indices = torch.arange(axis.size).view(*sizes.values())
    lines = [indices.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(sizes.values())]
    groups = [axis.part(next(line for line in parallel if axis.rank in line)).group for parallel in lines]
    ranks = torch.tensor(axis.ranks())[indices]
    return DeviceMesh.from_group(groups, axis.device, mesh=ranks, mesh_dim_names=tuple(sizes))


SubgroupKey = tuple[tuple[int, ...] | None, timedelta | None]
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[SubgroupKey, dist.ProcessGroup]] = WeakKeyDictionary()
"""Subgroups of each process group, by (ranks, time-out). Ranks None stands for a duplicate over all ranks of the group.
Subgroups are freed with their group."""


def _subgroup(axis: Axis, ranks: tuple[int, ...] | None) -> dist.ProcessGroup:
    """Returns the cached process group of some ranks of the axis; with None, the duplicate over all its ranks."""
    subgroups, key = _subgroups.setdefault(axis.group, {}), (ranks, axis.timeout)
    if key in subgroups:
        return subgroups[key]
    axis_ranks = axis.ranks()
    group_ranks = axis_ranks if ranks is None else [axis_ranks[rank] for rank in ranks]
    kind = "duplicate" if ranks is None else f"part {' '.join(map(str, ranks))}"
    name = f"{axis.group.group_name} {kind} {axis.timeout}"
    # The group's own time-out, because `axis.timeout` is None on CUDA: torch would take NCCL's default of 10 minutes.
    timeout = compat.group_timeout(axis.group, axis.device)
    group = compat.new_group(group_ranks, name, timeout, compat.priority_options(axis.group, axis.device))
    # Ranks without messages skip an exchange on the axis or its duplicate, so both must be connected before the first.
    for unconnected_group in (axis.group, group) if ranks is None else (group,):
        _connect(unconnected_group, axis.device)
    subgroups[key] = group
    return group


def _connect(group: dist.ProcessGroup | None, device: str) -> None:
    # Connects all ranks by a small all-reduce. NCCL connects a group at its first use, in which all ranks must take
    # part, but an exchange may involve only some. Gloo connects when the group is created, but one rank may be done
    # before another. A barrier does not suffice: in a group with gloo and NCCL it connects only gloo, and in a group
    # with NCCL alone it guesses the device.
    dist.all_reduce(torch.zeros(1, device=device), group=group)


# -- default process group --------------------------------------------------------------------------------------------


def world_size() -> int:
    """Returns the size of the default process group; before it starts, torchrun's WORLD_SIZE, or 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start_process_group(
    device_type: str, timeout: timedelta = TIMEOUT, with_gloo: bool = False, bind: bool = True
) -> None:
    """Starts the default process group: with the ranks of torchrun's environment, or without that with a single rank.

    Args:
        device_type: "cpu" or "cuda".
        timeout: the time that the rendezvous and operations on the group may wait.
        with_gloo: True adds a gloo backend for CPU tensors to the group of a "cuda" device.
        bind: True binds NCCL to this rank's GPU: NCCL then connects at once, and new groups split its communicator.
            Ignored with `with_gloo`, because torch cannot reliably split groups of several backends. From torch 2.15
            on, NCCL is always bound (`binds_device`).

    Raises:
        ValueError: a device type without a backend, or without a device on this machine; an invalid time-out.
        TimeoutError, or torch.distributed.DistError where torchrun provides no store: other ranks did not arrive.
    """
    device_backend = backend_of(device_type)
    check_timeout(timeout)
    device = own_device(device_type)
    all_backends = ",".join(f"{kind}:{backend}" for kind, backend in BACKENDS.items())
    backend = all_backends if with_gloo and device is not None else device_backend
    bound_device = device if device is not None and binds_device(bind, with_gloo) else None
    start = partial(dist.init_process_group, backend, timeout=timeout, device_id=bound_device)
    if "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        start(store=rendezvous(store, rank, ranks, timeout), rank=rank, world_size=ranks)
        if "gloo" in backend:
            # Gloo returns as soon as this rank has connected to its peers. If this rank then exits or destroys the
            # group, a peer that is still connecting fails with "connection closed by peer".
            _connect(None, "cpu")
    else:
        start(store=dist.HashStore(), rank=0, world_size=1)


def binds_device(bind: bool, with_gloo: bool) -> bool:
    # As `bind` asks for it, and always with a backend that binds itself. That one must be given the device: by default
    # it takes LOCAL_RANK's, but the caller may have chosen another.
    return (bind and not with_gloo) or compat.nccl_binds_devices()


def own_device(device_type: str) -> torch.device | None:
    """Returns this rank's accelerator and makes it the current device; None for "cpu"."""
    if device_type == "cpu":
        return None
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device type {device_type!r}, but no such device is on this machine; use 'cpu'")
    if not torch.cuda.is_initialized():  # otherwise the caller has chosen a device, as by torch.cuda.set_device
        # Modulo, because CUDA_VISIBLE_DEVICES may show each rank only its own GPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return torch.device(device_type, torch.cuda.current_device())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device. For a GPU the copy is queued on the current stream and the host continues."""
    # Only copies from pinned memory are asynchronous.
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)


def rendezvous(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """Returns `store` behind a prefix that only the ranks of this start use. Every rank must call it."""
    # torchrun restarts ranks with the store of the failed ranks, which still has the addresses of these, and does not
    # number starts in a way that is the same on all hosts. So the ranks agree on a new prefix.
    end, token = time.monotonic() + timeout.total_seconds(), token_hex(8)
    # Step 2, on the other ranks: each answers the announced name with a random token.
    if rank > 0:
        return dist.PrefixStore(_answer(store, token, rank, end, timeout), store)
    # Step 1, on rank 0: announce a random name for this start.
    name = token
    store.set("start", name)
    # Step 3, on rank 0: write all tokens under the name. Answers to earlier starts have other names in their keys, so
    # only ranks of this start are counted. A rank that reads its own token in this list belongs to this start.
    missing_ranks = list(range(1, ranks))
    while missing_ranks := [rank for rank in missing_ranks if not store.check([f"{name}/{rank}"])]:
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {missing_ranks} of {ranks} did not arrive within {timeout}")
        time.sleep(STORE_POLL)
    store.set(f"{name}/all", " ".join(store.get(f"{name}/{rank}").decode() for rank in range(1, ranks)))
    return dist.PrefixStore(name, store)


def _answer(store: dist.Store, token: str, rank: int, end: float, timeout: timedelta) -> str:
    """Step 2 of `rendezvous`: returns the name of the start whose list has this rank's token."""
    answered_starts = set[str]()
    while time.monotonic() <= end:
        name = store.get("start").decode() if store.check(["start"]) else ""
        # This may be the name of an earlier start, whose rank 0 will write no tokens. A later name will replace it.
        if name and name not in answered_starts:
            store.set(f"{name}/{rank}", token)
            answered_starts.add(name)
        if name and store.check([f"{name}/all"]) and token in store.get(f"{name}/all").decode().split():
            return name
        time.sleep(STORE_POLL)
    raise TimeoutError(
        f"rank {rank} waited {timeout} for rank 0 and all other ranks; the error of rank 0 names the missing ones"
    )


# -- exit -------------------------------------------------------------------------------------------------------------


@atexit.register
def wait_for_gloo_threads() -> None:
    """Waits until the threads of all gloo groups sleep, at most `MAX_WAIT` seconds. Linux only."""
    # A thread whose collective waits for another rank sleeps too, so this never waits for other ranks.
    # After a collective, gloo's thread first wakes the caller and then drops the tensors, for which it needs the GIL.
    # If Python exits in between, it ends the thread that requests the GIL, in the middle of torch's destructors: the
    # process aborts with "terminate called without an active exception" (pytorch/pytorch#190489).
    # `destroy_process_group` does not stop these threads while an object, such as a mesh, refers to the group.
    end, quiet_polls = time.monotonic() + MAX_WAIT, 0
    # A thread that waits for the GIL sleeps as well. It gets the GIL during the pause, and is then awake or finished.
    # So only several polls in a row show that all threads are idle.
    while (states := gloo_thread_states()) and quiet_polls < 3 and time.monotonic() < end:
        quiet_polls = quiet_polls + 1 if set(states) == {"S"} else 0
        time.sleep(THREAD_POLL)


def gloo_thread_states() -> list[str]:
    states: list[str] = []
    with suppress(OSError):  # no /proc
        for thread in THREAD_FOLDER.iterdir():
            with suppress(OSError):  # the thread has just ended
                # /proc/.../stat is "id (name) state ...".
                name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
                states += [fields.split()[0]] if name == GLOO_THREAD else []
    return states
