"""How far off a result is, and how far off is too far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.check import LIMITS, relative_error, root_mean_square
from conformance.case import Case
from conformance.expected import cancelling, expected, flash

ORDINARY = 8.0
"""An lse that `LIMITS` are meant for: a few hundred keys whose logits are about 1. It is larger under a large scale."""
LSE_LIMIT = 1e-4
"""In 16 bits: flash kernels for them take exp to about 20 bits. An lse that was itself rounded is off by 1e-3."""
FLASH_FACTOR = 2.0
"""In 16 bits: how much larger an error may be than that of flash attention on one device."""


DRAWS = 8
"""From how many draws of such tensors it is the worst, where that of one does not settle it: tensors of a few numbers
are a small sample, and flash happens to be exact on some. Of larger ones all draws are much alike."""


class Off(NamedTuple):
    """How far off one tensor is, and how far it may be: both relative to its norm."""

    error: float
    limit: float

    @property
    def fraction(self) -> float:
        """The error as a share of the limit."""
        if not self.error:
            return 0.0
        return self.error / self.limit if self.limit else float("inf")


def judge(case: Case, found: Mapping[str, Tensor]) -> dict[str, Off]:
    """Whole tensors that a method gave, against the oracle.

    Each relative to its own norm; or, where it is a small difference of larger tensors, relative to these.
    """
    off = _judged(case, found, {}, draws=1)
    if all(each.fraction <= 1 for each in off.values()):
        return off
    # An lse is a logarithm: what it is off by is relative already.
    taken = {"lse": 1.0} | {name: root_mean_square(x) for name, x in cancelling(case).items()}
    return _judged(case, found, taken, DRAWS)


def _judged(case: Case, found: Mapping[str, Tensor], floors: Mapping[str, float], draws: int) -> dict[str, Off]:
    exact, allowed = expected(case), limits(case, floors, draws)
    return {
        name: Off(relative_error(x, exact[name], floors.get(name, 0.0)), allowed[name]) for name, x in found.items()
    }


def limits(case: Case, floors: Mapping[str, float], draws: int) -> dict[str, float]:
    """The largest error that each tensor may have.

    Args:
        floors: of what errors are relative to, as `relative_error` takes them.
        draws: from how many draws of such tensors the largest error of flash attention is taken.
    """
    accumulated = torch.float64 if case.computed == torch.float64 else torch.float32
    # A logit is rounded at its own size, and a weight is off by as much of itself. Where a weight is large, its logit
    # is about the lse.
    lse = expected(case)["lse"]
    excess = max(0.0, float(lse.masked_fill(lse == -torch.inf, 0).abs().max()) - ORDINARY)
    limit = LIMITS[accumulated] + 2 * torch.finfo(accumulated).eps * excess
    if case.computed in LIMITS:
        return dict.fromkeys(expected(case), limit)
    several = [flash_errors(replace(case, softcap=None, seed=case.seed + i), floors) for i in range(draws)]
    found = {name: max(limit, *(FLASH_FACTOR * each[name] for each in several)) for name in several[0]}
    if case.sinks:  # a handful of numbers, rounded once
        found["dsinks"] = max(found["dsinks"], *(torch.finfo(dtype).eps for dtype in (case.dtype, case.computed)))
    return found | {"lse": max(limit, LSE_LIMIT)}


def flash_errors(case: Case, floors: Mapping[str, float]) -> dict[str, float]:
    """How far off flash attention on one device is."""
    exact = expected(case)
    return {name: relative_error(x, exact[name], floors.get(name, 0.0)) for name, x in flash(case).items()}
