"""Sums of the gradients of parameters, over chunks of tokens and stages of heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from armillary.core import accumulation_dtype
from armillary.core.parts import compat


class GradientSums:
    """Sums the gradients of parameters in the accumulation dtype, so that 16-bit sums are rounded once.

    Args:
        parameters: the parameters that require a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._owned: set[int] = set()  # indices of sums that are copies, and may be changed in place
        self._indices = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._buffers = dict[int, Tensor]()

    def add(self, addends: Iterable[Tensor | None]) -> None:
        """Adds one gradient for each parameter; None adds nothing."""
        for i, addend in enumerate(addends):
            total = self._sums[i]
            if addend is None or total is None:
                self._sums[i] = addend if total is None else total
                continue
            if i not in self._owned:  # the total is the first addend itself, a caller's tensor: copy it
                total = total.to(accumulation_dtype(addend.dtype), copy=True)
                self._owned.add(i)
            self._sums[i] = total.add_(addend)

    def buffer(self, parameter: Tensor | None) -> Tensor | None:
        """Returns a buffer to which the caller may add gradients of some rows of `parameter` in place.

        It has the accumulation dtype, and for a DTensor the shape of the local part. None if the tensor is not one of
        the parameters.
        """
        i = self._indices.get(id(parameter))
        if i is not None and i not in self._buffers:
            local = compat.local_part(self.parameters[i].detach())
            self._buffers[i] = torch.zeros(local.shape, dtype=accumulation_dtype(local.dtype), device=local.device)
        return None if i is None else self._buffers[i]

    def result(self) -> list[Tensor | None]:
        """Returns the sum for each parameter, in the dtype of its gradient; None if nothing was added."""
        return [self._result(i) for i in range(len(self.parameters))]

    def _result(self, i: int) -> Tensor | None:
        parameter, total, buffer = self.parameters[i], self._sums[i], self._buffers.get(i)
        if buffer is not None:
            gradient = gradient_of(parameter, buffer)
            total = gradient if total is None else gradient + total
        return None if total is None else total.to(gradient_dtype(parameter))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient; FSDP may request float32 for a bfloat16 parameter."""
    requested_dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if requested_dtype is None else requested_dtype


def gradient_of(parameter: Tensor, local_gradient: Tensor) -> Tensor:
    """Returns the gradient of a parameter from the gradient of its local part.

    The gradient of a DTensor is a DTensor, `Partial` on the axes on which the parameter is replicated.
    """
    if not compat.is_dtensor(parameter):
        return local_gradient
    from torch.distributed.tensor import DTensor, Partial

    mesh, shape = parameter.device_mesh, parameter.shape
    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return DTensor.from_local(local_gradient, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
