"""The published share of an accelerator's peak that each kernel attains, for the choice of kernels and the planner.

A share is attained TFLOPS over the accelerator's dense peak in 16 bits: of FlashAttention-3 for head dim 128 and 16k
tokens, of other papers the best. Only visible pairs count: 4 D FLOPs per pair in forward (2 products of D
multiply-adds), 10 D in backward (5 products).
"""

from __future__ import annotations

from typing import NamedTuple

TOKENS = 16 * 1024
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
        """Returns the share in forward of a causal sequence of `tokens` tokens, on any number of ranks.

        A causal mask costs extra time along the diagonal, which grows with tokens, while the time of all pairs grows
        with their square. So the extra time per pair falls as TOKENS / tokens.
        """
        full_time, causal_time = 1 / self.full, 1 / self.causal  # per pair, at TOKENS tokens
        return 1 / (full_time + (causal_time - full_time) * min(1, TOKENS / tokens))


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
