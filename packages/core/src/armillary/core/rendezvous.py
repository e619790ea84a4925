"""Rendezvous of ranks in a store that may still have entries of an earlier start of the same run."""

from __future__ import annotations

import time
from datetime import timedelta
from secrets import token_hex

import torch.distributed as dist

PAUSE = 0.05
"""Seconds between two polls of the store."""


def rendezvous(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """Returns `store` behind a prefix that only the ranks of this start use. Every rank must call it.

    torchrun restarts ranks with the store of the failed ranks, which still has the addresses of these, and does not
    number starts in a way that is the same on all hosts. So the ranks agree on a new prefix:

    1. Rank 0 draws a random name for the start and announces it under the key "start".
    2. Every other rank answers the name that it reads with a random token.
    3. Rank 0 writes all tokens under the name. A rank that reads its own token there belongs to this start; a rank that
       has answered the name of an earlier start reads "start" again.

    Raises:
        TimeoutError: not all ranks arrived within `timeout`. On rank 0 the message has the missing ranks.
    """
    end, token = time.monotonic() + timeout.total_seconds(), token_hex(8)
    name = _gather(store, token, ranks, end, timeout) if rank == 0 else _answer(store, token, rank, end, timeout)
    return dist.PrefixStore(name, store)


def _gather(store: dist.Store, name: str, ranks: int, end: float, timeout: timedelta) -> str:
    """Steps 1 and 3, on rank 0. Returns `name`, the name of the start."""
    store.set("start", name)
    # Answers to earlier starts have other names in their keys, so only ranks of this start are counted.
    missing_ranks = list(range(1, ranks))
    while missing_ranks := [rank for rank in missing_ranks if not store.check([f"{name}/{rank}"])]:
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {missing_ranks} of {ranks} did not arrive within {timeout}")
        time.sleep(PAUSE)
    store.set(f"{name}/all", " ".join(store.get(f"{name}/{rank}").decode() for rank in range(1, ranks)))
    return name


def _answer(store: dist.Store, token: str, rank: int, end: float, timeout: timedelta) -> str:
    """Step 2, on the other ranks: answers each announced start, and returns the name of the one that has its token."""
    answered_starts = set[str]()
    while time.monotonic() <= end:
        name = store.get("start").decode() if store.check(["start"]) else ""
        # This may be the name of an earlier start, whose rank 0 will write no tokens. A later name will replace it.
        if name and name not in answered_starts:
            store.set(f"{name}/{rank}", token)
            answered_starts.add(name)
        if name and store.check([f"{name}/all"]) and token in store.get(f"{name}/all").decode().split():
            return name
        time.sleep(PAUSE)
    raise TimeoutError(
        f"rank {rank} waited {timeout} for rank 0 and all other ranks; the error of rank 0 names the missing ones"
    )
