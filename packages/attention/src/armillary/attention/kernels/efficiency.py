"""What share of an accelerator's peak each kernel attains, as published: what choice and planner go by.

Shares are of the dense peak in 16 bits, for head dim 128 and 16k tokens. FLOPs are those of visible pairs: 4 D for each
in forward, 10 D in backward.
"""

from __future__ import annotations

from typing import NamedTuple

TOKENS = 16 * 1024
"""Of the sequences with which kernels were timed."""


class Efficiency(NamedTuple):
    """Shares of the peak.

    Args:
        full: forward of pieces without a mask.
        causal: forward of causal ones.
        backward: of those without a mask.
        source: whose figures these are.
    """

    full: float
    causal: float
    backward: float
    source: str

    def forward(self, tokens: int) -> float:
        """Of a causal sequence of so many tokens.

        What causal pieces lose, they lose along the diagonal: in proportion to tokens, where pairs grow by the square.
        So it does not matter over how many shards the sequence is.
        """
        return 1 / (1 / self.full + (1 / self.causal - 1 / self.full) * min(1, TOKENS / tokens))


_H100, _B200 = 989, 2250
_FA3 = "FlashAttention-3 (arXiv 2407.08608), H100"
_FA4 = "FlashAttention-4 (arXiv 2603.05451), B200, its fastest forward; the causal one and backward taken to be as fast"
_FA2 = "FlashAttention-2 (arXiv 2307.08691), A100, its fastest; the causal one taken to be as fast"

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
"""By kernel, and by major number of the compute capability. What is not here has no published figures."""

PERSISTENT = frozenset({"flash_attn_3"})
"""Kernels whose forward starts one thread block for each multiprocessor, and keeps them until all is computed: FA3's
`hopper/flash_fwd_launch_template.h` on Hopper. NCCL's kernels then start after it, unless it leaves a margin. Its
backward starts one block for each tile, so that NCCL's get in between."""
MULTIPROCESSORS = 132
"""Of an H100 SXM and an H200, on which those kernels run."""
SM_MARGIN = 16
"""Multiprocessors left to NCCL by default. Chosen, not measured: NCCL takes up to 32 thread blocks for an exchange over
NVLink, and works with fewer."""


def default_margin(ring: int) -> int:
    """Multiprocessors that a persistent kernel leaves to NCCL by default, in a ring of so many ranks."""
    return SM_MARGIN if ring > 1 else 0


def efficiency(kernel: str, capability: tuple[int, int] | None) -> Efficiency | None:
    """What a kernel attains there; None: not known."""
    return None if capability is None else EFFICIENCY.get((kernel, capability[0]))
