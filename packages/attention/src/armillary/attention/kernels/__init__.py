"""Local attention kernels: one small protocol, one file per kernel, and the choice between them."""

from __future__ import annotations

from armillary.attention.kernels.cpu_flash import CpuFlash
from armillary.attention.kernels.cuda_flash import CudaFlash
from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.flash_attn_2 import FlashAttn2
from armillary.attention.kernels.flash_attn_3 import FlashAttn3
from armillary.attention.kernels.kernel import Backward, Forward, Inputs, Kernel, Scores, check_softcap, in_rows

__all__ = [
    "KERNELS",
    "Backward",
    "CpuFlash",
    "CudaFlash",
    "Dense",
    "FlashAttn2",
    "FlashAttn3",
    "Forward",
    "Inputs",
    "Kernel",
    "Scores",
    "check_softcap",
    "choose_kernel",
    "in_rows",
]

KERNELS: tuple[Kernel, ...] = (CpuFlash(), FlashAttn3(), FlashAttn2(), CudaFlash(), Dense())
"""In order of preference."""


def choose_kernel(inputs: Inputs, wanted: str | Kernel | None = None) -> Kernel:
    """The first kernel that accepts these inputs; only the `wanted` one, by itself or by its name, if that is given.

    Raises:
        ValueError: none does; gives each one's reason. Or what is wanted is neither a kernel nor the name of one.
    """
    if not isinstance(wanted, str | None) and not hasattr(wanted, "refuses"):
        raise ValueError(f"kernel={wanted!r} is no kernel, nor a name: {', '.join(kernel.name for kernel in KERNELS)}")
    reasons: list[str] = []
    named = [kernel for kernel in KERNELS if wanted in (None, kernel.name)]
    candidates = named if wanted is None or isinstance(wanted, str) else [wanted]
    if not candidates:
        raise ValueError(f"no kernel {wanted!r}; known: {', '.join(kernel.name for kernel in KERNELS)}")
    for kernel in candidates:
        reason = kernel.refuses(inputs)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no kernel for {inputs}: {'; '.join(reasons)}")
