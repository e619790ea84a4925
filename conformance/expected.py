"""Expected results of a case: those of the float64 oracle, and those of torch's flash attention on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import copysign
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention import reference_attention
from armillary.attention.reference import visible_pairs
from conformance.case import Case
from conformance.tensors import inputs, project_qkv


@lru_cache(maxsize=8)
def expected(case: Case) -> dict[str, Tensor]:
    """Returns global out, lse and gradients in float64, from inputs rounded to the case's dtype."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs(case).items() if name != "dout"}
    out, lse = reference_attention(
        *project_qkv(case, leaves),
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
    """Returns the subtracted terms of gradients that are differences: rounding errors are relative to these terms.

    With p the weights of a query, dp their gradient and delta = sum(dout out), the gradient of the scores is
    ds = p (dp - delta). So dq = scale (p dp k - p delta k), and likewise dk; if a query sees one key, both terms
    cancel. The gradient of a sink is the sum over queries of weight dout out; returned is the norm of these terms.
    """
    x, exact = inputs(case), expected(case)
    leaves = {name: x[name].double().requires_grad_() for name in x if name not in ("dout", "sinks")}
    q, k, _ = project_qkv(case, leaves)
    delta = (x["dout"].double() * exact["out"]).sum(-1, keepdim=True)
    options: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "softcap": case.softcap}
    sinks = x["sinks"].double() if case.sinks else None
    values = k.detach().requires_grad_()
    mean = reference_attention(q.detach(), k.detach(), values, sinks=sinks, **options)
    (key_term,) = torch.autograd.grad(mean, values, delta * q.detach())
    names = [name for name in leaves if name not in ("v", "wv")]
    terms = [case.softmax_scale * delta * mean.detach(), case.softmax_scale * key_term]
    grads = torch.autograd.grad([q, k], [leaves[name] for name in names], terms)
    sizes = {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    if sinks is not None:
        weight = (sinks[..., None, None, :] - exact["lse"]).exp().unsqueeze(-1)
        sizes["dsinks"] = (weight * x["dout"].double() * exact["out"]).square().sum((-4, -3, -1)).sqrt()
    return sizes


def flash(case: Case) -> dict[str, Tensor]:
    """Returns global out and gradients of torch's flash attention on one device in the case's dtypes.

    Each sink is a further key with value 0, whose score is a bias. The softcap is ignored.
    """
    case = replace(case, softcap=None)
    x = inputs(case)
    leaves = {name: x[name].detach().requires_grad_() for name in x if name not in ("dout", "sinks")}
    # Attention on tensors of one dtype, as on latents, takes no notice of autocast.
    lowered = case.autocast is not None and case.latent is None
    with torch.autocast("cpu", dtype=case.autocast, enabled=lowered, cache_enabled=False):
        q, k, v = project_qkv(case, leaves)
    out = _flash(case, q, k, v, x.get("sinks"))
    gradients = torch.autograd.grad(out, list(leaves.values()), x["dout"].to(out.dtype))
    results = {"out": out.detach()} | {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    if case.latent is not None:  # the lse of keys that were rounded after they were expanded
        arguments: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "sinks": x.get("sinks")}
        _, results["lse"] = reference_attention(*(y.detach() for y in (q, k, v)), **arguments, return_lse=True)
    if case.sinks:
        weight = (x["sinks"].double()[..., None, None, :] - expected(case)["lse"]).exp()
        results["dsinks"] = -(weight * (x["dout"].double() * results["out"].double()).sum(-1)).sum((-3, -2))
    return results


def _flash(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    width = max(case.head_dim, case.value_dim)  # flash has one head dim: pad with zeros
    if case.softmax_scale <= 0:  # flash takes positive scales: move the sign to q, which is exact
        q = q * (copysign(1, case.softmax_scale) if case.softmax_scale else 0)
    q, k, v = (F.pad(y, (0, width - y.shape[3])).transpose(1, 2) for y in (q, k, v))
    visible = visible_pairs(case.mask, torch.arange(case.length), torch.arange(case.keys), case.batch)[:, None]
    sees_no_key = ~visible.any(-1)  # flash gives such rows NaN: let them see all keys, and discard their out
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible & ~sees_no_key[..., None], -torch.inf)
    if sinks is not None:
        k, v = (F.pad(y, (0, 0, 0, case.sinks)) for y in (k, v))
        scores = sinks.to(q.dtype).reshape(-1, case.heads).T[None, :, None].expand(len(bias), -1, case.length, -1)
        bias = torch.cat([bias.expand(-1, case.heads, -1, -1), scores], dim=-1)
    scale = abs(case.softmax_scale) or 1.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)[..., : case.value_dim].masked_fill(sees_no_key.transpose(1, 2)[..., None], 0)
