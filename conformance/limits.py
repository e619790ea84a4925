"""Errors of results, and the largest errors allowed."""

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
"""The lse for which `LIMITS` hold: a few hundred keys with logits of about 1. A large scale makes it larger."""
LSE_LIMIT = 1e-4
"""In 16 bits, where flash kernels compute exp to about 20 bits. A rounded lse would be off by 1e-3."""
FLASH_FACTOR = 2.0
"""In 16 bits, the largest error relative to that of flash attention on one device."""


DRAWS = 8
"""Draws of tensors over which flash attention's error is the largest, if one draw fails the case: on tensors of a few
numbers flash attention is sometimes exact by chance."""


class Off(NamedTuple):
    """Error and limit of one tensor, relative to its norm."""

    error: float
    limit: float

    @property
    def fraction(self) -> float:
        """The error as a share of the limit."""
        if not self.error:
            return 0.0
        return self.error / self.limit if self.limit else float("inf")


def judge(case: Case, results: Mapping[str, Tensor]) -> dict[str, Off]:
    """Compares global results with the oracle.

    Errors are relative to the norm of the tensor, or of the larger terms of which it is a small difference.
    """
    off = _judge(case, results, {}, draws=1)
    if all(each.fraction <= 1 for each in off.values()):
        return off
    # An lse is a logarithm: its error is relative already.
    floors = {"lse": 1.0} | {name: root_mean_square(x) for name, x in cancelling(case).items()}
    return _judge(case, results, floors, DRAWS)


def _judge(case: Case, results: Mapping[str, Tensor], floors: Mapping[str, float], draws: int) -> dict[str, Off]:
    exact, allowed = expected(case), limits(case, floors, draws)
    return {
        name: Off(relative_error(x, exact[name], floors.get(name, 0.0)), allowed[name]) for name, x in results.items()
    }


def limits(case: Case, floors: Mapping[str, float], draws: int) -> dict[str, float]:
    """Returns the largest allowed error of each tensor.

    Args:
        floors: by tensor, as in `relative_error`.
        draws: draws of tensors over which flash attention's error is the largest.
    """
    accumulated = torch.float64 if case.computed == torch.float64 else torch.float32
    # A logit is rounded relative to its size, which makes the relative error of its weight. Where a weight is large,
    # its logit is about the lse.
    lse = expected(case)["lse"]
    excess = max(0.0, float(lse.masked_fill(lse == -torch.inf, 0).abs().max()) - ORDINARY)
    limit = LIMITS[accumulated] + 2 * torch.finfo(accumulated).eps * excess
    if case.computed in LIMITS:
        return dict.fromkeys(expected(case), limit)
    flash_runs = [flash_errors(replace(case, softcap=None, seed=case.seed + i), floors) for i in range(draws)]
    allowed = {name: max(limit, *(FLASH_FACTOR * run[name] for run in flash_runs)) for name in flash_runs[0]}
    if case.sinks:  # a handful of numbers, rounded once
        allowed["dsinks"] = max(allowed["dsinks"], *(torch.finfo(dtype).eps for dtype in (case.dtype, case.computed)))
    return allowed | {"lse": max(limit, LSE_LIMIT)}


def flash_errors(case: Case, floors: Mapping[str, float]) -> dict[str, float]:
    """Returns the errors of flash attention on one device."""
    exact = expected(case)
    return {name: relative_error(x, exact[name], floors.get(name, 0.0)) for name, x in flash(case).items()}
