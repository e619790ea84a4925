"""torch's memory-efficient attention (arXiv 2112.05682, xFormers' kernels): float32, and other head dims for v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from armillary.attention.kernels.batched import Batched
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import in_rows
from armillary.attention.kernels.limits import HALVES, Dims, Limits
from armillary.attention.kernels.tile import Tile
from armillary.attention.kernels.top_left import Saved, TopLeft

_forward: Any = cast(Any, torch.ops.aten)._efficient_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._efficient_attention_backward

CAUSAL = 1
"""As the ops number masks: from the top left."""
LONGEST = 2**16
"""Rows and columns of one call: beyond these, offsets of 32 bits have overflowed (pytorch/pytorch issue 162588)."""
LSE = 32
"""Numbers of whose multiple are the rows of lse, filled up by infinity, for which backward finds probability 0."""


@dataclass(frozen=True)
class Efficient(Batched, TopLeft):
    """Of tokens-first tensors, whose lse is [B, H, T rounded up] in float32; with as many key heads as query heads."""

    name: str = "efficient"
    limits: ClassVar[Limits] = Limits(
        device="cuda", dtypes=(*HALVES, torch.float32), dims=Dims(multiple=8), least=(5, 0)
    )

    def refuses(self, inputs: Inputs) -> str | None:
        reason = self.limits.refuses(inputs)
        if reason is None and inputs.dtype == torch.bfloat16 and (inputs.capability or (8, 0)) < (8, 0):
            return "takes bfloat16 from compute capability 8.0 (Ampere) on"
        return reason

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        parts = [tile]
        for _ in range(2):  # rows, and then columns
            parts = [part for whole in parts for part in _chunks(whole)]
        return tuple(piece for part in parts for piece in super(Efficient, self).cut(part))

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _readable(q, _repeated(k, q), _repeated(v, q))
        out, lse, *_ = _forward(q, k, v, None, None, None, None, None, 0.0, CAUSAL * causal, True, scale=scale)
        return out, lse[..., : q.shape[1]].transpose(1, 2)

    def call_backward(self, tensors: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        every = _readable(q, _repeated(k, q), _repeated(v, q))
        spans, state = (None, None, q.shape[1], k.shape[1]), torch.empty((), dtype=torch.int64, device=q.device)
        lse = torch.nn.functional.pad(lse.transpose(1, 2), (0, -lse.shape[1] % LSE), value=torch.inf).contiguous()
        how = (0.0, state, state, CAUSAL * causal, False)
        dq, dk, dv, _ = _backward(dout.contiguous(), *every, None, out.contiguous(), *spans, lse, *how, scale=scale)
        return dq, _summed(dk, k), _summed(dv, v)


def _chunks(tile: Tile) -> list[Tile]:
    """The tile in parts of so few rows, or if it has no more, of so few columns."""
    rows = tile.q1 - tile.q0 > LONGEST
    first, last = (tile.q0, tile.q1) if rows else (tile.k0, tile.k1)
    part = tile.rows if rows else tile.columns
    parts = [part(start, min(start + LONGEST, last)) for start in range(first, last, LONGEST)]
    return [part for part in parts if part]


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows that begin at multiples of 16 bytes."""
    return tuple(in_rows(x, 16 // x.itemsize) for x in tensors)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v with as many heads as q."""
    groups = q.shape[2] // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, 2)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was repeated: of several heads added up in float32 at least."""
    if grad.shape[2] == like.shape[2]:
        return grad
    return grad.unflatten(2, (like.shape[2], -1)).sum(3, dtype=torch.promote_types(grad.dtype, torch.float32))
