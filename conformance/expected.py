"""What a case should give: the float64 oracle's answer, and what torch's flash attention gives on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import copysign
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention.reference import reference_attention, visible_pairs
from conformance.case import Case
from conformance.tensors import attended, inputs


@lru_cache(maxsize=8)
def expected(case: Case) -> dict[str, Tensor]:
    """Global out, lse and the gradient of each tensor, in float64, of inputs as they are once in the case's dtype."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs(case).items() if name != "dout"}
    out, lse = reference_attention(
        *attended(case, leaves),
        mask=case.mask,
        scale=case.scale,
        sinks=leaves.get("sinks"),
        softcap=case.softcap,
        return_lse=True,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs(case)["dout"].double())
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach()} | named


def cancelling(case: Case) -> dict[str, Tensor]:
    """Of gradients that are differences, what is taken away: nothing that was rounded can be exact to less than that.

    ds = p (dp - delta): dq is scale * ds k, less scale * p delta k, which is all of it where a query sees one key. The
    gradient of a sink is a sum over queries of weight dout out: what terms of these sizes would add up to by chance.
    """
    x, exact = inputs(case), expected(case)
    leaves = {name: x[name].double().requires_grad_() for name in x if name not in ("dout", "sinks")}
    q, k, _ = attended(case, leaves)
    delta = (x["dout"].double() * exact["out"]).sum(-1, keepdim=True)
    options: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "softcap": case.softcap}
    sinks = x["sinks"].double() if case.sinks else None
    averaged = k.detach().requires_grad_()
    mean = reference_attention(q.detach(), k.detach(), averaged, sinks=sinks, **options)
    (taken,) = torch.autograd.grad(mean, averaged, delta * q.detach())
    wanted = [leaf for name, leaf in leaves.items() if name not in ("v", "wv")]
    shares = torch.autograd.grad([q, k], wanted, [case.scaled * delta * mean.detach(), case.scaled * taken])
    named = zip((name for name in leaves if name not in ("v", "wv")), shares, strict=True)
    found = {f"d{name}": share for name, share in named}
    if sinks is not None:
        weight = (sinks[..., None, None, :] - exact["lse"]).exp().unsqueeze(-1)
        found["dsinks"] = (weight * x["dout"].double() * exact["out"]).square().sum((-4, -3, -1)).sqrt()
    return found


def flash(case: Case) -> dict[str, Tensor]:
    """Global out and gradients, as `expected`, of torch's flash attention on one device in the case's dtypes.

    Each sink is one more key, with value 0 and a bias. There is no softcap: the case is taken without.
    """
    case = replace(case, softcap=None)
    x = inputs(case)
    leaves = {name: x[name].detach().requires_grad_() for name in x if name not in ("dout", "sinks")}
    with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None, cache_enabled=False):
        q, k, v = attended(case, leaves)
    out = _flash(case, q, k, v, x.get("sinks"))
    gradients = torch.autograd.grad(out, list(leaves.values()), x["dout"].to(out.dtype))
    found = {"out": out.detach()} | {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    if case.sinks:
        weight = (x["sinks"].double()[..., None, None, :] - expected(case)["lse"]).exp()
        found["dsinks"] = -(weight * (x["dout"].double() * found["out"].double()).sum(-1)).sum((-3, -2))
    return found


def _flash(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    width = max(case.head_dim, case.value_dim)  # flash has one head dim: zeros fill the narrower ones
    if case.scaled <= 0:  # nor does it know such scales, with which q can be multiplied, exactly
        q = q * (copysign(1, case.scaled) if case.scaled else 0)
    q, k, v = (F.pad(y, (0, width - y.shape[3])).transpose(1, 2) for y in (q, k, v))
    visible = visible_pairs(case.mask, torch.arange(case.length), torch.arange(case.keys), case.batch)[:, None]
    blind = ~visible.any(-1)  # flash would give them NaN: they see a key, and neither their out nor their dout counts
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible & ~blind[..., None], -torch.inf)
    if sinks is not None:
        k, v = (F.pad(y, (0, 0, 0, case.sinks)) for y in (k, v))
        scores = sinks.to(q.dtype).reshape(-1, case.heads).T[None, :, None].expand(len(bias), -1, case.length, -1)
        bias = torch.cat([bias.expand(-1, case.heads, -1, -1), scores], dim=-1)
    scale = abs(case.scaled) or 1.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)[..., : case.value_dim].masked_fill(blind.transpose(1, 2)[..., None], 0)
