"""The flash-attn package, version 3, for Hopper (arXiv 2407.08608). Imported at the first call, not before."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash, installed
from armillary.attention.kernels.kernel import Inputs, Scores
from armillary.attention.kernels.packing import Lengths


@dataclass(frozen=True)
class FlashAttn3(Flash):
    """The fastest on an H100 or H200, and only there; with softcap."""

    name: str = "flash_attn_3"

    def refuses(self, inputs: Inputs) -> str | None:
        reason = super().refuses(inputs)
        if reason is None and (inputs.capability or (0, 0))[0] != 9:
            found = "an unknown one" if inputs.capability is None else ".".join(map(str, inputs.capability))
            reason = f"needs compute capability 9 (Hopper), not {found}"
        return reason or (None if installed("flash_attn_interface") else "flash_attn_interface is not installed")

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        options = _options(window, scores) | {"softmax_scale": scores.scale}
        if lengths is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options |= dict(zip(names, lengths, strict=True))
        out, lse, *_ = _interface()._flash_attn_forward(q, k, v, **options)
        return out, lse

    def call_backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        window: tuple[int, int],
        scores: Scores,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        ends_q, ends_k, most_q, most_k = lengths or (None, None, None, None)
        spans = (ends_q, ends_k, None, None, most_q, most_k)  # None: how much of each sequence is used; all
        causal = False  # by position: releases differ in what they call it
        options = _options(window, scores) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        _interface()._flash_attn_backward(*tensors, *spans, dq, dk, dv, scores.scale, causal, **options)
        return dq, dk, dv


def _options(window: tuple[int, int], scores: Scores) -> dict[str, Any]:
    return {
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": scores.softcap or 0.0,
    }


def _interface() -> Any:
    return import_module("flash_attn_interface")
