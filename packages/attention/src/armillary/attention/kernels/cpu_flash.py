"""torch's flash attention for the CPU (FlashAttention, arXiv 2205.14135), in any float dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from armillary.attention.kernels.batched import Batched
from armillary.attention.kernels.kernel import BackwardTensors, contiguous_rows
from armillary.attention.kernels.limits import Limits
from armillary.attention.kernels.top_left import TopLeft

_forward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu
_backward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CpuFlash(Batched, TopLeft):
    """torch's op takes [B, H, T, D], with the same head dim for q, k and v: narrower tensors are padded."""

    name: str = "cpu_flash"
    limits: ClassVar[Limits] = Limits(device="cpu")

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        # `transpose` gives the op [B, H, T, D] without a copy.
        dim = v.shape[3]
        q, k, v = (contiguous_rows(x).transpose(1, 2) for x in _pad_head_dims(q, k, v))
        out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2)[..., :dim], lse.transpose(1, 2)

    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dims, lse = [x.shape[3] for x in tensors[1:4]], tensors[5]
        dout, q, k, v, out = (contiguous_rows(x).transpose(1, 2) for x in _pad_head_dims(*tensors[:5]))
        grads = _backward(dout, q, k, v, out, lse.transpose(1, 2), 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x, dim in zip(grads, dims, strict=True))
        return dq, dk, dv


def _pad_head_dims(*tensors: Tensor) -> list[Tensor]:
    """Pads tensors with zeros to one head dim, as the op needs. Zeros change no score and no output."""
    dim = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == dim else pad(x, (0, dim - x.shape[3])) for x in tensors]
