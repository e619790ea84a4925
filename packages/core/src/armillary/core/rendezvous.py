"""Ranks that find each other, and not the traces of those that were there before."""

from __future__ import annotations

import time
from datetime import timedelta
from secrets import token_hex

import torch.distributed as dist

PAUSE = 0.05
"""Seconds between two looks at the store."""


def rendezvous(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """The part of `store` that belongs to these processes alone; every rank must call it.

    torchrun starts ranks again with the store of those that have failed, where the old ones' addresses still stand, and
    nothing that it tells ranks sets one start apart from another on all hosts. So rank 0 names the start, every rank
    answers with a mark of its own, and goes on once rank 0 has told that mark back.

    Raises:
        TimeoutError: not all have come within `timeout`; on rank 0 with the ranks that are missing.
    """
    end, mark = time.monotonic() + timeout.total_seconds(), token_hex(8)
    name = _gather(store, mark, ranks, end, timeout) if rank == 0 else _answer(store, mark, rank, end, timeout)
    return dist.PrefixStore(name, store)


def _gather(store: dist.Store, name: str, ranks: int, end: float, timeout: timedelta) -> str:
    """What rank 0 does: names the start after its mark, and waits for all others."""
    store.set("start", name)
    missing = list(range(1, ranks))
    while missing := [rank for rank in missing if not store.check([f"{name}/{rank}"])]:
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {missing} of {ranks} have not come within {timeout}")
        time.sleep(PAUSE)
    store.set(f"{name}/all", " ".join(store.get(f"{name}/{rank}").decode() for rank in range(1, ranks)))
    return name


def _answer(store: dist.Store, mark: str, rank: int, end: float, timeout: timedelta) -> str:
    """What the others do: answer each start that is named, until one knows them."""
    answered = set[str]()
    while time.monotonic() <= end:
        name = store.get("start").decode() if store.check(["start"]) else ""
        if name and name not in answered:
            store.set(f"{name}/{rank}", mark)
            answered.add(name)
        if name and store.check([f"{name}/all"]) and mark in store.get(f"{name}/all").decode().split():
            return name
        time.sleep(PAUSE)
    raise TimeoutError(f"rank {rank} waited {timeout} for rank 0, or with it for others; rank 0 says for whom")
