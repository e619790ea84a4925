"""cuDNN's flash attention, shipped with torch: the fastest kernel on Hopper that needs no further package."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.inputs import HALVES, HeadDims, Inputs, Limits
from armillary.attention.kernels.kernel import (
    ALIGNMENT,
    BackwardTensors,
    PackingKernel,
    Scores,
    Sequences,
    contiguous_rows,
)
from armillary.attention.kernels.top_left import TopLeft
from armillary.attention.mask import Window

_aten = cast(Any, torch.ops.aten)
_forward: Any = _aten._scaled_dot_product_cudnn_attention
_backward: Any = _aten._scaled_dot_product_cudnn_attention_backward
_packed_forward: Any = _aten._cudnn_attention_forward
_packed_backward: Any = _aten._cudnn_attention_backward

MIN_VERSION = 91501
"""First version (9.15.1) that supports lengths which are not multiples of 128. From the same version on, torch prefers
cuDNN on Hopper and Blackwell (`check_prefer_cudnn_attention` in its sdp_utils.cpp)."""
MIN_PACKED_VERSION = 92400
"""First version (9.24) whose packed sequences may have 128 tokens or fewer, as in torch 2.15's `varlen_attn`."""
DENSE = Dense()
"""Computes tiles of a single key, which torch does not pass to cuDNN (`check_cudnn_tensor_shapes`), and of a single
query, which it refuses with some versions of cuDNN (`check_cudnn_sdpa_decode`)."""


@dataclass(frozen=True)
class Cudnn(PackingKernel, TopLeft):
    """torch's op takes [B, H, T, D], with as many key heads or fewer, and returns lse [B, H, T, 1] in float32.

    cuDNN builds a graph per shape and memory layout, which torch caches. In older releases of torch the cache key lacks
    the layouts of out, dout and lse, so these are always made contiguous.
    """

    name: str = "cudnn"
    limits: ClassVar[Limits] = Limits(
        device="cuda",
        dtypes=HALVES,
        head_dims=HeadDims(largest=128, multiple=8, exceptions=((192, 128),)),
        majors=(9, 10),
        deterministic=False,
    )

    def refuses(self, inputs: Inputs) -> str | None:
        reason = self.limits.refuses(inputs)
        if reason is None and inputs.cudnn is not None and inputs.cudnn < MIN_VERSION:
            return f"needs cuDNN {_version(MIN_VERSION)} or above, not {_version(inputs.cudnn)}"
        return reason

    def drawback(self, inputs: Inputs) -> str | None:
        if inputs.documents:
            return "builds a graph for each length, and documents have many"
        return "has no windows and cuts them into many pieces" if inputs.windowed else None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[1], k.shape[1]):
            return DENSE.forward(q, k, v, (None, 0 if causal else None), Scores(scale))
        # `transpose` gives the op [B, H, T, D] without a copy; the argument True makes it compute lse.
        q, k, v = (contiguous_rows(x, ALIGNMENT).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _forward(q, k, v, None, True, 0.0, causal, False, scale=scale)
        if not lse.is_contiguous():
            raise RuntimeError("cuDNN's backward reads another lse with TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1: unset it")
        return out.transpose(1, 2), lse.flatten(2).transpose(1, 2)

    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        if 1 in (q.shape[1], k.shape[1]):
            return DENSE.backward(*tensors, (None, 0 if causal else None), Scores(scale))
        sizes = (None, None, q.shape[1], k.shape[1])
        q, k, v = (contiguous_rows(x, ALIGNMENT).transpose(1, 2) for x in (q, k, v))
        # Contiguous, because the graph cache of older torch ignores their layouts (see the class).
        dout, out = (x.contiguous().transpose(1, 2) for x in (dout, out))
        lse, rng_state = lse.transpose(1, 2).contiguous().unsqueeze(-1), _unused_rng_state(q)
        grads = _backward(dout, q, k, v, out, lse, *rng_state, None, *sizes, 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        # Packed calls do not support sequences of one token.
        return None if 1 in (queries, keys) or not _can_pack() else (band != (None, None), band[0] is not None)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        band, lengths = sequences.band, sequences.lengths(q.device)
        (q,) = _flip_sequences(band, sequences.queries, q)
        k, v = _flip_sequences(band, sequences.keys, k, v)
        options = (True, 0.0, band != (None, None), False)  # with lse, no dropout, causal, no debug mask
        out, lse, *_ = _packed_forward(q, k, v, None, *lengths, *options, scale=scores.scale)
        out, lse = _flip_sequences(band, sequences.queries, out, lse.mT)
        return out, lse

    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        band, lengths = sequences.band, sequences.lengths(q.device)
        dout, q, out, lse = _flip_sequences(band, sequences.queries, dout, q, out, lse)
        k, v = _flip_sequences(band, sequences.keys, k, v)
        options = (*_unused_rng_state(q), None, *lengths, 0.0, band != (None, None))
        dq, dk, dv = _packed_backward(dout, q, k, v, out, lse.mT.contiguous(), *options, scale=scores.scale)
        (dq,) = _flip_sequences(band, sequences.queries, dq)
        dk, dv = _flip_sequences(band, sequences.keys, dk, dv)
        return dq, dk, dv


def _flip_sequences(band: Window, lengths: tuple[int, ...], *packed: Tensor) -> list[Tensor]:
    """Reverses the tokens of each packed sequence, as `TopLeft.forward` does for one."""
    if band[0] is None:
        return list(packed)
    return [torch.cat([sequence.flip(0) for sequence in x.split_with_sizes(lengths)]) for x in packed]


@cache
def _can_pack() -> bool:
    # torch's backward took the head dim for the longest length (fixed in pytorch/pytorch pull request 186142). An op
    # with the argument `seqused_k` (2.15) is newer than the fix.
    schema = cast(Any, torch.ops.aten)._cudnn_attention_forward.default._schema
    fixed = any(argument.name == "seqused_k" for argument in schema.arguments)
    return fixed and (torch.backends.cudnn.version() or 0) >= MIN_PACKED_VERSION


def _unused_rng_state(q: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.empty((), dtype=torch.int64, device=q.device)
    return state, state


def _version(number: int) -> str:
    return "none" if number == 0 else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
