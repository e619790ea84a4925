"""The flash-attn package, version 3, for Hopper (arXiv 2407.08608). Imported at the first call, not before."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash, installed, parameters
from armillary.attention.kernels.kernel import Inputs, Scores
from armillary.attention.kernels.packing import Lengths

INTERFACE = "flash_attn_interface"


@dataclass(frozen=True)
class FlashAttn3(Flash):
    """The fastest on an H100 or H200, and only there; with softcap."""

    name: str = "flash_attn_3"

    def refuses(self, inputs: Inputs) -> str | None:
        reason = super().refuses(inputs)
        if reason is None and (inputs.capability or (0, 0))[0] != 9:
            found = "an unknown one" if inputs.capability is None else ".".join(map(str, inputs.capability))
            reason = f"needs compute capability 9 (Hopper), not {found}"
        return reason or (None if installed(INTERFACE) else f"{INTERFACE} is not installed")

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"softmax_scale": scores.scale, "causal": False, "softcap": scores.softcap or 0.0}
        if lengths is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options |= dict(zip(names, lengths, strict=True))
        out, lse, *_ = _call("_flash_attn_forward", (q, k, v), window, options)
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
        options = {
            "softcap": scores.softcap or 0.0,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        _call("_flash_attn_backward", (*tensors, *spans, dq, dk, dv, scores.scale, causal), window, options)
        return dq, dk, dv


def _call(name: str, given: tuple[Any, ...], window: tuple[int, int], options: dict[str, Any]) -> Any:
    """Calls a function as the installed release has it.

    Until November 2025 a window was one argument, and what is not used had to be given too, as None.
    """
    function = getattr(import_module(INTERFACE), name)
    taken = parameters(function)
    unused = {p.name: None for p in taken[len(given) :] if p.default is p.empty and p.name not in options}
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    pair = any(p.name == "window_size" for p in taken)
    return function(*given, **unused, **options, **({"window_size": window} if pair else sides))
