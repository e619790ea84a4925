"""DeepSpeed-Ulysses (arXiv 2309.14509), and USP (arXiv 2405.07719): Ulysses around a sequence-axis method.

all-to-all   q, k, v: from T tokens of all heads to U T tokens of the rank's heads
attend       with the inner method
all-to-all   out: back to T tokens of all heads

`HeadMethod` is the base of methods on the head axis, Ulysses and UPipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionMethod, AttentionSpec, Saved
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method, check_inner
from armillary.attention.methods.head_shards import HeadShards, KeyTransfers, check_heads, split_heads
from armillary.attention.methods.local import Local
from armillary.attention.tiling.latents import Expansion, TokenSizes, value_dim
from armillary.core import Axis, SequenceLayout, accumulation_dtype, start_head_to_seq, start_seq_to_head
from armillary.core.internal import Side

PendingTensor = Callable[[], Tensor]
"""Waits for a tensor in flight and returns it."""


class HeadMethod(Method):
    """A method that exchanges sequence shards for head shards over one mesh axis of U ranks, and attends with `inner`.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`, or an axis of one.
        inner: a method over other axes. Local by default.

    Raises:
        ValueError: `inner` is not a method, or one of its axes does not form a grid of ranks with this one, such as
            this axis itself.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        axis, inner = Axis.of(axis), Local() if inner is None else inner
        check_inner(axis, inner, "Ring(mesh['ring'])")
        self.compose(axis, inner)

    def compose(self, axis: Axis, inner: Method) -> None:
        """Sets the axis and the inner method, without a check that their axes form a grid of ranks."""
        self.axis = self.head_axis = axis
        self.inner = inner
        self.shards = self.inner.shards * self.axis.size
        self.shard = self.inner.shard * self.axis.size + self.axis.rank
        self.sequence_shards = self.inner.sequence_shards
        self.takes_latents = inner.takes_latents

    @property
    def sequence_method(self) -> Method:
        return self.inner

    @property
    def balanced_by(self) -> Side | None:
        return self.inner.balanced_by

    def layout(
        self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        return self.inner.layout(length, kind, mask, states).refine(self.axis.size)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_heads(q.shape[2], self.axis.size, self.axis.name)
        self.inner.check(q, k, v)

    latent_ring: AttentionMethod | None = None
    """The inner method for latents that are gathered at each of its steps, not before."""
    key_sends: int = 1
    """How often the axis sends keys: in forward, and again in backward unless their head shards are saved."""

    def latents_pay(self, key_heads: tuple[int, ...], sizes: TokenSizes) -> bool:
        heads = split_heads(key_heads, self.axis.size)
        nodes = self.inner.sequence_shards if self.inner.sends_keys else 1
        stage_keys, rotates_latents = self._stage_keys(key_heads), self.latent_ring is not None
        return KeyTransfers(heads, nodes, stage_keys, self.key_sends, rotates_latents).latents_pay(sizes)

    def _stage_keys(self, key_heads: tuple[int, ...]) -> list[int]:
        """Returns the number of key/value heads in each stage, summed over ranks."""
        return [sum(map(len, split_heads(key_heads, self.axis.size).keys))]

    def sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Returns the number of tokens of each rank of this axis. Together these ranks have one sequence shard."""
        first = self.inner.shard * self.axis.size
        return layout.refine(self.shards // self.sequence_shards).sizes[first : first + self.axis.size]


class Ulysses(HeadMethod):
    """All-to-all over one mesh axis of U ranks, around `inner`. Around Ring it is USP.

    The full sequence is q [B, N, H, D], k [B, N_k, K, D], v [B, N_k, K, Dv] and out [B, N, H, Dv], sharded on dim 1. A
    rank has T tokens of all heads. After the all-to-all it has the U T tokens of its sequence shard, of some heads
    only. U need not divide H: numbers of query heads may differ by one, and a key/value head goes to every rank whose
    query heads use it.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`.
        inner: any method over other axes. Local by default.

    Raises:
        ValueError: `inner` is not a method, or one of its axes does not form a grid of ranks with this one, such as
            this axis itself.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, all-to-all, with Dv = D,
    S = T, and U that divides H and either divides K or is a multiple of it:

        forward    q, k, v, out       (U - 1) / U * (2 H + 2 max(K, U)) B T D e
        backward   dout, dq, dk, dv   (U - 1) / U * (2 H e + 2 max(K, U) c) B T D

    Here c = e if each key/value head is on one rank. If ranks share key/value heads (K < U), they send partial sums of
    dk and dv, and c = a.

    For any U, let rank u have T_u tokens before the all-to-all, and after it h_u query heads and the k_u key/value
    heads that these use. It sends B D e (T_u sum (h_w + 2 k_w) + h_u sum T_w) forward and
    B D (T_u sum h_w e + (h_u e + 2 k_u c) sum T_w) backward, with sums over the other ranks w.

    `inner` sends its own bytes too, for U T tokens and H / U heads.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        super().__init__(axis, inner)
        self.redistributes_inputs = self.axis.size > 1 or self.inner.redistributes_inputs
        has_both_axes = self.axis.size > 1 < self.inner.sequence_shards
        self.latent_ring = self.inner.gathering(self.axis) if has_both_axes else None
        self.saves_own_latents = self.latent_ring is not None

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Runs the inner method's `plan`, with the specs of its calls."""
        self.inner.plan(self.head_call(spec).inner_spec, self.head_call(previous).inner_spec, rows)

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> PendingTensor:
        """Starts the all-to-all of q."""
        queries = split_heads(key_heads, self.axis.size).queries
        return start_seq_to_head(q, self.axis, self.sizes(layout), queries).wait

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        return self.forward_prefetched(None, q, k, v, spec, expansion)

    def forward_prefetched(
        self,
        pending_q: PendingTensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
        /,
    ) -> tuple[Tensor, Saved]:
        sizes, key_sizes, heads, inner_spec = self.head_call(spec)
        # 1. All-to-all, sequence shards to head shards: q, k and v are in flight at once.
        pending_q = pending_q or start_seq_to_head(q, self.axis, sizes, heads.queries).wait
        if expansion is None or self.latent_ring is None:  # otherwise the ring gathers the latents at each step
            sent_heads = self._sent_heads(heads, expansion)
            pending = [start_seq_to_head(x, self.axis, key_sizes, sent_heads) for x in (k, v)]
            k, v = (transfer.wait() for transfer in pending)
            del pending  # frees the send buffers before attention
        q = pending_q()
        del pending_q
        # 2. Attention of this rank's heads over all tokens of its sequence shard.
        own_expansion = () if expansion is None else (expansion.of_heads(heads.keys[self.axis.rank]),)
        inner = self.inner if expansion is None else self.latent_ring or self.inner
        out, saved = inner.forward(q, k, v, inner_spec, *own_expansion)
        # 3. All-to-all, head shards back to sequence shards.
        return start_head_to_seq(out, self.axis, sizes, heads.queries).wait(), saved

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, key_sizes, heads, inner_spec = self.head_call(spec)
        # 3, reversed. The saved tensors are head shards already: only dout is exchanged.
        head_dout = start_seq_to_head(dout, self.axis, sizes, heads.queries).wait()
        # 2, reversed.
        own_expansion = () if expansion is None else (expansion.of_heads(heads.keys[self.axis.rank]),)
        inner = self.inner if expansion is None else self.latent_ring or self.inner
        dq, dk, dv = inner.backward(head_dout, saved, inner_spec, *own_expansion)
        # 1, reversed: dq, dk and dv are in flight at once. If ranks share a key/value head, or a latent, each has a
        # partial sum of its dk and dv. These are sent in the accumulation dtype, and the receiver adds them up.
        has_shared_heads = heads.has_shared_heads or expansion is not None
        dk, dv = (x.to(accumulation_dtype(dout.dtype) if has_shared_heads else dout.dtype) for x in (dk, dv))
        pending_dq = start_head_to_seq(dq.to(dout.dtype), self.axis, sizes, heads.queries)
        if expansion is None or self.latent_ring is None:
            sent_heads = self._sent_heads(heads, expansion)
            pending = [start_head_to_seq(dx, self.axis, key_sizes, sent_heads) for dx in (dk, dv)]
            dk, dv = (transfer.wait() for transfer in pending)
        return pending_dq.wait(), dk, dv

    def heads(self, heads: range) -> range:
        """Returns the query heads, of `heads`, that this rank attends with."""
        local = SequenceLayout.contiguous(len(heads), self.axis.size).spans(self.axis.rank)[0]
        return self.inner.heads(heads[local.start : local.stop])

    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor:
        """Returns lse [B, T, H] of the local queries, by an all-to-all of the saved lse of head shards."""
        sizes, _, heads, inner_spec = self.head_call(spec)
        lse = self.inner.local_lse(saved, inner_spec).unsqueeze(-1)
        return start_head_to_seq(lse, self.axis, sizes, heads.queries).wait().squeeze(-1)

    def _sent_heads(self, heads: HeadShards, expansion: Expansion | None) -> tuple[range, ...]:
        """Returns the heads of k and v that each rank receives: those of its queries, or the latents, one head."""
        return heads.keys if expansion is None else (range(1),) * self.axis.size

    def empty_saved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_heads: tuple[int, ...],
        tokens: int,
        key_tokens: int,
        expansion: Expansion | None = None,
    ) -> Saved:
        """Returns empty tensors shaped like those that `forward` saves: head shards, or those of the inner method."""
        heads, rank = split_heads(key_heads, self.axis.size), self.axis.rank
        sent_heads = self._sent_heads(heads, expansion)[rank]
        q = q.new_empty((q.shape[0], tokens, len(heads.queries[rank]), q.shape[3]))
        if expansion is None or self.latent_ring is None:
            k, v = (x.new_empty((x.shape[0], key_tokens, len(sent_heads), x.shape[3])) for x in (k, v))
        if self.inner.redistributes_inputs:
            inner_heads = heads.key_heads(key_heads, rank)
            return self.inner.empty_saved(q, k, v, inner_heads, tokens, key_tokens, expansion)
        out = q.new_empty((*q.shape[:3], value_dim(v, expansion)))
        return Saved(q, k, v, out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)))

    def head_call(self, spec: AttentionSpec) -> HeadCall:
        """Returns how the call is divided over the ranks of the head axis. Cached per spec."""
        axis, inner = self.axis, self.inner

        def make() -> HeadCall:
            heads = split_heads(spec.key_heads, axis.size)
            inner_spec = spec.with_heads(heads.key_heads(spec.key_heads, axis.rank))
            return HeadCall(self.sizes(spec.layout), self.sizes(spec.key_layout), heads, inner_spec)

        return spec.cached(("heads of ranks", axis.rank, axis.size, inner.shard, inner.shards), make)


class HeadCall(NamedTuple):
    """The division of a call over the ranks of a head axis.

    Args:
        sizes: number of queries of each rank, before the all-to-all.
        key_sizes: number of keys of each rank, before the all-to-all.
        heads: the heads of each rank, after the all-to-all.
        inner_spec: the spec of the call of `inner`, with this rank's heads only.
    """

    sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    heads: HeadShards
    inner_spec: AttentionSpec
