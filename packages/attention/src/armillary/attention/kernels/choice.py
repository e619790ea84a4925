"""The choice of a kernel: a pure function of `Inputs` and of the installed packages."""

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
"""All kernels. Their order decides where no speed is published (`efficiency.py`): preferred kernels come first."""


class KernelCandidate(NamedTuple):
    """A kernel with the reasons against choosing it for some inputs.

    Args:
        refusal: the reason why the kernel does not support the inputs; None if it does.
        drawback: the reason why other kernels are preferred; None if there is none.
    """

    kernel: Kernel
    refusal: str | None
    drawback: str | None

    @property
    def reason(self) -> str:
        """The reason why another kernel was chosen."""
        return self.refusal or self.drawback or "is slower"


def kernel_candidates(inputs: Inputs) -> list[KernelCandidate]:
    """Returns all kernels in order of preference: kernels without a drawback first, and of these the fastest first."""

    def order(candidate: KernelCandidate) -> tuple[bool, float]:
        known_efficiency = efficiency(candidate.kernel.name, inputs.capability)
        return candidate.drawback is not None, -known_efficiency.full if known_efficiency else 0.0

    candidates = [KernelCandidate(kernel, kernel.refuses(inputs), kernel.drawback(inputs)) for kernel in KERNELS]
    # The sort is stable: without published figures the order of KERNELS decides.
    return sorted(candidates, key=order)


def choose_kernel(inputs: Inputs, requested_kernel: str | Kernel | None = None) -> Kernel:
    """Returns the first candidate that supports the inputs, or the requested kernel if it does.

    Args:
        requested_kernel: a kernel or its name.

    Raises:
        ValueError: the requested kernel, or every kernel, refuses the inputs, with the reasons; `requested_kernel` is
            neither a kernel nor the name of one.
    """
    if requested_kernel is None or isinstance(requested_kernel, str):
        candidates = [x for x in kernel_candidates(inputs) if requested_kernel in (None, x.kernel.name)]
    elif hasattr(requested_kernel, "refuses"):
        candidates = [KernelCandidate(requested_kernel, requested_kernel.refuses(inputs), None)]
    else:
        candidates = []
    if not candidates:
        names = ", ".join(kernel.name for kernel in KERNELS)
        raise ValueError(f"kernel={requested_kernel!r} is neither a kernel nor the name of one; known: {names}")
    for candidate in candidates:
        if candidate.refusal is None:
            return candidate.kernel
    # The error names the reason of each candidate and, if a kernel was requested, those that support the inputs.
    reasons = "; ".join(f"{candidate.kernel.name}: {candidate.refusal}" for candidate in candidates)
    usable = [candidate.kernel.name for candidate in kernel_candidates(inputs) if candidate.refusal is None]
    hint = f"; supported by {', '.join(usable)}" if usable and requested_kernel is not None else ""
    raise ValueError(f"no kernel for {inputs}: {reasons}{hint}")


def check_kernel_name(flag: str, name: str | None) -> None:
    """Raises ValueError unless `name` is None or the name of a kernel. `flag` is the command-line flag to blame."""
    names = [kernel.name for kernel in KERNELS]
    if name not in (None, *names):
        raise ValueError(f"{flag} {name}: known are {', '.join(names)}")
