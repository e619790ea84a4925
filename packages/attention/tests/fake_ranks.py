"""Runs fake ranks one after another in this process, without communication: for tests of bytes, not of values."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.attention import CommPlan
from armillary.attention.plans import Kind, Role
from armillary.core import CommLedger
from armillary.core.testing import mesh
from conformance.compositions import built_method, group_of, submesh

R = TypeVar("R")


def on_fake_ranks(ranks: int, function: Callable[..., R], *args: object) -> list[R]:
    """Returns the results of `function(*args)` by rank. Receive buffers keep their uninitialized values."""
    results = list[R]()
    for rank in range(ranks):
        forget_meshes()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            results.append(function(*args))
        finally:
            dist.destroy_process_group()
            forget_meshes()
    return results


def forget_meshes() -> None:
    """Empties the caches whose entries belong to a rank of a process group."""
    for cached in (mesh, built_method, submesh, group_of):
        cached.cache_clear()


def differences(ledger: CommLedger, plan: CommPlan, rank: int) -> list[str]:
    """Returns the differences between what a rank has sent and its plan."""
    phases: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    keys = product(get_args(Role), get_args(Kind), phases)
    planned: Counter[Any] = Counter({key: plan.bytes(rank, key[1], key[2], key[0]) for key in keys})
    sent: Counter[Any] = Counter(ledger.entries)
    return [
        f"{key}: {sent[key]} sent, {planned[key]} in the plan" for key in sent | planned if sent[key] != planned[key]
    ]
