"""Rendezvous that ignores stale entries of earlier starts."""

from __future__ import annotations

import time
from datetime import timedelta
from secrets import token_hex

import torch.distributed as dist

PAUSE = 0.05
"""Seconds between two polls of the store."""


def rendezvous(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """Returns a prefix of `store` that is used by these processes alone. Every rank must call it.

    torchrun restarts ranks with the store of the failed ones, which still has their addresses, and has no identifier of
    a start that is the same on all hosts. So rank 0 announces a name for the start, every rank answers with a random
    token, and continues once rank 0 has echoed that token.

    Raises:
        TimeoutError: not all ranks arrived within `timeout`; on rank 0 with the missing ranks.
    """
    end, token = time.monotonic() + timeout.total_seconds(), token_hex(8)
    name = _gather(store, token, ranks, end, timeout) if rank == 0 else _answer(store, token, rank, end, timeout)
    return dist.PrefixStore(name, store)


def _gather(store: dist.Store, name: str, ranks: int, end: float, timeout: timedelta) -> str:
    """Runs rank 0: announces the start under its token, and waits for all other ranks."""
    store.set("start", name)
    # Answers to earlier starts are under their names, so only ranks of this start are counted.
    missing_ranks = list(range(1, ranks))
    while missing_ranks := [rank for rank in missing_ranks if not store.check([f"{name}/{rank}"])]:
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {missing_ranks} of {ranks} did not arrive within {timeout}")
        time.sleep(PAUSE)
    store.set(f"{name}/all", " ".join(store.get(f"{name}/{rank}").decode() for rank in range(1, ranks)))
    return name


def _answer(store: dist.Store, token: str, rank: int, end: float, timeout: timedelta) -> str:
    """Runs another rank: answers each announced start until one of them echoes its token."""
    answered_starts = set[str]()
    while time.monotonic() <= end:
        name = store.get("start").decode() if store.check(["start"]) else ""
        # "start" may still name an earlier start, whose rank 0 will never echo; a later name replaces it.
        if name and name not in answered_starts:
            store.set(f"{name}/{rank}", token)
            answered_starts.add(name)
        if name and store.check([f"{name}/all"]) and token in store.get(f"{name}/all").decode().split():
            return name
        time.sleep(PAUSE)
    raise TimeoutError(
        f"rank {rank} waited {timeout} for rank 0 and all other ranks; the error of rank 0 names the missing ones"
    )
