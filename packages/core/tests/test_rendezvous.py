"""Rendezvous at a store with entries of earlier runs."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from armillary.core.mesh import rendezvous


def met(store: dist.Store, ranks: list[int], size: int, seconds: float) -> list[dist.Store]:
    """Returns the stores of `ranks`, which start at the same time and wait for `size` ranks."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        actual = [threads.submit(rendezvous, store, rank, size, timedelta(seconds=seconds)) for rank in ranks]
        return [one.result() for one in actual]


def test_each_start_has_its_own_part_of_the_store():
    store = dist.HashStore()
    first, second = met(store, [0, 1, 2], 3, 60), met(store, [2, 1, 0], 3, 60)
    for stores, text in ((first, "old"), (second, "new")):
        stores[0].set("address", text)
        assert [one.get("address") for one in stores] == [text.encode()] * 3
    assert first[1].get("address") == b"old"


def test_missing_rank_is_named_and_old_entries_are_ignored():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of 4 .* within 0:00:00.3"):
        met(store, [0, 1, 3], 4, 0.3)
    assert len(met(store, [3, 2, 1, 0], 4, 60)) == 4
