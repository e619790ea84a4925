"""Adding up in a wider dtype: which one, and sums of gradients that are rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results of `dtype` are accumulated in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Totals:
    """Gradients of parameters, summed over chunks in the accumulation dtype, so that each is rounded once.

    Args:
        parameters: those that want a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._owned: set[int] = set()

    def add(self, shares: Iterable[Tensor | None]) -> None:
        """Takes in a share for each parameter; None for one that nothing comes from."""
        for i, share in enumerate(shares):
            total = self._sums[i]
            if share is None or total is None:
                self._sums[i] = share if total is None else total
                continue
            if i not in self._owned:  # the first share may be a view of somebody's tensor
                total = total.to(accumulation_dtype(share.dtype), copy=True)
                self._owned.add(i)
            self._sums[i] = total.add_(share)

    def result(self) -> list[Tensor | None]:
        """The sums, in the dtypes that gradients are to have; None where nothing came."""
        return [
            None if total is None else total.to(gradient_dtype(parameter))
            for total, parameter in zip(self._sums, self.parameters, strict=True)
        ]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What the parameter's gradient comes in; FSDP may ask for float32 for a parameter in bfloat16."""
    asked: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if asked is None else asked
