"""`SimulatedFlash`: FlashAttention for CUDA reduced to its allocations, for fake tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from armillary.attention.parts import BackwardTensors, Flash, FlashCall, Inputs, Lengths

ROWS = 128
"""Work buffers are padded to a multiple of this many tokens."""


@dataclass(frozen=True)
class SimulatedFlash(Flash):
    """Allocates the tensors that a CUDA kernel allocates, without values. Splits and packs calls as CUDA kernels do.

    Backward allocates its results, and in float32 an accumulator for dq and one number per query and head (version 3:
    two). If query heads share key heads, version 2 also allocates dk and dv of every query head and then sums them;
    version 3 accumulates them in float32.

    Version 2 also stands for cuDNN. cuDNN's backward allocates the same two float32 buffers, without padding
    (`dQ_accum` and `softmax_sum` of cudnn-frontend 1.23, scaled_dot_product_flash_attention.h). The workspace of its
    closed source, for example for dk and dv of each query head, is not published.

    Args:
        version: 2 is torch's own kernel, which also copies non-contiguous out and dout; 3 is the flash-attn package's.
    """

    name: str = "simulated_flash"
    version: Literal[2, 3] = 2

    def refuses(self, inputs: Inputs) -> str | None:
        device = "cuda" if inputs.device == "cpu" else inputs.device
        return super().refuses(replace(inputs, device=device, capability=None))

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])  # heads first
        return torch.empty_like(q), q.new_empty(lse_shape, dtype=torch.float32)

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, _ = tensors
        if self.version == 2:
            dout, out = dout.contiguous(), out.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # All buffers must be alive at once, as in the kernel.
        buffers = [*self._query_buffers(q, call.lengths), *self._key_buffers(k, q.shape[-2], call.lengths)]
        del buffers
        return dq, dk, dv

    def _query_buffers(self, q: Tensor, lengths: Lengths | None) -> list[Tensor]:
        """Buffers for queries: an accumulator for dq, and the row sums of dout * out."""
        rows = padded_rows(q, lengths.queries if lengths else None)
        sums = [rows] if self.version == 2 else [rows, rows]  # version 3 also stores lse in base 2
        shapes = [(rows, q.shape[-2], padded_head_dim(q.shape[-1])), *((n, q.shape[-2]) for n in sums)]
        return [q.new_empty(shape, dtype=torch.float32) for shape in shapes]

    def _key_buffers(self, k: Tensor, heads: int, lengths: Lengths | None) -> list[Tensor]:
        """Buffers for dk and for dv; none if each query head has a key head of its own."""
        if heads == k.shape[-2]:
            return []
        if self.version == 2:
            return [k.new_empty((*k.shape[:-2], heads, k.shape[-1])) for _ in range(2)]
        shape = padded_rows(k, lengths.keys if lengths else None), k.shape[-2], padded_head_dim(k.shape[-1])
        return [k.new_empty(shape, dtype=torch.float32) for _ in range(2)]


def padded_rows(x: Tensor, document_ends: Tensor | None) -> int:
    """Number of tokens of a work buffer for x [B, T, H, D], or for packed documents [tokens, H, D]."""
    if document_ends is None:
        return x.shape[0] * -(-x.shape[1] // ROWS) * ROWS
    return x.shape[0] + ROWS * (len(document_ends) - 1)  # each document may need up to ROWS tokens of padding


def padded_head_dim(head_dim: int) -> int:
    """Head dim of a work buffer."""
    multiple = 32 if head_dim <= 128 else 64
    return -(-head_dim // multiple) * multiple
