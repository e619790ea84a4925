"""Gradients of parameters summed over chunks in the accumulation dtype, so that each is rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.accumulate import accumulation_dtype


class GradientSums:
    """Gradients of parameters, summed over chunks in the accumulation dtype, so that each is rounded once.

    Args:
        parameters: those that want a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._owned: set[int] = set()
        self._places = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._buffers = dict[int, Tensor]()

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

    def buffer(self, parameter: Tensor | None) -> Tensor | None:
        """Where to add gradients of `parameter` in place, in the accumulation dtype: for those of a few of its rows.

        Of a DTensor as large as this rank's part. None for what is not among the parameters.
        """
        i = self._places.get(id(parameter))
        if i is not None and i not in self._buffers:
            held = local_part(self.parameters[i])
            self._buffers[i] = torch.zeros(held.shape, dtype=accumulation_dtype(held.dtype), device=held.device)
        return None if i is None else self._buffers[i]

    def result(self) -> list[Tensor | None]:
        """The sums, in the dtypes that gradients are to have; None where nothing came."""
        return [self._result(i) for i in range(len(self.parameters))]

    def _result(self, i: int) -> Tensor | None:
        parameter, total, buffer = self.parameters[i], self._sums[i], self._buffers.get(i)
        if buffer is not None:
            inside = gradient_of(parameter, buffer)
            total = inside if total is None else inside + total
        return None if total is None else total.to(gradient_dtype(parameter))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient; FSDP may request float32 for a bfloat16 parameter."""
    asked: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if asked is None else asked


def local_part(x: Tensor) -> Tensor:
    """Returns this rank's local part of a tensor, detached."""
    x = x.detach()
    return x.to_local() if compat.is_dtensor(x) else x


def gradient_of(parameter: Tensor, share: Tensor) -> Tensor:
    """The gradient of a parameter, of that of what this rank has of it: where it is copied, a share of a sum."""
    if not compat.is_dtensor(parameter):
        return share
    from torch.distributed.tensor import DTensor, Partial

    mesh, shape = parameter.device_mesh, parameter.shape
    placed = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return DTensor.from_local(share, mesh, placed, run_check=False, shape=shape, stride=parameter.stride())
