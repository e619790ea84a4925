"""Plain matrix products with a dense mask: any device, dtype and head dim, at quadratic memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from torch import Tensor

from armillary.attention.kernels.kernel import Inputs, Scores
from armillary.attention.mask import Window
from armillary.attention.tiles import Tile


@dataclass(frozen=True)
class Dense:
    """Holds [B, H, T, S] scores: for small tiles and for what no flash kernel takes."""

    name: str = "dense"

    def refuses(self, inputs: Inputs) -> str | None:
        return None if inputs.dtype.is_floating_point else f"takes floating point, not {inputs.dtype}"

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return (tile,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        seen, _ = _scores(q, k, band, scores)
        lse = seen.logsumexp(-1)
        out = einsum((seen - lse[..., None]).exp(), v.to(seen.dtype), "b k g t s, b s k d -> b t k g d")
        return rearrange(out, "b t k g d -> b t (k g) d").to(q.dtype), rearrange(lse, "b k g t -> b t (k g)")

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtype = k.shape[2], lse.dtype
        dout_, q_, out_ = (rearrange(x.to(dtype), "b t (k g) d -> b t k g d", k=groups) for x in (dout, q, out))
        k_, v_ = k.to(dtype), v.to(dtype)
        seen, slope = _scores(q, k, band, scores)
        p = (seen - rearrange(lse, "b t (k g) -> b k g t 1", k=groups)).exp()
        dv = einsum(p, dout_, "b k g t s, b t k g d -> b s k d")
        dp = einsum(dout_, v_, "b t k g d, b s k d -> b k g t s")
        ds = p * (dp - rearrange((dout_ * out_).sum(-1), "b t k g -> b k g t 1")) * slope
        dq = rearrange(einsum(ds, k_, "b k g t s, b s k d -> b t k g d"), "b t k g d -> b t (k g) d")
        dk = einsum(ds, q_, "b k g t s, b t k g d -> b s k d")
        return dq, dk, dv


def _scores(q: Tensor, k: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Scores [B, K, H / K, T, S], -inf where not visible, in the accumulation dtype; and their slope over q k."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(dtype), "b t (k g) d -> b t k g d", k=k.shape[2])
    values, slope = einsum(grouped, k.to(dtype), "b t k g d, b s k d -> b k g t s") * scores.scale, scores.scale
    if scores.softcap is not None:
        capped = (values / scores.softcap).tanh()
        values, slope = capped * scores.softcap, (1 - capped**2) * scores.scale
    return values.masked_fill(_hidden(q, k, band), -torch.inf), slope


def _hidden(q: Tensor, k: Tensor, band: Window) -> Tensor:
    """Which columns a row does not see: [T, S]."""
    offset = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    low, high = band
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    hidden = hidden if low is None else hidden | (offset < low)
    return hidden if high is None else hidden | (offset > high)
