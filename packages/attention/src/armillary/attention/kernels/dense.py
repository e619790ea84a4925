"""Matrix products with a dense mask: for any device and head dim, in quadratic time and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, rearrange
from torch import Tensor

from armillary.attention.kernels.inputs import Limits
from armillary.attention.kernels.kernel import Batched, Scores, Tile
from armillary.attention.mask import Window
from armillary.core import accumulation_dtype


@dataclass(frozen=True)
class Dense(Batched):
    """Computes scores [B, H, t, S] in blocks of t rows. For inputs that no other kernel supports, and single tokens.

    Args:
        score_bytes: maximum bytes of a block's scores, unless a single row has more. Backward has five tensors of this
            size at its peak, or six with a softcap.
    """

    name: str = "dense"
    score_bytes: int = 64 * 2**20
    limits: ClassVar[Limits] = Limits(softcap=True)

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return (tile,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        blocks = (
            _forward(q[:, rows], k[:, columns], v[:, columns], block, scores)
            for rows, columns, block in self._blocks(q, k, band)
        )
        outs, lses = zip(*blocks, strict=True)
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, 1))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        # dk and dv are sums over blocks of queries, so they are accumulated in the dtype of lse.
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        dqs: list[Tensor] = []
        for rows, columns, block in self._blocks(q, k, band):
            saved = (dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, rows])
            grads = _backward(*saved, block, scores)
            dqs.append(grads[0])
            dk[:, columns] += grads[1]
            dv[:, columns] += grads[2]
        return torch.cat(dqs, 1), dk, dv

    def _blocks(self, q: Tensor, k: Tensor, band: Window) -> Iterator[tuple[slice, slice, Window]]:
        """Yields (rows, columns, band) of each block: the columns that any of its rows sees."""
        batch, queries, heads, _ = q.shape
        row_bytes = batch * heads * k.shape[1] * accumulation_dtype(q.dtype).itemsize
        step = max(1, self.score_bytes // max(1, row_bytes))  # an empty batch has rows of 0 bytes
        tile = Tile(0, queries, 0, k.shape[1], *band)
        for start in range(0, queries, step):
            if block := tile.rows(start, start + step):
                yield slice(block.q0, block.q1), slice(block.k0, block.k1), block.offsets


def _forward(q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
    s, _ = _scores(q, k, band, scores)
    lse = s.logsumexp(-1)
    out = einsum((s - lse[..., None]).exp(), v.to(s.dtype), "b k g t s, b s k d -> b t k g d")
    return rearrange(out, "b t k g d -> b t (k g) d").to(q.dtype), rearrange(lse, "b k g t -> b t (k g)")


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    groups, dtype = k.shape[2], lse.dtype
    dout_, q_, out_ = (rearrange(x.to(dtype), "b t (k g) d -> b t k g d", k=groups) for x in (dout, q, out))
    s, slope = _scores(q, k, band, scores)
    # As in FlashAttention's backward: P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)).
    p = (s - rearrange(lse, "b t (k g) -> b k g t 1", k=groups)).exp()
    dv = einsum(p, dout_, "b k g t s, b t k g d -> b s k d")
    dp = einsum(dout_, v.to(dtype), "b t k g d, b s k d -> b k g t s")
    ds = p * (dp - rearrange((dout_ * out_).sum(-1), "b t k g -> b k g t 1")) * slope
    dq = rearrange(einsum(ds, k.to(dtype), "b k g t s, b s k d -> b t k g d"), "b t k g d -> b t (k g) d")
    return dq, einsum(ds, q_, "b k g t s, b t k g d -> b s k d"), dv


def _scores(q: Tensor, k: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Returns scores [B, K, H / K, T, S] in the accumulation dtype, -inf for hidden pairs, and d score / d (q k)."""
    dtype = accumulation_dtype(q.dtype)
    q_groups = rearrange(q.to(dtype), "b t (k g) d -> b t k g d", k=k.shape[2])
    values, slope = einsum(q_groups, k.to(dtype), "b t k g d, b s k d -> b k g t s") * scores.scale, scores.scale
    if scores.softcap is not None:
        capped = (values / scores.softcap).tanh()
        values, slope = capped * scores.softcap, (1 - capped**2) * scores.scale
    # Hides pairs after the softcap, because tanh would make -inf finite.
    offset = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if band[0] is not None:
        hidden |= offset < band[0]
    if band[1] is not None:
        hidden |= offset > band[1]
    return values.masked_fill(hidden, -torch.inf), slope
