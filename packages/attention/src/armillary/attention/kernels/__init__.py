"""Attention kernels of one device: an interface, one file per kernel, and the choice between them.

kernel       the interface
tile         a rectangle of a block and its visible band: the work of one kernel call
inputs       properties of an attention call that the choice of a kernel depends on
limits       the inputs that a kernel supports, as data
efficiency   published speed
choice       the list of kernels and the choice
flash        base of the FlashAttention kernels for CUDA
windows      a tile's band as FlashAttention's window
top_left     base of kernels that only support full rectangles and masks that are causal from the top left
packing      small tiles in one call with variable lengths
batched      small tiles of one shape in one call, as rows of a batch
"""

from __future__ import annotations

from armillary.attention.kernels.choice import KERNELS, KernelCandidate, choose_kernel, kernel_candidates
from armillary.attention.kernels.cpu_flash import CpuFlash
from armillary.attention.kernels.cuda_flash import CudaFlash
from armillary.attention.kernels.cudnn import Cudnn
from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.efficiency import EFFICIENCY, Efficiency, default_margin, efficiency
from armillary.attention.kernels.efficient import Efficient
from armillary.attention.kernels.flash_attn_2 import FlashAttn2
from armillary.attention.kernels.flash_attn_3 import FlashAttn3
from armillary.attention.kernels.flash_attn_4 import FlashAttn4
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import (
    Kernel,
    PackingKernel,
    Scores,
    check_softcap,
    contiguous_rows,
)

__all__ = [
    "EFFICIENCY",
    "KERNELS",
    "CpuFlash",
    "CudaFlash",
    "Cudnn",
    "Dense",
    "Efficiency",
    "Efficient",
    "FlashAttn2",
    "FlashAttn3",
    "FlashAttn4",
    "Inputs",
    "Kernel",
    "KernelCandidate",
    "PackingKernel",
    "Scores",
    "check_softcap",
    "choose_kernel",
    "contiguous_rows",
    "default_margin",
    "efficiency",
    "kernel_candidates",
]
