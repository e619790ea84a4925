"""Attention by its formula, on one device, in float64: the oracle of the tests.

It shares only checks of arguments with the methods and kernels. Even the rule of visible pairs is written twice
(`oracle_visibility.py`).
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict, Unpack, overload

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import are_plain_tensors, check_options, check_tensors
from armillary.attention.mask import AttentionMask
from armillary.attention.oracle_visibility import visible_pairs


class ReferenceArguments(TypedDict):
    """The keyword arguments of `reference_attention` except `return_lse`."""

    mask: AttentionMask
    scale: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    softcap: NotRequired[float | None]
    query_positions: NotRequired[Tensor | None]
    key_positions: NotRequired[Tensor | None]


@overload
def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **arguments: Unpack[ReferenceArguments]
) -> Tensor: ...


@overload
def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Unpack[ReferenceArguments]
) -> tuple[Tensor, Tensor]: ...


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax(scale * q k^T) v over the visible keys of each query. Dense and slow; plain autograd works.

    Query head h uses key/value head h // (H // K). A query that sees nothing gives 0, with zero gradients.

    Args:
        q: [B, T, H, D].
        k: [B, S, K, D]; K divides H.
        v: [B, S, K, Dv].
        mask: a mask in global positions.
        scale: softmax scale; 1 / sqrt(D) by default.
        sinks: logits that take part in each query's softmax without a value: one per head [H], n per head [n, H], or
            one per query and head [B, T, H].
        softcap: c of c * tanh(logit / c), applied to all logits except sinks.
        query_positions: [T], global positions of the queries; 0..T-1 by default.
        key_positions: [S], global positions of the keys; 0..S-1 by default.
        return_lse: also return the log-sum-exp of the logits, sinks included.

    Returns:
        out [B, T, H, Dv] in q's dtype; with `return_lse` also lse [B, T, H], -inf where a query sees neither key
        nor sink: float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes, positions or mask do not fit together; an argument has another type or is out of range.
    """
    check_options(AttentionOptions(mask, scale=scale, softcap=softcap))
    are_plain_tensors(q, k, v, sinks)  # raises ValueError for values that are not dense tensors
    check_tensors(q, k, v, None)
    sink = _sink_logits(q, sinks)
    i = _positions(query_positions, q, "query")
    j = _positions(key_positions, k, "key")
    visible = visible_pairs(mask, i, j, q.shape[0])[:, None]
    group = q.shape[2] // k.shape[2]
    keys, values = (repeat(x.double(), "b s k d -> b s (k g) d", g=group) for x in (k, v))
    logits = einsum(q.double(), keys, "b t h d, b s h d -> b h t s") * (q.shape[3] ** -0.5 if scale is None else scale)

    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    # Invisible logits become 0 before exp, and their weights 0 after it. So exp sees no infinity, whose gradient would
    # be NaN. `top`, the largest logit of a query, is subtracted so that exp does not overflow.
    top = torch.cat([logits.detach().masked_fill(~visible, -torch.inf), sink.detach()], -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (logits - top).masked_fill(~visible, 0).exp() * visible
    total = weights.sum(-1, keepdim=True) + (sink - top).exp().sum(-1, keepdim=True)
    has_weight = total > 0  # False for a query that sees neither key nor sink
    total = torch.where(has_weight, total, 1)
    out = einsum(weights / total, values, "b h t s, b s h d -> b t h d").to(q.dtype)
    if not return_lse:
        return out
    lse = rearrange(torch.where(has_weight, top + total.log(), -torch.inf), "b h t 1 -> b t h")
    return out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _sink_logits(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the logits [B, H, T, n] of n sinks; one sink of -inf, which has no effect, if there are none."""
    batch, tokens, heads, _ = q.shape
    if sinks is None:
        sinks = q.new_full((heads,), -torch.inf)
    if sinks.shape == q.shape[:3]:
        return rearrange(sinks.double(), "b t h -> b h t 1")
    if sinks.ndim not in (1, 2) or sinks.shape[-1] != heads:
        raise ValueError(
            f"sinks {tuple(sinks.shape)} must be [H], [n, H] or [B, T, H] for {heads} query heads; q {tuple(q.shape)}"
        )
    return repeat(sinks.double().reshape(-1, heads), "s h -> b h t s", b=batch, t=tokens)


def _positions(positions: Tensor | None, x: Tensor, name: str) -> Tensor:
    if positions is None:
        return torch.arange(x.shape[1], device=x.device)
    if positions.shape != x.shape[1:2]:
        raise ValueError(
            f"{name}_positions has shape {tuple(positions.shape)}; it must be ({x.shape[1]},), one per token"
        )
    return positions.to(x.device)
