"""torch's own CUDA flash attention (FlashAttention-2, arXiv 2307.08691)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash, FlashCall
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import BackwardTensors

_forward: Any = cast(Any, torch.ops.aten)._flash_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._flash_attention_backward

REPLACEMENTS = {"FA3": "flash_attn_3", "FA4": "flash_attn_4"}
"""Names of our kernels for the implementations that `torch.nn.attention.activate_flash_attention_impl` puts in place of
torch's op."""


@dataclass(frozen=True)
class CudaFlash(Flash):
    """Needs no package besides torch. Without softcap."""

    name: str = "cuda_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        reason, replacement = super().refuses(inputs), REPLACEMENTS.get(inputs.activated or "")
        if reason is None and replacement is not None:
            return (
                f"{inputs.activated} is activated in place of torch's op; {replacement} calls it with all its features"
            )
        # Backward of head dims 193 to 224 needs more shared memory than these GPUs have.
        small = inputs.capability is not None and ((8, 6) <= inputs.capability <= (8, 9) or inputs.capability[0] == 12)
        if reason is None and small and 192 < inputs.head_dim <= 224:
            return f"has no backward for head dim {inputs.head_dim} on compute capabilities 8.6 to 8.9 and 12.x"
        return reason

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        lengths_or_sizes = call.lengths or (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _forward(q, k, v, *lengths_or_sizes, 0.0, False, False, **_options(call))
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        q, k = tensors[1:3]
        lengths_or_sizes = call.lengths or (None, None, q.shape[1], k.shape[1])
        rng_state = q.new_empty(2, dtype=torch.uint64)  # unused without dropout
        return _backward(*tensors, *lengths_or_sizes, 0.0, False, rng_state, rng_state, **_options(call))


def _options(call: FlashCall) -> dict[str, float]:
    left_width, right_width = call.window
    return {"scale": call.scores.scale, "window_size_left": left_width, "window_size_right": right_width}
