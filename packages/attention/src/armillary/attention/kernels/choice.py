"""The choice of a kernel, a pure function of `Inputs` and the installed packages, and the published speeds it uses."""

from __future__ import annotations

from typing import NamedTuple

from armillary.attention.kernels.cudnn import Cudnn
from armillary.attention.kernels.dense import Dense
from armillary.attention.kernels.flash import CudaFlash, FlashAttn2, FlashAttn3, FlashAttn4
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import Kernel
from armillary.attention.kernels.top_left import CpuFlash, Efficient

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
"""All kernels. Their order decides where no speed is published (`EFFICIENCY`): preferred kernels come first."""


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
        return self.refusal or self.drawback or "is slower"


def kernel_candidates(inputs: Inputs) -> list[KernelCandidate]:
    """Returns all kernels in order of preference: kernels without a drawback first, and of these the fastest first."""

    def order(candidate: KernelCandidate) -> tuple[bool, float]:
        known_efficiency = efficiency(candidate.kernel.name, inputs.capability)
        speed = known_efficiency.full if known_efficiency else 0.0
        if candidate.kernel.limits.head_dims.pads_values:  # the share of the products that are not with padding
            speed *= (inputs.head_dim + inputs.value_dim) / (2 * inputs.head_dim)
        return candidate.drawback is not None, -speed

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
    """Raises ValueError unless `name` is None or a kernel's; `flag` is the command-line flag to blame."""
    names = [kernel.name for kernel in KERNELS]
    if name not in (None, *names):
        raise ValueError(f"{flag} {name}: known are {', '.join(names)}")


# -- published speeds -------------------------------------------------------------------------------------------------
#
# A share is attained TFLOPS over the accelerator's dense peak in 16 bits: of FlashAttention-3 for head dim 128 and 16k
# tokens, of other papers the best. Only visible pairs count: 4 D FLOPs per pair in forward (2 products of D
# multiply-adds), 10 D in backward (5 products).

TIMED_TOKENS = 16 * 1024
"""Sequence length of FlashAttention-3's timings."""


class Efficiency(NamedTuple):
    """Shares of the accelerator's peak, from 0 to 1.

    Args:
        full: share in forward without a mask.
        causal: share in forward with a causal mask.
        backward: share in backward without a mask.
        source: publication and device of the figures.
    """

    full: float
    causal: float
    backward: float
    source: str

    def forward(self, tokens: int) -> float:
        """Returns the share in forward of a causal sequence of `tokens` tokens, on any number of ranks."""
        # A causal mask costs extra time along the diagonal, which grows with tokens, while the time of all pairs grows
        # with their square. So the extra time per pair falls as TIMED_TOKENS / tokens.
        full_time, causal_time = 1 / self.full, 1 / self.causal  # per pair, at TIMED_TOKENS tokens
        return 1 / (full_time + (causal_time - full_time) * min(1, TIMED_TOKENS / tokens))


_H100, _B200 = 989, 2250  # peak TFLOPS, dense, 16 bits
_FA3 = "FlashAttention-3 (arXiv 2407.08608), H100"
_FA4 = "FlashAttention-4 (arXiv 2603.05451), B200, its fastest forward; causal and backward assumed equally fast"
_FA2 = "FlashAttention-2 (arXiv 2307.08691), A100, its fastest; causal assumed equally fast"

HOPPER_FA2 = Efficiency(370 / _H100, 335 / _H100, 322 / _H100, _FA3)
AMPERE_FA2 = Efficiency(0.73, 0.73, 0.63, _FA2)
EFFICIENCY = {
    ("flash_attn_3", 9): Efficiency(648 / _H100, 616 / _H100, 561 / _H100, _FA3),
    ("cudnn", 9): Efficiency(595 / _H100, 539 / _H100, 516 / _H100, _FA3),
    ("flash_attn_2", 9): HOPPER_FA2,
    ("cuda_flash", 9): HOPPER_FA2,
    ("flash_attn_4", 10): Efficiency(1613 / _B200, 1613 / _B200, 1613 / _B200, _FA4),
    ("cudnn", 10): Efficiency(1613 / 1.3 / _B200, 1613 / 1.3 / _B200, 1613 / 1.3 / _B200, _FA4),
    ("flash_attn_2", 8): AMPERE_FA2,
    ("cuda_flash", 8): AMPERE_FA2,
}
"""Figures by kernel and major compute capability. In FlashAttention-4's paper cuDNN is 1.3 times slower."""

PERSISTENT = frozenset({"flash_attn_3"})
"""Kernels whose forward occupies every multiprocessor until it ends. FA3's `hopper/flash_fwd_launch_template.h` starts
one thread block per multiprocessor, so NCCL's kernels wait for it unless it leaves a margin. In backward it starts one
thread block per tile, and NCCL's kernels are scheduled between them."""
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 SXM and of an H200, the devices of persistent kernels."""
SM_MARGIN = 16
"""Multiprocessors left to NCCL by default. Chosen, not measured: NCCL uses up to 32 thread blocks for an exchange over
NVLink, and works with fewer."""


def default_margin(ring: int) -> int:
    """Returns the multiprocessors that a persistent kernel leaves to NCCL by default, in a ring of `ring` ranks."""
    return SM_MARGIN if ring > 1 else 0


def efficiency(kernel: str, capability: tuple[int, int] | None) -> Efficiency | None:
    """Returns the published figures of a kernel, or None."""
    return None if capability is None else EFFICIENCY.get((kernel, capability[0]))
