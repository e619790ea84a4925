# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Attention kernels of one device: an interface, the kernels, and the choice between them.

inputs       properties of a call that the choice depends on, and the inputs that a kernel supports, as data
kernel       the interface: a tile (a rectangle of a block and its visible band), one call, packs of small tiles
top_left     kernels of full rectangles and top-left causal masks: torch's for the CPU, and for float32 on CUDA
flash        FlashAttention for CUDA: torch's own, and versions 2, 3 and 4 of flash-attn
cudnn        cuDNN's flash attention
dense        matrix products, for any inputs
choice       the list of kernels, their published speeds, and the choice
"""

from armillary.attention.kernels.choice import (
    EFFICIENCY,
    KERNELS,
    MULTIPROCESSORS,
    PERSISTENT,
    check_kernel_name,
    choose_kernel,
    default_margin,
    efficiency,
    kernel_candidates,
)
from armillary.attention.kernels.cudnn import Cudnn
from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.flash import CudaFlash, Flash, FlashAttn2, FlashAttn3, FlashAttn4, FlashCall
from armillary.attention.kernels.inputs import FAMILIES, Inputs, is_installed
from armillary.attention.kernels.kernel import (
    BackwardTensors,
    Kernel,
    Lengths,
    PackingKernel,
    Scores,
    check_softcap,
    contiguous_rows,
)
from armillary.attention.kernels.top_left import CpuFlash, Efficient
