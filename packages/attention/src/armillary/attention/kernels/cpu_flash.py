"""torch's flash attention for the CPU: a real flash kernel (FlashAttention, arXiv 2205.14135), in any float dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from armillary.attention.kernels.batched import Batched
from armillary.attention.kernels.kernel import in_rows
from armillary.attention.kernels.limits import Limits
from armillary.attention.kernels.top_left import Saved, TopLeft

_forward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu
_backward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CpuFlash(Batched, TopLeft):
    """Of heads-first tensors, with one head dim."""

    name: str = "cpu_flash"
    limits: ClassVar[Limits] = Limits(device="cpu")

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        dim = v.shape[3]
        q, k, v = (in_rows(x).transpose(1, 2) for x in _one_dim(q, k, v))
        out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2)[..., :dim], lse.transpose(1, 2)

    def call_backward(self, tensors: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dims, lse = [x.shape[3] for x in tensors[1:4]], tensors[5]
        dout, q, k, v, out = (in_rows(x).transpose(1, 2) for x in _one_dim(*tensors[:5]))
        grads = _backward(dout, q, k, v, out, lse.transpose(1, 2), 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x, dim in zip(grads, dims, strict=True))
        return dq, dk, dv


def _one_dim(*tensors: Tensor) -> list[Tensor]:
    """The tensors with one head dim: the kernel wants it so, and zeros change no score and no output."""
    dim = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == dim else pad(x, (0, dim - x.shape[3])) for x in tensors]
