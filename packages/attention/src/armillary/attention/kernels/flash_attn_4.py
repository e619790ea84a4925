"""The flash-attn package, version 4, for Blackwell (arXiv 2603.05451). Imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from armillary.attention.kernels.flash import FLASH, Flash, FlashCall
from armillary.attention.kernels.kernel import BackwardTensors
from armillary.attention.kernels.limits import HeadDims, Limits

INTERFACE = "flash_attn.cute.interface"


@dataclass(frozen=True)
class FlashAttn4(Flash):
    """The kernel that torch's `activate_flash_attention_impl("FA4")` installs, called directly.

    So backward supports windows in every release of torch.
    """

    name: str = "flash_attn_4"
    limits: ClassVar[Limits] = replace(
        FLASH,
        majors=(9, 10),
        head_dims_by_major=((10, HeadDims(largest=128, multiple=8, equal=True, exceptions=((256, 256),))),),
        module=INTERFACE,
    )

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        options = _options(call) | {"return_lse": True}
        out, lse, *_ = import_module(INTERFACE)._flash_attn_fwd(q, k, v, **options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        options = _options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        dq, dk, dv, *_ = import_module(INTERFACE)._flash_attn_bwd(q, k, v, out, dout, lse, **options)
        return dq, dk, dv


def _options(call: FlashCall) -> dict[str, Any]:
    """Returns the keyword arguments that forward and backward share."""
    # This interface takes None for an unbounded side, not -1, and no window beside `causal`.
    left_width, right_width = (None if side < 0 else side for side in call.window)
    is_causal = left_width is None and right_width == 0
    options: dict[str, Any] = {"softmax_scale": call.scores.scale, "causal": is_causal}
    if not is_causal:
        options |= {"window_size_left": left_width, "window_size_right": right_width}
    return options if call.lengths is None else options | call.lengths.by_name
