"""Terms of the formulas for the memory that an attention call allocates on a rank.

A formula gives the peak in bytes beyond the inputs, outputs included. Inputs are q, k and v of the rank's own tokens
and heads; in backward also out, lse and dout. Letters are those of the papers. w = a / e is the ratio of accumulated
bytes to bytes: 2 for bfloat16, which is accumulated in float32.

Formulas hold for a causal mask and zigzag layouts, on rank 0. There a rank's own block is a causal square, and every
other block is half visible: all queries against half of the keys, or half of the queries against all keys.

With documents, zigzag and contiguous layouts take at most 3% more. Striped layouts may take much more, because visible
tokens are many ranges, which are packed. On 8 simulated ranks, Ring then takes up to 1.26 times as much in forward and
1.53 in backward, TokenRing 1.60 and 1.45, all-gather 3.2 and 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a call on one rank, in bytes.

    Args:
        q: queries [B, T, H, D]; also out, dout and dq.
        k: keys [B, T, K, D]; also v, dk and dv.
        lse: [B, T, H] in the accumulation dtype.
        w: a / e, bytes of an accumulated element per byte of an element.
        groups: G = H / K.
    """

    q: float
    k: float
    lse: float
    w: float
    groups: float

    def times(self, n: float) -> Sizes:
        """Returns the sizes for n times as many tokens."""
        return replace(self, q=n * self.q, k=n * self.k, lse=n * self.lse)

    @property
    def rotating(self) -> float:
        """q, out, dout and lse, which rotate when queries do in backward."""
        return 3 * self.q + self.lse


class HeadStages(NamedTuple):
    """Stages of UPipe, as the first rank of the head axis runs them.

    Args:
        ranks: U.
        queries, keys: number of query heads and of key heads in a stage.
        turns: number of stages in a round, which share key heads.
        several: True for more than one stage.
        rounds: True for more than one round.
    """

    ranks: int
    queries: int
    keys: int
    turns: int
    several: bool
    rounds: bool


def kernel_forward(x: Sizes, queries: float = 1) -> float:
    """Bytes of out and lse for a fraction of the queries."""
    return queries * (x.q + x.lse)


def kernel_backward(x: Sizes, queries: float = 1, keys: float = 1) -> float:
    """Bytes of dq, dk and dv for fractions of queries and keys, and FlashAttention-2's workspace (`SimulatedFlash`).

    The workspace is dq in float32 and two numbers for each row; also dk and dv of every query head if heads share keys.
    """
    # FlashAttention-2 writes dk and dv for every query head and sums them over groups afterwards.
    shared_bytes = 2 * x.groups * x.k if x.groups > 1 else 0
    return queries * (x.q + x.w * x.q + 2 * x.lse) + keys * (2 * x.k + shared_bytes)


def rotate_keys_forward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """Peak of a ring of R ranks in which keys rotate and partial results are merged in float32.

    Args:
        onward: fraction of the local keys that is copied to be sent. Received keys are sent on without a copy.
    """
    if ranks == 1:
        return kernel_forward(x)
    buffers = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    merge_bytes, block = x.w * x.q + x.lse, kernel_forward(x, 0.5)
    # Merge: the float32 copy of half a block, and four rows of weights of half of the queries.
    add_bytes = buffers + merge_bytes + block + x.w * x.q / 2 + x.lse * 2
    # The second step: the first block's result becomes float32.
    cast_bytes = buffers + merge_bytes + block + x.q
    # The first step: received keys, and own keys copied to be sent.
    first = 2 * x.k * (1 + onward) + kernel_forward(x)
    return max(first, add_bytes, cast_bytes)


def rotate_keys_backward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """Peak of a ring of R ranks in which keys rotate, followed by the sums of dk and dv in float32. dq stays.

    The third step has the most buffers: k and v current, received and sent; dk and dv of own keys, received sums and
    sent sums; dq, and a kernel on half of the queries.
    """
    # In order of time: the local block, the first received block, and from the third step on all buffers.
    own_grads = 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), (1 + x.w) * x.q + 2 * x.k + own_grads)
    first = 2 * x.k * (1 + onward) + kernel_backward(x)
    buffers = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    second = buffers + own_grads + x.q + kernel_backward(x, queries=0.5)
    if ranks == 2:
        return max(first, second)
    buffers = 2 * x.k * (1 if ranks == 3 else 2 + onward % 1)
    return max(first, second, buffers + 3 * own_grads + x.w * x.q + kernel_backward(x, queries=0.5))


def rotate_queries_backward(x: Sizes, ranks: int, direct: bool) -> float:
    """Peak of a ring of R ranks in which q, out, dout and lse rotate; dk and dv are summed in float32 and stay.

    Args:
        direct: True if partial sums of dq return directly to their owner, who sees half of each (TokenRing). Otherwise
            one sum of dq follows its queries: one is received, one current, one sent.
    """
    dq, key_grads = x.w * x.q, 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), dq + x.q + 2 * x.k, dq + key_grads + x.k)
    block = kernel_backward(x, keys=0.5)
    first = 1.5 * x.rotating + kernel_backward(x)
    buffers = x.rotating * (1 if ranks == 2 else 2.5)
    # The second step's results, while dv of the first becomes float32.
    cast_bytes = x.q + x.k + key_grads + x.k
    second = buffers + dq + max(2 * x.k + block, cast_bytes)
    if ranks == 2:
        return max(first, second)
    buffers = x.rotating * (1 if ranks == 3 else 2.5)
    return_bytes = dq + dq / 2 if direct else 2 * dq
    return max(first, second, buffers + dq + key_grads + return_bytes + block)
