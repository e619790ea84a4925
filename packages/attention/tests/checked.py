"""Runs cases of the conformance suite one after another."""

from collections.abc import Iterable
from dataclasses import replace

import torch.distributed as dist

from conformance import Case, check
from conformance.calling import ConformingMethod


def failures_of(attend: ConformingMethod, chosen: Iterable[Case], seeds: int = 0) -> list[str]:
    """Returns the errors of failing cases. Ranks stay synchronized after a failed check, so the next case can run."""
    failed = list[str]()
    for case in chosen:
        try:
            check(attend, replace(case, seed=case.seed + seeds))
        except AssertionError as failure:
            failed.append(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {failure}")
    return failed
