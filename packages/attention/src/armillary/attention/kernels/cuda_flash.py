"""torch's own CUDA flash attention (FlashAttention-2, arXiv 2307.08691)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import Scores
from armillary.attention.kernels.packing import Lengths
from armillary.attention.kernels.top_left import Saved

_forward: Any = cast(Any, torch.ops.aten)._flash_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._flash_attention_backward

PACKAGES = {"FA3": "flash_attn_3", "FA4": "flash_attn_4"}
"""By the name under which `torch.nn.attention.activate_flash_attention_impl` puts them in place of torch's."""


@dataclass(frozen=True)
class CudaFlash(Flash):
    """Always there on CUDA, but without softcap."""

    name: str = "cuda_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        reason, instead = super().refuses(inputs), PACKAGES.get(inputs.activated or "")
        if reason is None and instead is not None:
            return f"{inputs.activated} is activated in place of torch's op; {instead} calls it with all that it can do"
        small = inputs.capability is not None and ((8, 6) <= inputs.capability <= (8, 9) or inputs.capability[0] == 12)
        if reason is None and small and 192 < inputs.head_dim <= 224:
            return f"has no backward for head dim {inputs.head_dim} on compute capabilities 8.6 to 8.9 and 12.x"
        return reason

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        spans = lengths or (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _forward(q, k, v, *spans, 0.0, False, False, scale=scores.scale, **_window(window))
        return out, lse

    def call_backward(
        self, tensors: Saved, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = tensors[1:3]
        spans = lengths or (None, None, q.shape[1], k.shape[1])
        state = q.new_empty(2, dtype=torch.uint64)  # of dropout's random numbers; there is no dropout
        return _backward(*tensors, *spans, 0.0, False, state, state, scale=scores.scale, **_window(window))


def _window(window: tuple[int, int]) -> dict[str, int]:
    return {"window_size_left": window[0], "window_size_right": window[1]}
