"""The plan of a method: its communication plan and its formulas for peak memory, each optional.

A formula gives the peak bytes of a call on a rank beyond the inputs, outputs included. Inputs are q, k and v of the
rank's own tokens and heads; in backward also out, lse and dout. Each formula is the maximum over the moments at which
the peak may be.

In the formulas x.q, x.k and x.lse are bytes of whole tensors (`Sizes`), so 2 * x.k is a pair of k and v, or of dk and
dv, as they are sent: of rotary keys and latents, if these are. x.w widens bytes from the inputs' dtype to the
accumulation dtype ("float32" in comments): it is 2 for bfloat16.

Formulas hold for 16-bit inputs, a causal mask and zigzag layouts, on rank 0. There the rank's own block is a causal
square, and half of every other block is visible: half of the queries see all keys if keys rotate, all queries see half
of the keys if queries rotate. Rings turn in the direction in which rank 0 sends only half of each shard on (`onward`).
Partial results are merged by torch's ops (`merge_by_ops_`); the fused kernel on CUDA needs less. For float32 inputs,
which are not widened, formulas are up to 50% too high and 20% too low.

On 8 simulated ranks, with documents of 300 to 20,000 tokens or none, zigzag and contiguous layouts take at most 4% more
than these formulas, except for WallFacer's backward: 34%. Balanced and striped layouts may take much more, because
visible tokens are many ranges, which are packed: up to 1.83 times as much in forward and 2.13 in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from armillary.attention.mask import AttentionMask, layout_of
from armillary.attention.methods.head_shards import split_heads
from armillary.attention.plans.comm_plan import AttentionShape, CommPlan
from armillary.core import SequenceLayout
from armillary.core.internal import Side

InnerPlan = Callable[[AttentionShape], CommPlan]
"""Returns the communication plan of a method on the sequence axis."""


@dataclass(frozen=True)
class MethodPlan:
    """Base of `SequencePlan` and `HeadPlan`.

    The fields of a subclass are the method's options. `comm_plan` and the formulas of memory raise a ValueError that
    names the method, unless a subclass overrides them.

    Args:
        method: name of the method, for errors.
    """

    method: str = field(default="?", kw_only=True, compare=False)

    def missing(self, function: str) -> ValueError:
        return ValueError(
            f"attention method {self.method!r} has no {function}: its plan in the registry must define it"
        )


class SequencePlan(MethodPlan):
    """Plan of a method on the sequence axis."""

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        return layout_of(kind, length, ranks, mask, self.balanced_by, states)

    @property
    def balanced_by(self) -> Side | None:
        """As in `Method.balanced_by`."""
        return "queries"

    takes_latents = False
    """As `Method.takes_latents`."""
    sends_keys = True
    """As `Method.sends_keys`."""

    @property
    def rotates_latents(self) -> bool:
        """True if an outer method leaves it to this one to gather latents over its axis, as `Method.gathering`."""
        return False

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        raise self.missing("comm_plan")

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Returns the peak memory of forward, in bytes."""
        raise self.missing("forward_memory")

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Returns the peak memory of backward, in bytes."""
        raise self.missing("backward_memory")

    def published_bytes(self, work: AttentionShape) -> tuple[int, int] | None:
        """Returns the paper's (p2p, collective) bytes of one rank in forward under a full mask, or None."""
        return None


class HeadPlan(MethodPlan):
    """Plan of a method on the head axis, around a method on the sequence axis."""

    projects_in_stages = False
    """True if the method projects q, k and v in stages, as in `Method.projects_in_stages`."""
    key_sends = 1
    """As `HeadMethod.key_sends`."""

    def stage_keys(self, key_heads: tuple[int, ...], ranks: int) -> list[int]:
        """Returns the number of key/value heads in each stage, summed over the `ranks` ranks of the head axis."""
        return [sum(map(len, split_heads(key_heads, ranks).keys))]

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan, rotates_latents: bool = False) -> CommPlan:
        """Returns the communication plan of both methods on `ranks` ranks of the head axis.

        Args:
            work: the call, with layouts over the sequence axis.
            inner: returns the plan of the method on the sequence axis, for a call with some of the heads.
            rotates_latents: that of the method on the sequence axis.
        """
        raise self.missing("comm_plan")

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Returns the peak memory of forward, in bytes.

        Args:
            x: sizes of a call with the heads of one stage and the tokens of a shard of the sequence axis.
            inner: peak of the inner method in such a call.
        """
        raise self.missing("forward_memory")

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Returns the peak memory of backward, in bytes.

        Args:
            x, inner: as in `forward_memory`.
            alone: True if the sequence axis has one rank: then the inner method returns dk and dv in the inputs' dtype.
        """
        raise self.missing("backward_memory")


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a call on one rank, in bytes.

    Args:
        q: q [B, T, H, D]; also of dq in the same dtype.
        k: half of k [B, T, K, D] and v [B, T, K, Dv] together; also of dk and dv in the same dtype.
        lse: lse [B, T, H] in the accumulation dtype.
        w: a / e, the width of the accumulation dtype over that of the inputs: 2 for bfloat16, 1 for float32.
        groups: H / K, query heads per key/value head.
        value_ratio: Dv / D. out and dout have so many times the bytes of q.
        expanded: as k, of the keys and values with which the kernel attends; None if they are those that are sent.
        expansion: bytes that exist while latents are expanded for a block of T tokens: k and v, and a part of k twice.
        gathered: bytes of latents that a ring gathers at each step for a block; 0 if they are gathered before.
    """

    q: float
    k: float
    lse: float
    w: float
    groups: float
    value_ratio: float = 1.0
    expanded: float | None = None
    expansion: float = 0.0
    gathered: float = 0.0

    def times(self, n: float) -> Sizes:
        expanded = None if self.expanded is None else n * self.expanded
        q, k, lse, expansion = (n * size for size in (self.q, self.k, self.lse, self.expansion))
        return replace(self, q=q, k=k, lse=lse, expanded=expanded, expansion=expansion)

    @property
    def out(self) -> float:
        """Bytes of out [B, T, H, Dv], and of dout."""
        return self.value_ratio * self.q

    @property
    def block_k(self) -> float:
        """As `k`, of the keys and values of a block."""
        return self.k if self.expanded is None else self.expanded

    @property
    def expanding(self) -> float:
        """Bytes in forward beside a block whose latents are expanded, and perhaps gathered for it."""
        return self.expansion + self.gathered

    @property
    def expanding_backward(self) -> float:
        """As `expanding`, in backward: with the sums of the gathered latents' gradients."""
        return self.expanding + self.w * self.gathered

    @property
    def collapse(self) -> float:
        """Bytes beside the gradients of a block's k and v while they become those of latents; 0 without latents.

        They are joined, without positions. The gradients of latents are in the inputs' dtype, then in float32.
        """
        if self.expanded is None:
            return 0.0
        joined = self.expansion - 2 * self.expanded / (1 + self.value_ratio)
        return joined + (1 + self.w) * (2 * self.gathered or 2 * self.k)

    @property
    def rotating(self) -> float:
        """Bytes of q, out, dout and lse, which rotate together if queries rotate in backward."""
        return self.q + 2 * self.out + self.lse


class HeadStages(NamedTuple):
    """Stages of UPipe, as the first rank of a head axis of U ranks runs them.

    Args:
        queries, keys: number of query heads and of key/value heads in a stage.
        stages_per_round: number of stages that share key/value heads.
    """

    ranks: int
    queries: int
    keys: int
    stages_per_round: int
    has_several_stages: bool
    has_several_rounds: bool


def kernel_forward(x: Sizes, queries: float = 1) -> float:
    """Bytes of out and lse from a kernel for a fraction `queries` of the queries."""
    return queries * (x.out + x.lse)


def kernel_backward(x: Sizes, queries: float = 1, keys: float = 1) -> float:
    """Bytes of dq, dk and dv for fractions of queries and keys, and of FlashAttention-2's workspace."""
    # The workspace is dq in float32, two numbers for each row, and, if query heads share key/value heads, dk and dv for
    # every query head, which the kernel sums afterwards.
    dq_bytes, query_workspace = x.q, x.w * x.q + 2 * x.lse
    dkv_bytes, key_workspace = 2 * x.block_k, 2 * x.groups * x.block_k if x.groups > 1 else 0
    return queries * (dq_bytes + query_workspace) + keys * (dkv_bytes + key_workspace)


def rotate_keys_forward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """Peak of a ring of R ranks in which keys rotate and partial results are merged in float32.

    Args:
        onward: fraction of a shard's tokens that this rank sends on: 0.5 in zigzag rings, 1 in WallFacer's and in a
            ring within a node whose keys are another node's. Own keys are copied to be sent. Of received keys, half is
            copied, but a whole shard is sent from the buffer that received it.
    """
    if ranks == 1:
        return kernel_forward(x) + x.expanding
    # Keys of the second step: received ones in use, ones that arrive, and the copy. On two ranks it is the last step.
    buffers = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)  # onward % 1: 0.5 stays, 1 becomes 0
    # Results of the second step: out in float32 and lse of all queries, and the kernel's for half of the queries.
    merge_bytes, block = x.w * x.out + x.lse, kernel_forward(x, 0.5)
    # While both are merged: the kernel's out in float32, and a weight for each of its queries.
    add_bytes = buffers + merge_bytes + block + (x.w * x.out + x.lse) / 2
    # Before: the first step's out, while it becomes float32.
    cast_bytes = buffers + merge_bytes + block + x.out
    # The first step: keys that arrive, own keys copied to be sent, and the kernel's results.
    first = 2 * x.k * (1 + onward) + kernel_forward(x)
    return max(first, add_bytes, cast_bytes) + x.expanding


def rotate_keys_backward(x: Sizes, ranks: int, onward: float = 0.5, casts_dq: bool = True) -> float:
    """Peak of a ring of R ranks in which keys rotate, followed by the sums of dk and dv in float32. dq stays.

    Args:
        casts_dq: False if dq is in float32 before the second step.
    """
    dkv_sums, dq_sum = 2 * x.w * x.k, x.w * x.q
    if ranks == 1:  # the kernel, or its dq, dk and dv while they become float32
        cast_bytes = x.q + dq_sum + 2 * x.block_k + dkv_sums
        return max(kernel_backward(x) + x.expanding_backward, cast_bytes, x.q + 2 * x.block_k + x.collapse)
    # The first step: keys that arrive, own keys copied to be sent, and the kernel.
    kernel = kernel_backward(x) + x.expanding_backward
    collapse = 2 * x.block_k + x.collapse
    first = 2 * x.k * (1 + onward) + max(kernel, x.q + collapse)
    # The second step: buffers as in forward, sums for own keys, dq of the first step, and the kernel.
    buffers = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    half_kernel = kernel_backward(x, queries=0.5) + x.expanding_backward
    # With one key head for each query head, the first step's dq takes more while it becomes float32.
    cast_bytes = dq_sum + x.q / 2 + 2 * x.block_k + x.expanding_backward if casts_dq else 0
    second = buffers + dkv_sums + max(x.q + half_kernel, x.q + cast_bytes, dq_sum + collapse)
    if ranks == 2:
        return max(first, second)
    # From the third step on: sums for own keys, sums that arrive and sums that are sent; dq is in float32.
    buffers = 2 * x.k * (1 if ranks == 3 else 2 + onward % 1)
    third = buffers + 3 * dkv_sums + dq_sum + half_kernel
    return max(first, second, third)


def rotate_queries_backward(x: Sizes, ranks: int, direct: bool, onward: float = 0.5) -> float:
    """Peak of a ring of R ranks in which q, out, dout and lse rotate; dk and dv are summed in float32 and stay.

    Args:
        direct: True if each partial result of dq returns directly to the owner of its queries (TokenRing); False if a
            sum of dq follows its queries around the ring (Ring).
        onward: fraction of a shard's tokens that this rank sends on, copied as in `rotate_keys_forward`: 1 in a ring
            within a node whose keys are another node's.
    """
    dq_sum, dkv_sums = x.w * x.q, 2 * x.w * x.block_k
    if ranks == 1:  # the kernel, or its dq and then dv while they become float32
        cast_bytes = max(dq_sum + x.q + 2 * x.block_k, dq_sum + dkv_sums + x.block_k)
        return max(kernel_backward(x), cast_bytes, dq_sum + dkv_sums + x.collapse) + x.expansion
    # The end, if keys were expanded: the gradients of latents from the sums.
    block, end = kernel_backward(x, keys=0.5), dq_sum + dkv_sums + x.collapse
    # The first step: queries that arrive, own queries copied to be sent, and the kernel.
    first = (1 + onward) * x.rotating + kernel_backward(x)
    # The second step: queries in use, queries that arrive and the copied half; dq of own queries; dk and dv of the
    # first step with the kernel, or the kernel's dq and half of dk and dv while dv of the first step becomes float32.
    buffers = x.rotating * (1 if ranks == 2 else 2 + onward % 1)
    cast_bytes = x.q + 2 * x.block_k / 2 + dkv_sums + x.block_k
    second = buffers + dq_sum + max(2 * x.block_k + block, cast_bytes)
    if ranks == 2:
        return max(first, second, end) + x.expansion
    # From the third step on, dq also returns. Directly: a result for all visiting queries is sent, and one for half of
    # the own queries arrives. Around the ring: one sum is sent and one arrives.
    buffers = x.rotating * (1 if ranks == 3 else 2 + onward % 1)
    return_bytes = dq_sum + dq_sum / 2 if direct else 2 * dq_sum
    third = buffers + dq_sum + dkv_sums + return_bytes + block
    return max(first, second, third, end) + x.expansion  # keys that stay are expanded once
