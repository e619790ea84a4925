"""What the backward of a kernel needs of `out`, in one number a row, so that `out` need not travel.

A flash backward (FlashAttention, arXiv 2205.14135, algorithm 4) uses out in one place: the row sum of dout * out. Any
other rows with the same sums serve it as well, and the shortest such rows are the parts of out along dout:

    out' = ratio * dout,    ratio = (dout . out) / (dout . dout)
"""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.core import wide


def ratio(dout: Tensor, out: Tensor) -> Tensor:
    """[B, T, H] in the accumulation dtype, from two [B, T, H, Dv]; 0 where dout is 0."""
    dout, out = dout.to(wide(dout.dtype)), out.to(wide(out.dtype))
    norm = torch.linalg.vector_norm(dout, dim=-1, dtype=torch.float64)  # squares of small gradients are smaller still
    sums = torch.einsum("bthd,bthd->bth", dout, out)
    return (sums / norm.square()).masked_fill(norm == 0, 0).to(dout.dtype)


def rows(dout: Tensor, ratio: Tensor) -> Tensor:
    """[B, T, H, Dv]: rows that stand in for out."""
    return (dout * ratio.unsqueeze(-1)).to(dout.dtype)
