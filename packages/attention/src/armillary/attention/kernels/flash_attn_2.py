"""The flash-attn package, version 2 (arXiv 2307.08691). Imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from armillary.attention.kernels.flash import WITH_SOFTCAP, Flash, FlashCall
from armillary.attention.kernels.kernel import BackwardTensors
from armillary.attention.kernels.limits import Limits

INTERFACE = "flash_attn.flash_attn_interface"


@dataclass(frozen=True)
class FlashAttn2(Flash):
    """`CudaFlash` with softcap."""

    name: str = "flash_attn_2"
    limits: ClassVar[Limits] = replace(WITH_SOFTCAP, module=INTERFACE)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        options = _options(call) | {"return_softmax": False}
        if call.lengths is None:
            out, lse, *_ = _interface()._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = _interface()._flash_attn_varlen_forward(q, k, v, *call.lengths, **options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        options = _options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if call.lengths is None:
            _interface()._flash_attn_backward(*tensors, dq, dk, dv, **options)
        else:
            _interface()._flash_attn_varlen_backward(*tensors, dq, dk, dv, *call.lengths, **options)
        return dq, dk, dv


def _options(call: FlashCall) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": call.scores.scale,
        "causal": False,
        "window_size_left": call.window[0],
        "window_size_right": call.window[1],
        "softcap": call.scores.softcap or 0.0,
        "alibi_slopes": None,
    }


def _interface() -> Any:
    return import_module(INTERFACE)
