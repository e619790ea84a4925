"""Process groups on NCCL: backends, time-outs, and the ranks that are blamed for a hang or a fault."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, FlatBuffer, build_mesh, start_exchange
from armillary.core.internal import compat
from gpu.check import Check, Row, Setting
from gpu.launch import Place, failure_on_ranks, joined, on_ranks

ASKED = timedelta(minutes=46)
"""A time-out that is no backend's default."""
PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
IMPLEMENTATIONS = {"0": "ProcessGroupNCCL", "1": "ProcessGroupNCCL2"}
"""The class of "nccl" in torch 2.15, by TORCH_DIST_USE_NCCL2."""


def check_groups(setting: Setting) -> Iterator[Row]:
    """Versions, the class of each group's backend, and each group's time-out."""
    yield Row("torch, CUDA, Python", f"{torch.__version__}, {torch.version.cuda}, {platform.python_version()}")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none here"
    yield Row("NCCL, cuDNN", f"{nccl}, {torch.backends.cudnn.version()}")
    yield Row("packages", ", ".join(filter(None, map(installed, PACKAGES))) or "none")
    first, *_ = on_ranks(setting, facts_of_groups)
    expected = IMPLEMENTATIONS.get(os.environ.get("TORCH_DIST_USE_NCCL2"))
    for name, (backend, _) in first.items():
        so, bar = expected in (None, backend), expected or "any"
        yield setting.is_so(f"backend of {name}", backend, so, bar, "TORCH_DIST_USE_NCCL2")
    for name, (_, seconds) in first.items():
        right = seconds == ASKED.total_seconds()
        yield setting.is_so(f"time-out of {name}", f"{seconds:g} s", right, f"{ASKED.total_seconds():g} s", "asked for")


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def facts_of_groups(place: Place) -> dict[str, tuple[str, float]]:
    """(backend class, time-out in seconds) of each of a run's groups, by name."""
    with joined(place, ASKED):
        ranks = dist.get_world_size()
        tp = 2 if ranks > 2 else 1  # so that FSDP's group is not the default group
        mesh = mesh_of_all(place, ring=ranks // (2 * tp), ulysses=2, tp=tp)
        groups = {"the default group": dist.group.WORLD}
        for name in ("ring", "ulysses"):
            if mesh[name].size() > 1:
                axis = Axis.of(mesh[name])
                groups |= {name: axis.group, f"{name}'s duplicate": axis.duplicate().group}
                groups[f"a part of {name}"] = axis.part(range(axis.size)).group
        groups["fsdp"] = compat.flatten(mesh, ("shard", "ring", "ulysses"), "fsdp").get_group()
        return {name: backend_facts(group, place.device) for name, group in groups.items()}


def backend_facts(group: Any, device: str) -> tuple[str, float]:
    backend = group._get_backend(torch.device(device))
    return type(backend).__name__, backend.options._timeout.total_seconds()


def mesh_of_all(place: Place, high_priority: tuple[str, ...] = ("ring", "ulysses"), **axes: int) -> DeviceMesh:
    """The trainer's mesh of all ranks, by default on the axis "ring"."""
    return build_mesh(
        place.device, timeout=ASKED, high_priority=high_priority, **axes or {"ring": dist.get_world_size()}
    )


# -- a rank that hangs -----------------------------------------------------------------------------------------------

STUCK = ("in an all-reduce", "in a ring's exchange")


def check_hang(setting: Setting) -> Iterator[Row]:
    """One rank sleeps while the others communicate: all other ranks' watchdogs must name only that rank."""
    stuck, limit = setting.ranks - 1, setting.size(5.0, 1.0)
    for way in STUCK:
        with TemporaryDirectory() as folder:
            failure_on_ranks(setting, hang, stuck, way, limit, folder, seconds=12 * limit + 60)
            named_ranks = [named_in(path) for path in sorted(Path(folder).glob("rank-*.txt"))]
        named = sorted(set().union(*named_ranks)) or "nobody"
        message = f"{named_ranks.count({stuck})} of {len(named_ranks)} reports, which name {named}"
        alone = len(named_ranks) >= setting.ranks - 1 and all(names == {stuck} for names in named_ranks)
        label = f"rank {stuck} on a disk, the others {way}: named alone"
        yield setting.is_so(label, message, alone, f"all, which name {stuck}", "armillary.train.watchdog")


def named_in(report: Path) -> set[int]:
    """Missing ranks in a watchdog's report."""
    return set(map(int, re.findall(r"^missing: rank (\d+)", report.read_text(), re.M)))


def hang(place: Place, stuck: int, way: str, limit: float, folder: str) -> None:
    """A run in which one rank never reaches the second step."""
    from armillary.train.internal import Watchdog  # needs pydantic

    with joined(place, ASKED) as rank:
        axis = Axis.of(mesh_of_all(place)["ring"])
        with Watchdog(limit, "the check's limit", Path(folder), "benchmarks/gpu") as watchdog:
            for step in (1, 2):
                watchdog.start_phase("training", step)
                if (step, rank) == (2, stuck):
                    time.sleep(3600)  # stands for a read from an unresponsive file system
                communicate(axis, way)


def communicate(axis: Axis, way: str) -> float:
    """Communicates along an axis and reads the result on the host, like the loss of a step."""
    x = torch.ones(1024, device=axis.device)
    if way == STUCK[0]:
        dist.all_reduce(x, group=axis.group)
        return x.sum().item()
    arrived = FlatBuffer.like([x])
    ahead, behind = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    start_exchange(axis, {ahead: FlatBuffer.of([x])}, {behind: arrived}).wait()
    return arrived.buffer.sum().item()


# -- a GPU that fails ------------------------------------------------------------------------------------------------


def check_fault(setting: Setting) -> Iterator[Row]:
    """After an illegal memory access a rank must raise CUDA's error, and not blame other ranks."""
    for rank, (kind, message) in enumerate(on_ranks(setting, fault)):
        is_cuda_error = kind not in ("none", "TimeoutError", "ConnectionError")
        yield setting.is_so(
            f"rank {rank}: {message[:200]}", kind, is_cuda_error, "no error of a peer", "torch.AcceleratorError"
        )


def fault(place: Place) -> tuple[str, str]:
    """Type and first line of the error of a rank that waits for an exchange after a faulty kernel."""
    with joined(place):
        axis = Axis.of(mesh_of_all(place)["ring"])
        communicate(axis, STUCK[1])
        try:
            outside = torch.full((1,), 10**6, device=place.device)
            torch.zeros(4, device=place.device)[outside]
            communicate(axis, STUCK[1])
        except Exception as error:
            return type(error).__name__, (str(error).splitlines() or [""])[0]
        return "none", "nothing was raised"


# -- gloo beside NCCL, and devices that the application has chosen -----------------------------------------------------


def check_mixed(setting: Setting) -> Iterator[Row]:
    """Sums over each axis of device and host tensors when the current device is not the local rank's."""
    for with_gloo in (False, True):
        sums = on_ranks(setting, sums_over_axes, with_gloo)
        for name in sums[0]:
            label = f"{'gloo and NCCL' if with_gloo else 'NCCL'}, GPUs in reverse order: {name}"
            wrongs = [each[name] for each in sums if each[name]]
            yield setting.is_so(label, wrongs[0] if wrongs else "right", not wrongs, "right", "sums of ranks")


def sums_over_axes(place: Place, with_gloo: bool) -> dict[str, str]:
    """Errors of sums by group; "" for a correct sum."""
    with joined(place, ASKED, with_gloo=with_gloo, chosen=True):
        ranks = dist.get_world_size()
        mesh = mesh_of_all(place, ring=ranks)
        axis = Axis.of(mesh["ring"])
        groups = {"the default group": dist.group.WORLD, "ring": axis.group, "ring's duplicate": axis.duplicate().group}
        wrong_sums = {name: wrong_sum(group, place.device, ranks) for name, group in groups.items()}
        if with_gloo:
            wrong_sums["the host's tensors"] = wrong_sum(dist.group.WORLD, "cpu", ranks)
            waits = compat.host_timeout(dist.group.WORLD, "cpu")
            wrong_sums["gloo's time-out"] = "" if waits == ASKED else f"{waits}"
        return wrong_sums


def wrong_sum(group: Any, device: str, ranks: int) -> str:
    """The error of an all-reduce of ones, or "" if it equals the number of ranks."""
    try:
        x = torch.ones(1, device=device)
        dist.all_reduce(x, group=group)
        return "" if x.item() == ranks else f"{x.item():g} of {ranks}"
    except RuntimeError as error:
        return str(error).splitlines()[0]


CHECKS = (
    Check(
        "groups",
        "Backends of process groups, and their time-outs",
        check_groups,
        holds="46:00, as asked, on every group",
        seconds=30,
        gpus=2,
        nccl=True,
    ),
    Check(
        "hang",
        "Who is named when a rank hangs",
        check_hang,
        holds="the rank that hangs, and no other",
        seconds=60,
        gpus=2,
        nccl=True,
    ),
    Check(
        "fault",
        "Who is blamed when a kernel fails",
        check_fault,
        holds="CUDA's error, and no other rank",
        seconds=30,
        gpus=2,
        nccl=True,
    ),
    Check(
        "mixed",
        "Gloo beside NCCL, on devices that the application has chosen",
        check_mixed,
        holds="sums on every group",
        seconds=30,
        gpus=2,
        nccl=True,
    ),
)
