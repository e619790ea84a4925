"""Linear layers whose backward adds weight gradients to one buffer, instead of a new tensor per stage of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention.parts import GradientSums, head_slices, select_heads, update_heads
from armillary.core.parts import compat


@dataclass(frozen=True)
class HeadRows:
    """The rows of h of the H heads in a weight [H D, E] or a bias [H D].

    Args:
        heads: indices of the h heads.
        dim: D, rows per head.
    """

    heads: tuple[int, ...]
    dim: int

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the rows of the heads, [h D, ...]: a view if the heads are consecutive."""
        return select_heads(parameter.unflatten(0, (-1, self.dim)), self.heads, 0).flatten(0, 1)

    def add_to(self, total: Tensor, rows: Tensor) -> None:
        """Adds `rows` [h D, ...] to the heads' rows of `total` [H D, ...]."""
        update_heads(total.unflatten(0, (-1, self.dim)), self.heads, rows.unflatten(0, (-1, self.dim)), Tensor.add_, 0)

    def add_product(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Adds dy^T x to the heads' rows of `total` [H D, E]. If the heads are consecutive, in one fused op.

        Args:
            dy: [n, h D].
            x: [n, E].
        """
        run, *more_runs = head_slices(self.heads)
        if more_runs or run.step != 1:
            self.add_to(total, product(dy, x, total.dtype))
            return
        add_product(total[run.start * self.dim : run.stop * self.dim], dy, x)


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds dy^T x to `total`, whose dtype may be wider. `addmm` with `out_dtype` exists on CUDA only."""
    if dy.dtype == total.dtype or not dy.is_cuda:
        total.addmm_(dy.T.to(total.dtype), x.to(total.dtype))
    else:  # tensor cores multiply in the narrow dtype and accumulate in the wide one, without a product in memory
        torch.addmm(total, dy.T, x, out_dtype=total.dtype, out=total)


def product(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns dy^T x in `dtype`, which may be wider than the dtype of dy and x."""
    if dy.dtype == dtype or not dy.is_cuda:
        return dy.T.to(dtype) @ x.to(dtype)
    return torch.mm(dy.T, x, out_dtype=dtype)


def collected_linear(x: Tensor, linear: nn.Linear, rows: HeadRows, totals: GradientSums) -> Tensor:
    """Computes the outputs [..., h D] of the heads `rows`. Backward adds gradients of weight and bias to `totals`."""
    # Not by attribute: reading a sharded module's attribute would make its local part (`ShardedModule`).
    weight, bias = (linear._parameters[name] for name in ("weight", "bias"))  # pyright: ignore[reportPrivateUsage]
    return cast(Tensor, cast(Any, CollectedLinear).apply(x, weight, bias, rows, totals))


class CollectedLinear(torch.autograd.Function):
    """The autograd function of `collected_linear`.

    Weight and bias are inputs, so that autograd runs backward even if x needs no gradient. Their gradient is None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: HeadRows, totals: GradientSums
    ) -> Tensor:
        used_weight = rows.of(compat.local_part(weight.detach()))
        y = F.linear(x, used_weight, None if bias is None else rows.of(compat.local_part(bias.detach())))
        ctx.rows, ctx.totals, ctx.parameters = rows, totals, (weight, bias)
        ctx.save_for_backward(x, used_weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,), (x, used_weight) = grad_outputs, ctx.saved_tensors
        # Under autocast, forward ran in the dtype of dy, which may not be the weight's.
        dx = dy @ used_weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        weight, bias = map(ctx.totals.buffer, ctx.parameters)
        if weight is not None:
            ctx.rows.add_product(weight, dy.flatten(0, -2), x.flatten(0, -2).to(dy.dtype))
        if bias is not None:
            ctx.rows.add_to(bias, dy.flatten(0, -2).sum(0, dtype=bias.dtype))
        return dx, None, None, None, None
