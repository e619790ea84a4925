"""What FlashAttention for CUDA allocates, without its arithmetic: for fake tensors, which are on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from armillary.attention.kernels.flash import Flash
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import Scores
from armillary.attention.kernels.packing import Lengths

ROWS = 128
"""Work buffers have rows for a multiple of this many tokens."""


@dataclass(frozen=True)
class SimulatedFlash(Flash):
    """The memory of a CUDA kernel, and results that hold no numbers. Cuts and packs as those kernels do.

    Backward allocates, besides its results and in float32: dq to accumulate in, and a number for each row. Where heads
    share keys, version 2 also makes dk and dv for each query head and then adds them up; version 3 accumulates them in
    float32.

    It stands for cuDNN's as well, version 2: its backward allocates the same two, without rounding rows up (`dQ_accum`
    and `softmax_sum` of cudnn-frontend 1.23, scaled_dot_product_flash_attention.h), and what its closed part takes
    besides, such as for dk and dv of each query head, is not published.

    Args:
        version: 2 is torch's own, which also copies out and dout where they are not contiguous; 3 is the package's.
    """

    name: str = "simulated_flash"
    version: Literal[2, 3] = 2

    def refuses(self, inputs: Inputs) -> str | None:
        device = "cuda" if inputs.device == "cpu" else inputs.device
        return super().refuses(replace(inputs, device=device, capability=None))

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        heads_first = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return torch.empty_like(q), q.new_empty(heads_first, dtype=torch.float32)

    def call_backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        window: tuple[int, int],
        scores: Scores,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, _ = tensors
        if self.version == 2:
            dout, out = dout.contiguous(), out.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        held = [*self._work_on_queries(q, lengths), *self._work_on_keys(k, q.shape[-2], lengths)]
        del held
        return dq, dk, dv

    def _work_on_queries(self, q: Tensor, lengths: Lengths | None) -> list[Tensor]:
        rows = rows_of(q, lengths, lengths.queries if lengths else None)
        sums = [rows] if self.version == 2 else [rows, rows]  # 3 also keeps lse in powers of 2
        shapes = [(rows, q.shape[-2], dim_of(q.shape[-1])), *((n, q.shape[-2]) for n in sums)]
        return [q.new_empty(shape, dtype=torch.float32) for shape in shapes]

    def _work_on_keys(self, k: Tensor, heads: int, lengths: Lengths | None) -> list[Tensor]:
        """For dk, and for dv, which has its shape."""
        if heads == k.shape[-2]:
            return []
        if self.version == 2:
            return [k.new_empty((*k.shape[:-2], heads, k.shape[-1])) for _ in range(2)]
        rows = rows_of(k, lengths, lengths.keys if lengths else None)
        return [k.new_empty((rows, k.shape[-2], dim_of(k.shape[-1])), dtype=torch.float32) for _ in range(2)]


def rows_of(x: Tensor, lengths: Lengths | None, ends: Tensor | None) -> int:
    """Rows of a work buffer for x [B, T, H, D], or for packed sequences [tokens, H, D] that end where `ends` says."""
    if ends is None:
        return x.shape[0] * -(-x.shape[1] // ROWS) * ROWS
    return x.shape[0] + ROWS * (len(ends) - 1)


def dim_of(head_dim: int) -> int:
    """The head dim of a work buffer."""
    step = 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step
