"""The flash-attn package, version 3, for Hopper (arXiv 2407.08608). Imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from armillary.attention.kernels.flash import WITH_SOFTCAP, Flash, FlashCall
from armillary.attention.kernels.installed import parameters
from armillary.attention.kernels.kernel import BackwardTensors
from armillary.attention.kernels.limits import Limits

INTERFACE = "flash_attn_interface"


@dataclass(frozen=True)
class FlashAttn3(Flash):
    """The fastest kernel on Hopper (H100, H200), and only for Hopper. With softcap.

    Args:
        sm_margin: number of multiprocessors that forward leaves to other kernels. Forward occupies all others until it
            ends, so with a margin of 0 NCCL's kernels wait for its end.
    """

    name: str = "flash_attn_3"
    sm_margin: int = 0
    limits: ClassVar[Limits] = replace(WITH_SOFTCAP, majors=(9,), module=INTERFACE)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        options = self._options(call) | {"softmax_scale": call.scores.scale, "causal": False}
        if call.lengths is not None:
            options |= call.lengths.by_name
        out, lse, *_ = _call("_flash_attn_forward", (q, k, v), call.window, options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        ends_q, ends_k, longest_q, longest_k = call.lengths or (None, None, None, None)
        # The two None between them are `seqused_q` and `seqused_k`: all tokens of each sequence are used.
        lengths_args = (ends_q, ends_k, None, None, longest_q, longest_k)
        causal = False  # passed by position, because releases name the parameter differently
        options = self._options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        arguments = (*tensors, *lengths_args, dq, dk, dv, call.scores.scale, causal)
        _call("_flash_attn_backward", arguments, call.window, options)
        return dq, dk, dv

    def _options(self, call: FlashCall) -> dict[str, Any]:
        return {"softcap": call.scores.softcap or 0.0, "sm_margin": self.sm_margin}


def _call(name: str, arguments: tuple[Any, ...], window: tuple[int, int], options: dict[str, Any]) -> Any:
    """Calls a function of flash-attn 3 with the parameters that the installed release has.

    Releases until November 2025 take the window as one argument `window_size`, and have no defaults for unused
    parameters, which get None here.
    """
    function = getattr(import_module(INTERFACE), name)
    signature = parameters(function)
    defaults = {p.name: None for p in signature[len(arguments) :] if p.default is p.empty and p.name not in options}
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    one_window = any(p.name == "window_size" for p in signature)
    return function(*arguments, **defaults, **options, **({"window_size": window} if one_window else sides))
