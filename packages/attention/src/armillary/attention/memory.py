"""What an attention call allocates on a rank beyond what it is given: what the formulas of all methods are made of.

Each method's file ends with its own two, `forward_memory` and `backward_memory`. Given are q, k and v, or in backward
these with out, lse and dout, of the rank's own tokens and heads. The result is the most that lives besides, in bytes,
what is returned included. Letters as in the methods' papers; w = a / e is what accumulating in float32 multiplies bytes
by: 2 for bfloat16.

Under a causal mask, with zigzag layouts, a rank's own block is a whole causal square, and every other one is half: all
queries against half of the keys, or half of the queries against all keys. All is as rank 0 has it.

Documents take no more than that with zigzag and contiguous layouts, to 3%. With striped ones a mask may: what is seen
are many ranges, which are packed. On 8 ranks, simulated, Ring then takes up to 1.26 times as much forward and 1.53
backward, TokenRing 1.60 and 1.45, AllGather 3.2 and 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a call of a method is about, on one rank.

    Args:
        q: of queries [B, T, H, D], and so of out, dout and dq.
        k: of keys [B, T, K, D], and so of v, dk and dv.
        lse: of [B, T, H] in the accumulation dtype.
        w: bytes of an accumulated element, a, over those of an element, e.
        groups: G = H / K.
    """

    q: float
    k: float
    lse: float
    w: float
    groups: float

    def times(self, n: float) -> Sizes:
        """Of n times as many tokens."""
        return replace(self, q=n * self.q, k=n * self.k, lse=n * self.lse)

    @property
    def rotating(self) -> float:
        """q, out, dout and lse: what goes round when queries do in backward."""
        return 3 * self.q + self.lse


class HeadStages(NamedTuple):
    """How heads come to the first rank of the head axis.

    Args:
        ranks: U.
        queries, keys: heads of a stage.
        turns: stages of a round, which share keys.
        several: whether there is more than one stage.
        rounds: whether there is more than one round.
    """

    ranks: int
    queries: int
    keys: int
    turns: int
    several: bool
    rounds: bool


def kernel_forward(x: Sizes, queries: float = 1) -> float:
    """out and lse, of a share of the queries."""
    return queries * (x.q + x.lse)


def kernel_backward(x: Sizes, queries: float = 1, keys: float = 1) -> float:
    """dq, dk and dv of shares of queries and keys, and FlashAttention-2's work: see `SimulatedFlash`.

    dq in float32, two numbers for each row, and where heads share keys, dk and dv of every query head.
    """
    shared = 2 * x.groups * x.k if x.groups > 1 else 0
    return queries * (x.q + x.w * x.q + 2 * x.lse) + keys * (2 * x.k + shared)


def rotate_keys_forward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """R ranks pass keys on. Results are merged in float32: the sum, and half of the queries' partial out, and its copy.

    Args:
        onward: the share of the keys in hand that goes on, copied; all of them are at the first step alone, and leave
            as they came afterwards.
    """
    if ranks == 1:
        return kernel_forward(x)
    passing = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    merged, part = x.w * x.q + x.lse, kernel_forward(x, 0.5)
    adding = passing + merged + part + x.w * x.q / 2 + x.lse * 2  # four rows of weights, of half of the queries
    widening = passing + merged + part + x.q
    first = 2 * x.k * (1 + onward) + kernel_forward(x)
    return max(first, adding, widening)


def rotate_keys_backward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """R ranks pass keys on, and behind them the sums of dk and dv, in float32. dq is summed here.

    At the third step all is there: k and v in hand, coming and leaving; dk and dv of this rank's own, the sums that
    arrive and those that are sent; dq, and a kernel with half of the queries.
    """
    own = 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), (1 + x.w) * x.q + 2 * x.k + own)
    first = 2 * x.k * (1 + onward) + kernel_backward(x)
    passing = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    second = passing + own + x.q + kernel_backward(x, queries=0.5)
    if ranks == 2:
        return max(first, second)
    passing = 2 * x.k * (1 if ranks == 3 else 2 + onward % 1)
    return max(first, second, passing + 3 * own + x.w * x.q + kernel_backward(x, queries=0.5))


def rotate_queries_backward(x: Sizes, ranks: int, direct: bool) -> float:
    """R ranks pass q, out, dout and lse on; dk and dv are summed here, in float32.

    Args:
        direct: shares of dq go straight to their owner, who sees half of each (TokenRing); otherwise the sum of dq
            follows its queries, and comes, is here and leaves.
    """
    own, sums = x.w * x.q, 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), own + x.q + 2 * x.k, own + sums + x.k)
    block = kernel_backward(x, keys=0.5)
    first = 1.5 * x.rotating + kernel_backward(x)
    passing = x.rotating * (1 if ranks == 2 else 2.5)
    widening = x.q + x.k + sums + x.k  # the second step's shares, while dv of the first becomes float32
    second = passing + own + max(2 * x.k + block, widening)
    if ranks == 2:
        return max(first, second)
    passing = x.rotating * (1 if ranks == 3 else 2.5)
    returning = own + own / 2 if direct else 2 * own
    return max(first, second, passing + own + sums + returning + block)
