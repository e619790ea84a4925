"""The flash-attn package, version 2 (arXiv 2307.08691). Imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from armillary.attention.kernels.flash import WITH_SOFTCAP, Flash
from armillary.attention.kernels.kernel import BackwardTensors, Scores
from armillary.attention.kernels.limits import Limits
from armillary.attention.kernels.packing import Lengths

INTERFACE = "flash_attn.flash_attn_interface"


@dataclass(frozen=True)
class FlashAttn2(Flash):
    """Like torch's own, with softcap."""

    name: str = "flash_attn_2"
    limits: ClassVar[Limits] = replace(WITH_SOFTCAP, module=INTERFACE)

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        options = _options(window, scores) | {"return_softmax": False}
        if lengths is None:
            out, lse, *_ = _interface()._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = _interface()._flash_attn_varlen_forward(q, k, v, *lengths, **options)
        return out, lse

    def call_backward(
        self, tensors: BackwardTensors, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        options = _options(window, scores) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if lengths is None:
            _interface()._flash_attn_backward(*tensors, dq, dk, dv, **options)
        else:
            _interface()._flash_attn_varlen_backward(*tensors, dq, dk, dv, *lengths, **options)
        return dq, dk, dv


def _options(window: tuple[int, int], scores: Scores) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": False,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": None,
    }


def _interface() -> Any:
    return import_module(INTERFACE)
