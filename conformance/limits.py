"""Errors of results, and the largest errors allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core.testing import LIMITS, relative_error, root_mean_square
from conformance.case import Case
from conformance.expected import cancelling, expected, flash

TYPICAL_LSE = 8.0
"""Largest lse for which `LIMITS` hold as they are: that of a few hundred keys with logits of about 1. A large scale
gives a larger lse, and limits grow with it."""
LSE_LIMIT = 1e-4
"""Limit of lse for inputs in 16 bits: flash kernels compute exp to about 20 bits. An lse in bfloat16 would have an
error of 1e-3."""
FLASH_FACTOR = 2.0
"""Limit of other tensors in 16 bits, as a multiple of the error of flash attention on one device."""


DRAWS = 8
"""If a case fails, the limit is computed again from the largest error of flash attention over this many draws of
tensors: on tensors of a few numbers flash attention is sometimes exact by chance."""


class ErrorAndLimit(NamedTuple):
    """Error and limit of one tensor, relative to its norm."""

    error: float
    limit: float

    @property
    def fraction(self) -> float:
        """The error divided by the limit."""
        if not self.error:
            return 0.0
        return self.error / self.limit if self.limit else float("inf")


def judge(case: Case, results: Mapping[str, Tensor]) -> dict[str, ErrorAndLimit]:
    """Compares global results with the oracle.

    Errors are relative to the norm of the tensor. If one is too large, they are relative to the norm of the terms whose
    difference is the tensor, where that is larger: see `cancelling`.
    """
    tensor_errors = _judge(case, results, {}, draws=1)
    if all(each.fraction <= 1 for each in tensor_errors.values()):
        return tensor_errors
    # An lse is a logarithm: its error is relative already.
    floors = {"lse": 1.0} | {name: root_mean_square(x) for name, x in cancelling(case).items()}
    return _judge(case, results, floors, DRAWS)


def _judge(
    case: Case, results: Mapping[str, Tensor], floors: Mapping[str, float], draws: int
) -> dict[str, ErrorAndLimit]:
    exact, allowed = expected(case), limits(case, floors, draws)
    return {
        name: ErrorAndLimit(relative_error(x, exact[name], floors.get(name, 0.0)), allowed[name])
        for name, x in results.items()
    }


def limits(case: Case, floors: Mapping[str, float], draws: int) -> dict[str, float]:
    """Returns the largest allowed error of each tensor.

    Args:
        floors: least norms that errors are relative to, by tensor, as in `relative_error`.
        draws: number of draws of tensors whose largest error of flash attention gives the limit.
    """
    accumulated = torch.float64 if case.compute_dtype == torch.float64 else torch.float32
    # The rounding error of a logit is proportional to the logit, and is the relative error of its weight. A weight,
    # exp(logit - lse), is large only if the logit is about the lse, so errors grow with the lse.
    lse = expected(case)["lse"]
    excess = max(0.0, float(lse.masked_fill(lse == -torch.inf, 0).abs().max()) - TYPICAL_LSE)
    limit = LIMITS[accumulated] + 2 * torch.finfo(accumulated).eps * excess
    if case.compute_dtype in LIMITS:
        return dict.fromkeys(expected(case), limit)
    flash_runs = [flash_errors(replace(case, softcap=None, seed=case.seed + i), floors) for i in range(draws)]
    allowed = {name: max(limit, *(FLASH_FACTOR * run[name] for run in flash_runs)) for name in flash_runs[0]}
    if case.sinks:  # the gradient of a few numbers, each rounded once to the dtype
        allowed["dsinks"] = max(
            allowed["dsinks"], *(torch.finfo(dtype).eps for dtype in (case.dtype, case.compute_dtype))
        )
    return allowed | {"lse": max(allowed.get("lse", 0.0), limit, LSE_LIMIT)}


def flash_errors(case: Case, floors: Mapping[str, float]) -> dict[str, float]:
    """Returns the errors of flash attention on one device."""
    exact = expected(case)
    return {name: relative_error(x, exact[name], floors.get(name, 0.0)) for name, x in flash(case).items()}
