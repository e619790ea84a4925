"""cuDNN's flash attention, shipped with torch: the fastest kernel on Hopper that need not be built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import ALIGNMENT, Backward, Forward, Scores, contiguous_rows
from armillary.attention.kernels.limits import HALVES, HeadDims, Limits
from armillary.attention.kernels.packing import group_pieces, pack, packed_lengths, unpack
from armillary.attention.kernels.top_left import BackwardTensors, TopLeft, flip_tokens, is_causal

_forward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_cudnn_attention
_backward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_cudnn_attention_backward
_packed_forward: Any = cast(Any, torch.ops.aten)._cudnn_attention_forward
_packed_backward: Any = cast(Any, torch.ops.aten)._cudnn_attention_backward

MIN_VERSION = 91501
"""First version whose lengths need not be multiples of 128 (9.15.1). torch prefers cuDNN from there on too, for Hopper
and Blackwell (`check_prefer_cudnn_attention` in its sdp_utils.cpp)."""
MIN_PACKED_VERSION = 92400
"""First version whose packed sequences may have 128 tokens or fewer (9.24; torch 2.15's `varlen_attn`)."""
DENSE = Dense()
"""For a single query or key, which torch refuses for cuDNN (`check_cudnn_tensor_shapes`, `check_cudnn_sdpa_decode`)."""


@dataclass(frozen=True)
class Cudnn(TopLeft):
    """Takes [B, H, T, D] and returns lse [B, H, T, 1] in float32. Key heads need not be repeated.

    cuDNN caches a graph per shape and memory layout. In older releases of torch the cache key lacks the layouts of out,
    dout and lse, so these are always made contiguous.
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
        if inputs.single:
            return "leaves single queries to the dense kernel"
        if inputs.documents:
            return "builds a graph for each length, and documents have many"
        return "has no windows and cuts them into many pieces" if inputs.windowed else None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[1], k.shape[1]):
            return DENSE.forward(q, k, v, (None, 0 if causal else None), Scores(scale))
        # [B, T, H, D] to [B, H, T, D] by strides; True: compute lse.
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
        dout, out = (x.contiguous().transpose(1, 2) for x in (dout, out))
        lse, rng_state = lse.transpose(1, 2).contiguous().unsqueeze(-1), _unused_rng_state(q)
        grads = _backward(dout, q, k, v, out, lse, *rng_state, None, *sizes, 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[Sequence[int]]:
        # Packed calls take no sequence of one token.
        for group in group_pieces(pieces):
            longest = [max(getattr(pieces[i], name).shape[1] for i in group) for name in ("q", "k")]
            yield from [group] if 1 not in longest and _can_pack() else ((i,) for i in group)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
        band = pieces[0].band
        queries, keys, values = zip(*(flip_tokens(band, *piece[:3]) for piece in pieces), strict=True)
        q, k, v = pack(queries), pack(keys), pack(values)
        options = (*packed_lengths(pieces), True, 0.0, is_causal(band), False)
        out, lse, *_ = _packed_forward(q, k, v, None, *options, scale=scores.scale)
        for results in zip(unpack(out, queries), unpack(lse.mT, queries), strict=True):
            out, lse = flip_tokens(band, *results)
            yield out, lse

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        band, lengths = pieces[0].band, packed_lengths(pieces)
        douts, queries, keys, values, outs, lses = zip(
            *(flip_tokens(band, *piece[:6]) for piece in pieces), strict=True
        )
        dout, q, k, v, out = pack(douts), pack(queries), pack(keys), pack(values), pack(outs)
        tensors = (dout, q, k, v, out, pack(lses).mT.contiguous())
        options = (*_unused_rng_state(q), None, *lengths, 0.0, is_causal(band))
        dq, dk, dv = _packed_backward(*tensors, *options, scale=scores.scale)
        for grads in zip(unpack(dq, queries), unpack(dk, keys), unpack(dv, values), strict=True):
            dq, dk, dv = flip_tokens(band, *grads)
            yield dq, dk, dv


@cache
def _can_pack() -> bool:
    """True if packed sequences work in this release of torch.

    Backward used to take the head dim for the longest length (pytorch/pytorch pull request 186142). The op got its
    argument `seqused_k` after the fix, in 2.15.
    """
    schema = cast(Any, torch.ops.aten)._cudnn_attention_forward.default._schema
    fixed = any(argument.name == "seqused_k" for argument in schema.arguments)
    return fixed and (torch.backends.cudnn.version() or 0) >= MIN_PACKED_VERSION


def _unused_rng_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, which are not read without dropout."""
    state = torch.empty((), dtype=torch.int64, device=q.device)
    return state, state


def _version(number: int) -> str:
    return "none" if number == 0 else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
