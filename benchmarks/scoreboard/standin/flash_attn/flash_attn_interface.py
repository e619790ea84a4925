"""The functions that context-parallel libraries call, with flash-attn's names and order of arguments.

Tensors are [B, S, H, D] or packed [T, H, D], lse is [B, H, S] or [H, T] in float32. Backward takes an out and an lse
over more keys than it is given, as rings need, and writes into dq, dk and dv.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """Scaled logits [B, H, T, S] in float32, -inf where hidden."""
    queries, keys = q.shape[1], k.shape[1]
    k = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k) * scale
    offset = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    right = 0 if causal else right
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    hidden = hidden | (offset < -left) if left >= 0 else hidden
    hidden = hidden | (offset > right) if right >= 0 else hidden
    return scores.masked_fill(hidden, -torch.inf)


def _check(*tensors: Tensor, dropout_p: float = 0.0, softcap: float = 0.0, alibi_slopes: Any = None) -> None:
    if any(x.dtype not in (torch.float16, torch.bfloat16) for x in tensors):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(x.dtype != tensors[0].dtype for x in tensors):
        raise RuntimeError("query and key must have the same dtype")
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("the stand-in has no dropout, softcap or ALiBi")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    values = v.float().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhts,bshd->bthd", weights, values).to(q.dtype)
    return out, lse, q.new_zeros(0), torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    _check(dout, q, k, v, out, dq, dk, dv, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    group = q.shape[2] // k.shape[2]
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, 0)
    weights = (scores - lse[..., None]).exp()
    values, keys = (x.float().repeat_interleave(group, dim=2) for x in (v, k))
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    ds = weights * (torch.einsum("bthd,bshd->bhts", dout.float(), values) - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhts,bshd->bthd", ds, keys))
    dk.copy_(torch.einsum("bhts,bthd->bshd", ds, q.float()).unflatten(2, (-1, group)).sum(3))
    dv.copy_(torch.einsum("bhts,bthd->bshd", weights, dout.float()).unflatten(2, (-1, group)).sum(3))
    return delta


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, False
    rows = zip(_cut(cu_seqlens_q, q), _cut(cu_seqlens_k, k), _cut(cu_seqlens_k, v), strict=True)
    results = [_flash_attn_forward(*(x[None] for x in row), *options) for row in rows]
    out = torch.cat([each[0][0] for each in results])
    lse = torch.cat([each[1][0] for each in results], dim=1)
    return out, lse, results[0][2], results[0][3]


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    options = (
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
    )
    by_query = [_cut(cu_seqlens_q, x) for x in (dout, q, out, softmax_lse.T, dq)]
    by_key = [_cut(cu_seqlens_k, x) for x in (k, v, dk, dv)]
    for one, other in zip(zip(*by_query, strict=True), zip(*by_key, strict=True), strict=True):
        (ddout, qq, oo, lse, ddq), (kk, vv, ddk, ddv) = ([x[None] for x in row] for row in (one, other))
        _flash_attn_backward(ddout, qq, kk, vv, oo, lse.transpose(1, 2), ddq, ddk, ddv, *options)
    return softmax_lse


def _cut(boundaries: Tensor, x: Tensor) -> list[Tensor]:
    return [x[a:b] for a, b in pairwise(boundaries.tolist())]


_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn_forward(q, k, v, *options, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        gradients = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
        _flash_attn_backward(dout, *ctx.saved_tensors, *gradients, *ctx.options, False)
        return (*gradients, *(None for _ in ctx.options))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _Flash.apply(q, k, v, dropout_p, scale, causal, *window_size, softcap, alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError("the stand-in has flash_attn_func and what rings call")
