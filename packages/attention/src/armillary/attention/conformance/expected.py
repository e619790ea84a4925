"""What a case should give: its tensors, the float64 oracle's answer, and how far off is too far."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import isnan, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention.conformance.case import Case
from armillary.attention.reference import reference_attention, visible_pairs
from armillary.core import SequenceLayout

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-6}
LSE_LIMIT = 1e-4
"""In bfloat16: flash kernels for 16 bits take exp to about 20 bits. An lse that was itself rounded is off by 1e-3."""
FLASH_FACTOR = 2.0
"""In bfloat16: how much larger an error may be than that of flash attention on one device, on its worst shard."""


class Sharding(NamedTuple):
    """Who has what of the global tensors of a case."""

    layout: SequenceLayout
    key_layout: SequenceLayout

    def take(self, name: str, whole: Tensor, shard: int) -> Tensor:
        """One shard of the global tensor `name`."""
        if name == "sinks":
            return whole
        return (self.key_layout if name in ("k", "v", "dk", "dv") else self.layout).take(whole, shard)


@lru_cache(maxsize=64)
def inputs(case: Case) -> dict[str, Tensor]:
    """Global q [B, N, H, D], k [B, S, K, D], v [B, S, K, Dv], dout [B, N, H, Dv] and sinks [H], if any.

    The same on every rank.
    """
    generator = torch.Generator().manual_seed(case.seed)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (case.batch, case.length, case.heads, case.head_dim),
        "k": (case.batch, case.keys, case.kv_heads, case.head_dim),
        "v": (case.batch, case.keys, case.kv_heads, case.value_dim),
        "dout": (case.batch, case.length, case.heads, case.value_dim),
    }
    if case.sinks:
        shapes["sinks"] = (case.heads,)
    x = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    if case.shift:
        root = sqrt(abs(case.shift) / (case.scale or case.head_dim**-0.5))
        x["q"][..., 0], x["k"][..., 0] = root, root if case.shift > 0 else -root
    return {name: tensor.to(case.dtype) for name, tensor in x.items()}


@lru_cache(maxsize=64)
def expected(case: Case) -> dict[str, Tensor]:
    """Global out, lse, dq, dk, dv in float64, of the inputs as they are after rounding to the case's dtype.

    Also dsinks [B, N, H], if any: each query's share.
    """
    x = inputs(case)
    leaves = {name: x[name].double().detach().requires_grad_() for name in "qkv"}
    if case.sinks:
        each = x["sinks"].double().expand(case.batch, case.length, case.heads)
        leaves["sinks"] = each.detach().clone().requires_grad_()
    out, lse = reference_attention(
        *(leaves[name] for name in "qkv"),
        mask=case.mask,
        scale=case.scale,
        sinks=leaves.get("sinks"),
        softcap=case.softcap,
        return_lse=True,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), x["dout"].double())
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach()} | named


def limits(case: Case, sharding: Sharding) -> dict[str, float]:
    """The largest error that each of out, lse, dq, dk, dv and dsinks may have on any shard."""
    accumulated = torch.float64 if case.dtype == torch.float64 else torch.float32
    # A logit is rounded at its own size, so a shift costs that much.
    limit = LIMITS[accumulated] + 2 * torch.finfo(accumulated).eps * abs(case.shift)
    if case.dtype in LIMITS:
        return dict.fromkeys(expected(case), limit)
    uncapped = replace(case, softcap=None)  # flash on one device has no softcap, so it is judged without
    found = {name: FLASH_FACTOR * error for name, error in flash_errors(uncapped, sharding).items()}
    return found | {"lse": max(limit, LSE_LIMIT)}


@lru_cache(maxsize=64)
def flash_errors(case: Case, sharding: Sharding) -> dict[str, float]:
    """The errors of flash attention on one device, each on the shard where it is largest.

    A shard of few tokens is a small sample: on some, flash happens to be exact.
    """
    exact, found = expected(case), dict[str, float]()
    for name, x in flash(case).items():
        shards = [
            (sharding.take(name, x, i), sharding.take(name, exact[name], i)) for i in range(sharding.layout.shards)
        ]
        found[name] = max(error(as_returned(name, got), wanted, exact[name]) for got, wanted in shards)
        if name == "dsinks":  # a handful of numbers, rounded once
            found[name] = max(found[name], torch.finfo(case.dtype).eps)
    return found


@lru_cache(maxsize=64)
def flash(case: Case) -> dict[str, Tensor]:
    """Global out, dq, dk, dv and dsinks, as `expected`, of torch's flash attention on one device in the case's dtype.

    A sink is one more key, with value 0 and a bias.
    """
    x = inputs(case)
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    width = max(case.head_dim, case.value_dim)  # flash has one head dim: zeros fill the narrower ones
    q, k, v = (F.pad(leaf, (0, width - leaf.shape[3])).transpose(1, 2) for leaf in leaves)
    visible = visible_pairs(case.mask, torch.arange(case.length), torch.arange(case.keys), case.batch)[:, None]
    blind = ~visible.any(-1)  # flash would give them NaN: they see a key, and neither their out nor their dout counts
    bias = torch.zeros(visible.shape, dtype=case.dtype).masked_fill(~visible & ~blind[..., None], -torch.inf)
    if case.sinks:
        k, v = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
        sinks = x["sinks"][None, :, None, None].expand(len(bias), -1, case.length, 1)
        bias = torch.cat([bias.expand(-1, case.heads, -1, -1), sinks], dim=-1)
    scale = case.scale or case.head_dim**-0.5
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)[..., : case.value_dim].masked_fill(blind.transpose(1, 2)[..., None], 0)
    dq, dk, dv = torch.autograd.grad(out, leaves, x["dout"])
    found = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    if case.sinks:
        weight = (x["sinks"].double() - expected(case)["lse"]).exp()
        found["dsinks"] = -weight * (x["dout"].double() * found["out"].double()).sum(-1)
    return found


def as_returned(name: str, x: Tensor) -> Tensor:
    """What a method returns for `x`: of dsinks [B, T, H], the sum over queries."""
    return x.sum((0, 1)) if name == "dsinks" else x


def error(got: Tensor, wanted: Tensor, whole: Tensor) -> float:
    """Root mean square of the difference over that of `wanted`, or over a tenth of that of `whole` if it is less.

    The latter keeps a shard that expects almost nothing (causal: query 0 has no gradient at all) from dividing by it.
    A sum [H] over queries has two signs: where it cancels, what terms of that size would add up to by chance counts.
    """
    if got.ndim == 1:
        chance, wanted = _rms(wanted.square().sum((0, 1)).sqrt()), wanted.sum((0, 1))
    else:
        chance = 0.0
    none = wanted == -torch.inf  # an lse that saw nothing
    if not torch.equal(got == -torch.inf, none):
        return float("inf")
    difference = _rms(got.double().masked_fill(none, 0) - wanted.masked_fill(none, 0))
    if isnan(difference):
        return float("inf")
    floor = max(_rms(whole.masked_fill(whole == -torch.inf, 0)) / 10, chance, 0.01)
    return difference / max(_rms(wanted.masked_fill(none, 0)), floor)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
