"""Ranks that meet at a store where others have met before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from armillary.core.rendezvous import rendezvous


def met(store: dist.Store, ranks: list[int], size: int, seconds: float) -> list[dist.Store]:
    """What each of `ranks` gets, all at once, out of `size` that are awaited."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        actual = [threads.submit(rendezvous, store, rank, size, timedelta(seconds=seconds)) for rank in ranks]
        return [one.result() for one in actual]


def test_each_start_has_a_part_of_the_store_for_itself():
    store = dist.HashStore()
    first, second = met(store, [0, 1, 2], 3, 60), met(store, [2, 1, 0], 3, 60)
    for stores, text in ((first, "old"), (second, "new")):
        stores[0].set("address", text)
        assert [one.get("address") for one in stores] == [text.encode()] * 3
    assert first[1].get("address") == b"old"


def test_a_missing_rank_is_named_and_its_entries_do_not_disturb_the_next_start():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of 4 .* within 0:00:00.3"):
        met(store, [0, 1, 3], 4, 0.3)
    assert len(met(store, [3, 2, 1, 0], 4, 60)) == 4
