"""Which kernel runs: a pure function of `Inputs`, and of what is installed."""

from __future__ import annotations

from typing import NamedTuple

from armillary.attention.kernels.cpu_flash import CpuFlash
from armillary.attention.kernels.cuda_flash import CudaFlash
from armillary.attention.kernels.cudnn import Cudnn
from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.efficiency import efficiency
from armillary.attention.kernels.efficient import Efficient
from armillary.attention.kernels.flash_attn_2 import FlashAttn2
from armillary.attention.kernels.flash_attn_3 import FlashAttn3
from armillary.attention.kernels.flash_attn_4 import FlashAttn4
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    CpuFlash(),
    FlashAttn3(),
    FlashAttn4(),
    Cudnn(),
    FlashAttn2(),
    CudaFlash(),
    Efficient(),
    Dense(),
)
"""In order of preference, where nothing is published (`efficiency.py`)."""


class Ruling(NamedTuple):
    """What is said of one kernel.

    Args:
        refused: why it cannot be used; None: it can.
        hesitates: why others should be, if they can.
    """

    kernel: Kernel
    refused: str | None
    hesitates: str | None

    @property
    def why_not(self) -> str:
        """Why it is not the one."""
        return self.refused or self.hesitates or "is slower"


def rulings(inputs: Inputs) -> list[Ruling]:
    """All kernels, the most wanted first: those that do not hesitate, the fastest first, and then the others."""
    found = [Ruling(kernel, kernel.refuses(inputs), kernel.hesitates(inputs)) for kernel in KERNELS]

    def place(ruling: Ruling) -> tuple[bool, float]:
        known = efficiency(ruling.kernel.name, inputs.capability)
        return ruling.hesitates is not None, -known.full if known else 0.0

    return sorted(found, key=place)


def choose_kernel(inputs: Inputs, wanted: str | Kernel | None = None) -> Kernel:
    """The most wanted kernel that accepts these inputs; only the `wanted` one, by itself or by its name, if given.

    Raises:
        ValueError: none does; gives each one's reason, and what accepts them. Or what is wanted is neither a kernel nor
            the name of one.
    """
    names = ", ".join(kernel.name for kernel in KERNELS)
    if not isinstance(wanted, str | None) and not hasattr(wanted, "refuses"):
        raise ValueError(f"kernel={wanted!r} is no kernel, nor a name: {names}")
    if isinstance(wanted, str) and wanted not in names.split(", "):
        raise ValueError(f"no kernel {wanted!r}; known: {names}")
    if wanted is not None and not isinstance(wanted, str):
        found = [Ruling(wanted, wanted.refuses(inputs), None)]
    else:
        found = [ruling for ruling in rulings(inputs) if wanted in (None, ruling.kernel.name)]
    for ruling in found:
        if ruling.refused is None:
            return ruling.kernel
    reasons = "; ".join(f"{ruling.kernel.name}: {ruling.refused}" for ruling in found)
    others = [] if wanted is None else [each.kernel.name for each in rulings(inputs) if each.refused is None]
    raise ValueError(f"no kernel for {inputs}: {reasons}{'; what accepts them: ' * bool(others)}{', '.join(others)}")
