"""Local attention kernels: one small protocol, one file for each, and the choice between them.

kernel.py       what a kernel is
inputs.py       what its choice depends on
limits.py       what it takes, as data
efficiency.py   how fast each is, as published
choice.py       all of them, and the choice; chosen.py: the same in words
flash.py        what FlashAttention's share; top_left.py: what those share that know causal rectangles alone
"""

from __future__ import annotations

from armillary.attention.kernels.choice import KERNELS, Ruling, choose_kernel, rulings
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
from armillary.attention.kernels.kernel import Backward, Forward, Kernel, Scores, check_softcap, in_rows

__all__ = [
    "EFFICIENCY",
    "KERNELS",
    "Backward",
    "CpuFlash",
    "CudaFlash",
    "Cudnn",
    "Dense",
    "Efficiency",
    "Efficient",
    "FlashAttn2",
    "FlashAttn3",
    "FlashAttn4",
    "Forward",
    "Inputs",
    "Kernel",
    "Ruling",
    "Scores",
    "check_softcap",
    "choose_kernel",
    "default_margin",
    "efficiency",
    "in_rows",
    "rulings",
]
