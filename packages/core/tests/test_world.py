"""The test worlds: results by rank, and failures that name the rank."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from armillary.core.testing import RankFailed, World, Worlds
from armillary.core.testing import world as world_module
from armillary.core.testing.world import group_count


def add_ranks(offset: int) -> int:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return int(total)


def process() -> int:
    return os.getpid()


def test_world_is_replaced_after_some_calls(monkeypatch):
    monkeypatch.setattr(world_module, "MAX_CALLS", 3)
    worlds = Worlds()
    pids = [worlds(1).run(process)[0] for _ in range(7)]
    worlds.close()
    assert [pid == pids[0] for pid in pids[:4]] == [True, True, True, False] and len(set(pids)) == 3


def rank_one_makes_a_group_by_itself() -> tuple[int, int]:
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    return os.getpid(), group_count()


def all_make_a_group() -> int:
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    return os.getpid()


def test_ranks_with_different_group_counts_are_replaced():
    with World(2, timeout=20) as world:
        first = world.run(rank_one_makes_a_group_by_itself)
        second, third = world.run(all_make_a_group), world.run(all_make_a_group)
    torch_counts_them = len({groups for _, groups in first}) > 1  # torch 2.11 does not count these groups
    assert {pid for pid, _ in first}.isdisjoint(second) == torch_counts_them and second == third


def rank_two_sleeps() -> None:
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.barrier()


def rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is not a head count")
    dist.barrier()


def rank_zero_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_results_come_in_rank_order_and_worlds_are_reused(worlds):
    assert worlds(4).run(add_ranks, 1) == [10] * 4
    assert worlds(4).run(dist.get_rank) == [0, 1, 2, 3]


def test_hung_rank_is_named_with_its_stack():
    with World(3) as world, pytest.raises(RankFailed) as failure:
        world.run(rank_two_sleeps, timeout=2)
    assert re.search(
        r"rank 2 did not answer within 2 s; it is in rank_two_sleeps \(test_world.py:\d+\)", str(failure.value)
    )


def test_failed_and_dead_ranks_are_named_and_the_world_recovers(monkeypatch):
    monkeypatch.setattr(world_module, "GRACE", 0.1)  # rank 0 waits in a barrier that rank 1 never enters
    with World(2) as world:
        with pytest.raises(RankFailed, match=r"(?s)rank 1 raised:.*rank_one_raises.*seven is not") as failure:
            world.run(rank_one_raises)
        assert "rank 0 had not answered" in str(failure.value)
        assert world.run(add_ranks, 0) == [1, 1]
        with pytest.raises(RankFailed, match=r"rank 0 died \(exit code 3\)"):
            world.run(rank_zero_dies)
