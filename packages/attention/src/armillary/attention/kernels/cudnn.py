"""cuDNN's flash attention, which torch ships: the fastest on Hopper that needs no build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import ALIGNED, Backward, Forward, Scores, in_rows
from armillary.attention.kernels.limits import HALVES, Dims, Limits
from armillary.attention.kernels.packing import lengths, packed, packs, unpacked
from armillary.attention.kernels.top_left import Saved, TopLeft, flipped, is_causal

_forward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_cudnn_attention
_backward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_cudnn_attention_backward
_packed_forward: Any = cast(Any, torch.ops.aten)._cudnn_attention_forward
_packed_backward: Any = cast(Any, torch.ops.aten)._cudnn_attention_backward

LEAST = 91501
"""The version from which lengths need not be multiples of 128 (9.15.1); torch too prefers cuDNN from there on, and for
Hopper and Blackwell (`check_prefer_cudnn_attention` of its sdp_utils.cpp)."""
LEAST_PACKED = 92400
"""The version from which packed sequences may be 128 tokens or shorter (9.24; torch 2.15's `varlen_attn`)."""
TINY = Dense()
"""For one query or one key: torch refuses those for cuDNN (`check_cudnn_tensor_shapes`, `check_cudnn_sdpa_decode`)."""


@dataclass(frozen=True)
class Cudnn(TopLeft):
    """Of heads-first tensors, whose lse is [B, H, T, 1] in float32; key heads need not be repeated.

    cuDNN makes and keeps a graph for each shape and layout. In older releases of torch a graph's key lacks the layouts
    of out, dout and lse, so these are always contiguous.
    """

    name: str = "cudnn"
    limits: ClassVar[Limits] = Limits(
        device="cuda",
        dtypes=HALVES,
        dims=Dims(most=128, multiple=8, besides=((192, 128),)),
        majors=(9, 10),
        deterministic=False,
    )

    def refuses(self, inputs: Inputs) -> str | None:
        reason = self.limits.refuses(inputs)
        if reason is None and inputs.cudnn is not None and inputs.cudnn < LEAST:
            return f"needs cuDNN {_version(LEAST)} or above, not {_version(inputs.cudnn)}"
        return reason

    def hesitates(self, inputs: Inputs) -> str | None:
        if inputs.single:
            return "leaves single queries to the dense kernel"
        if inputs.documents:
            return "makes a graph for each length, and documents have many"
        return "knows no windows, and cuts them into many pieces" if inputs.windowed else None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[1], k.shape[1]):
            return TINY.forward(q, k, v, (None, 0 if causal else None), Scores(scale))
        q, k, v = (in_rows(x, ALIGNED).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _forward(q, k, v, None, True, 0.0, causal, False, scale=scale)
        if not lse.is_contiguous():
            raise RuntimeError("cuDNN's backward reads another lse with TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1: unset it")
        return out.transpose(1, 2), lse.flatten(2).transpose(1, 2)

    def call_backward(self, tensors: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        if 1 in (q.shape[1], k.shape[1]):
            return TINY.backward(*tensors, (None, 0 if causal else None), Scores(scale))
        spans = (None, None, q.shape[1], k.shape[1])
        q, k, v = (in_rows(x, ALIGNED).transpose(1, 2) for x in (q, k, v))
        dout, out = (x.contiguous().transpose(1, 2) for x in (dout, out))
        lse, state = lse.transpose(1, 2).contiguous().unsqueeze(-1), _no_dropout(q)
        grads = _backward(dout, q, k, v, out, lse, *state, None, *spans, 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[Sequence[int]]:
        for group in packs(pieces):
            longest = [max(getattr(pieces[i], name).shape[1] for i in group) for name in ("q", "k")]
            yield from [group] if 1 not in longest and _packs() else ((i,) for i in group)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
        band = pieces[0].band
        queries, keys, values = zip(*(flipped(band, *piece[:3]) for piece in pieces), strict=True)
        q, k, v = packed(queries), packed(keys), packed(values)
        how = (*lengths(pieces), True, 0.0, is_causal(band), False)
        out, lse, *_ = _packed_forward(q, k, v, None, *how, scale=scores.scale)
        for part in zip(unpacked(out, queries), unpacked(lse.mT, queries), strict=True):
            out, lse = flipped(band, *part)
            yield out, lse

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        band, spans = pieces[0].band, lengths(pieces)
        parts = list(zip(*(flipped(band, *piece[:6]) for piece in pieces), strict=True))
        dout, q, k, v, out = (packed(x) for x in parts[:5])
        saved = (dout, q, k, v, out, packed(parts[5]).mT.contiguous())
        how = (*_no_dropout(q), None, *spans, 0.0, is_causal(band))
        grads = _packed_backward(*saved, *how, scale=scores.scale)
        for shares in zip(*(unpacked(x, like) for x, like in zip(grads, parts[1:4], strict=True)), strict=True):
            dq, dk, dv = flipped(band, *shares)
            yield dq, dk, dv


@cache
def _packs() -> bool:
    """Whether this release of torch packs right.

    Backward took the head dim for the longest length (pytorch/pytorch pull request 186142); mended before the op knew
    `seqused_k`, in 2.15.
    """
    schema = cast(Any, torch.ops.aten)._cudnn_attention_forward.default._schema
    mended = any(argument.name == "seqused_k" for argument in schema.arguments)
    return mended and (torch.backends.cudnn.version() or 0) >= LEAST_PACKED


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of dropout's random numbers, which nobody reads."""
    state = torch.empty((), dtype=torch.int64, device=q.device)
    return state, state


def _version(number: int) -> str:
    return "none" if number == 0 else f"{number // 10000}.{number // 100 % 100}.{number % 100}"
