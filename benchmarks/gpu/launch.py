"""Ranks of a check: a test world whose process group is replaced by the trainer's, on NCCL."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from armillary.core import start_process_group
from armillary.core.testing import RankFailed, World
from gpu.check import Setting

R = TypeVar("R")


class Place(NamedTuple):
    """The device type of the ranks, and a free port for their rendezvous."""

    device: str
    port: int


def on_ranks(
    setting: Setting, function: Callable[..., R], *args: Any, seconds: float = 120.0, ranks: int | None = None
) -> list[R]:
    """Calls `function(place, *args)` on fresh ranks, by default one for each GPU; returns the results in rank order.

    Raises:
        RankFailed: a rank raised, exited, or took longer than `seconds`.
    """
    world = World(ranks or setting.ranks)
    try:
        return world.run(function, Place(setting.device.type, free_port()), *args, timeout=seconds)
    finally:
        world.close(kill=True)  # a rank with a failed GPU may not exit by itself


def failure_on_ranks(setting: Setting, function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> str:
    """Returns why a call that ends its ranks failed; "" if it did not."""
    try:
        on_ranks(setting, function, *args, seconds=seconds)
    except RankFailed as failure:
        return str(failure)
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextmanager
def joined(
    place: Place, timeout: timedelta = timedelta(minutes=2), with_gloo: bool = False, chosen: bool = False
) -> Generator[int]:
    """Starts the process group of `torchrun` and the trainer; yields this rank.

    Args:
        with_gloo: adds gloo to NCCL.
        chosen: the application has already selected GPUs, in reverse order.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)}
    if place.device == "cuda" and chosen:
        torch.cuda.set_device(ranks - 1 - rank)
    start_process_group(place.device, timeout, with_gloo=with_gloo)
    try:
        yield rank
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


SEPARATE_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
"""Settings under which NCCL sends between processes of one machine through sockets of the loopback interface."""


@contextmanager
def sharing_gpu(place: Place, timeout: timedelta = timedelta(minutes=2)) -> Generator[int]:
    """As `joined`, with all ranks on the first GPU.

    NCCL refuses two ranks of one host on one GPU. It takes the host's name from NCCL_HOSTID.
    """
    os.environ |= SEPARATE_HOSTS | {"NCCL_HOSTID": f"rank-{dist.get_rank()}"}
    if place.device == "cuda":
        torch.cuda.set_device(0)
    with joined(place, timeout) as rank:
        yield rank


def worst(results: list[list[float]]) -> Iterator[float]:
    """The maximum of each value over ranks."""
    return map(max, zip(*results, strict=True))


def environment() -> dict[str, str]:
    """This process's environment with the packages of this repository on the path."""
    packages = Path(__file__).parent.parent.parent / "packages"
    paths = [*map(str, sorted(packages.glob("*/src"))), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
