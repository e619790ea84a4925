"""torch's own CUDA flash attention (FlashAttention-2, arXiv 2307.08691)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash
from armillary.attention.kernels.kernel import Inputs, Scores
from armillary.attention.kernels.packing import Lengths

_forward: Any = cast(Any, torch.ops.aten)._flash_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._flash_attention_backward


@dataclass(frozen=True)
class CudaFlash(Flash):
    """Always there on CUDA, but without softcap."""

    name: str = "cuda_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        return super().refuses(inputs) or ("has no softcap" if inputs.softcap is not None else None)

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        spans = lengths or (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _forward(q, k, v, *spans, 0.0, False, False, scale=scores.scale, **_window(window))
        return out, lse

    def call_backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        window: tuple[int, int],
        scores: Scores,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = tensors[1:3]
        spans = lengths or (None, None, q.shape[1], k.shape[1])
        state = q.new_empty(2, dtype=torch.uint64)  # of dropout's random numbers; there is no dropout
        return _backward(*tensors, *spans, 0.0, False, state, state, scale=scores.scale, **_window(window))


def _window(window: tuple[int, int]) -> dict[str, int]:
    return {"window_size_left": window[0], "window_size_right": window[1]}
