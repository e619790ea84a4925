"""UPipe, or Untied Ulysses (arXiv 2602.21196): Ulysses over a few heads at a time.

    for each stage of heads:
        project      q of the stage; k and v at the first stage of a round only, because its other stages reuse them
        all-to-all   sequence shards to head shards
        attend       with any method on the sequence axis
        all-to-all   out of the stage back to sequence shards

A round is the stages that use the same key/value heads; `stages_of` lists the heads of each stage. Without `prefetch`
only one stage's q, k, v and out exist at a time. Forward saves x, out and the log-sum-exp. Backward runs the same
stages and recomputes the projections, but not attention. With all heads in one stage this is the checkpoint placement
of DistFlashAttention (arXiv 2310.03294), for any method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.qkv_sources import Finished, Heads, QKVSource, select_heads, write_heads
from armillary.attention.call.recompute import outside_autocast
from armillary.attention.call.spec import AttentionSpec, Saved, StagedMethod
from armillary.attention.methods.base import Method
from armillary.attention.methods.head_shards import KeyHeads, check_heads_per_stage, split_heads, stages_of
from armillary.attention.methods.ring import GatheringRing
from armillary.attention.methods.stage_keys import HeadLatents, Latents, NodeLatents, RoundKeys, StageKeys
from armillary.attention.methods.ulysses import HeadMethod, PendingTensor
from armillary.attention.tiling.latents import Expansion
from armillary.core import Axis, accumulation_dtype, start_head_to_seq, start_seq_to_head
from armillary.core.internal import PackedHeads, check_bool, start_head_to_parts, start_packed_to_head

QueryTensor = Callable[[Heads], Tensor]
"""Returns [B, T, len(heads), D] of this rank's tokens: q, out or dout of some query heads."""


class UPipe(HeadMethod, StagedMethod):
    """Ulysses in stages of S query heads, around `inner`.

    The full sequence is q [B, N, H, D], k [B, N, K, D], v [B, N, K, Dv] and out [B, N, H, Dv], sharded on dim 1; a rank
    has T tokens of all heads. q, k, v and out of one stage, before and after the all-to-all, take
    (2 S + 2 min(K, S)) / (2 H + 2 K) of the memory that q, k, v and out take in Ulysses.

    Args:
        axis: a 1-D mesh of U ranks, such as `mesh["ulysses"]`. With one rank there are stages, but no communication.
        inner: any method on the sequence axis. Local by default.
        heads_per_stage: S, query heads of a stage over all ranks of the axis, a multiple of U. All heads by default.
        prefetch: True sends the next stage's heads while this stage attends. The next stage's tensors then take memory
            too: instead of those of (2 S + 2 min(K, S)) heads, up to (4 S + 2 min(K, S)) within a round, and
            (4 S + 6 min(K, S)) at the last stage of a round.

    Bytes sent by a rank, all-to-all, for e bytes an element and a bytes an accumulated gradient element, with Dv = D,
    and U that divides H and either divides K or is a multiple of it:

        forward    q, k, v, out         (U - 1) / U * (2 H + 2 max(K, U)) B T D e, as in Ulysses
        backward   q, out, dout, k, v   (U - 1) / U * (3 H + 2 max(K, U)) B T D e
                   dq, dk, dv           (U - 1) / U * (H e + 2 max(K, U) c) B T D

    Here c = e, or c = a if ranks share key/value heads (K < U) and send partial sums. A call on q, k and v (instead of
    hidden states) also sends lse, (U - 1) / U * B T H a in forward and in backward. `inner` sends its own bytes in each
    stage: a ring rotates the keys of a round once per stage, but latents once in a call; a rank keeps all that it sees.

    Raises:
        ValueError: `heads_per_stage` is not a positive multiple of U; `prefetch` is not a bool; `inner` is not a
            method, or has a head axis itself, or one of its axes does not form a grid of ranks with this one.
    """

    key_sends = 2

    def __init__(
        self,
        axis: DeviceMesh | Axis,
        inner: Method | None = None,
        heads_per_stage: int | None = None,
        prefetch: bool = False,
    ) -> None:
        if isinstance(inner, Method) and inner.head_axis is not None:
            raise ValueError(f"inner {type(inner).__name__} divides heads itself; pass a method on the sequence axis")
        super().__init__(axis, inner)
        self._set_options(heads_per_stage, check_bool("prefetch", prefetch))

    @classmethod
    def for_method(cls, method: Method, heads_per_stage: int | None = None) -> UPipe:
        """Returns `method` if it is a UPipe, else a UPipe on its axes, by default with all heads in one stage."""
        if isinstance(method, UPipe):
            return method
        # Without `__init__` and its checks: the axes were checked when `method` was constructed, and every block of a
        # model calls this.
        upipe = cls.__new__(cls)
        upipe.compose(method.head_axis or Axis.alone("ulysses"), method.sequence_method)
        upipe._set_options(heads_per_stage, prefetch=False)
        upipe.kernel, upipe.send_latents = method.kernel, method.send_latents
        return upipe

    def _set_options(self, heads_per_stage: int | None, prefetch: bool) -> None:
        count = heads_per_stage if heads_per_stage is None else check_heads_per_stage(heads_per_stage, self.axis.size)
        self.heads_per_stage: int | None = count
        self.prefetch: bool = prefetch
        self.latent_ring = self.inner.gathering(self.axis) if self.inner.sequence_shards > 1 else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        out, lse = self.attend(Finished((q, k, v)), spec, expansion=expansion)
        return out, Saved(q, k, v, out, self.lse_to_seq(lse, spec))

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        source, call = Finished((saved.q, saved.k, saved.v)), self._staged_call(spec)
        lse = start_seq_to_head(saved.lse.unsqueeze(-1), self.axis, call.sizes, call.queries).wait().squeeze(-1)
        self.differentiate(dout, source, saved.out, lse, spec, expansion)
        dq, dk, dv = source.gradients()
        return dq, dk, dv

    # -- the stages, without autograd ---------------------------------------------------------------------------------

    def attend(
        self,
        source: QKVSource,
        spec: AttentionSpec,
        out_buffer: Tensor | None = None,
        expansion: Expansion | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs forward over all stages, without autograd.

        Args:
            source: q, k and v of this rank's T tokens, a few heads at a time.
            out_buffer: memory for out, used if it has the shape and dtype of out.
            expansion: of k and v, if these are rotary keys and latents. They are sent once, before the first stage.

        Returns:
            out [B, T, H, Dv] of this rank's tokens and all heads, and lse [B, n, h] of the n tokens of the rank's
            sequence shard and the h heads that it attends with.
        """
        call, results = self._staged_call(spec, expansion is not None), list[Tensor]()
        with outside_autocast(source.device_type):
            latents = self._send_latents(call, source, expansion)
            for stage, stage_tensors, keys in self._pipeline(call, source, [source.q], latents):
                # 1. q has arrived: all n tokens of the sequence shard, and this rank's heads of the stage.
                q = stage_tensors.pop()
                if not results:  # allocated at the first stage, when q and v tell the head dims and dtype
                    shape = q.shape[0], call.sizes[self.axis.rank]
                    dim, tokens = keys.value_dim, sum(call.sizes)
                    results += self.empty_results(shape, tokens, spec.key_heads, q, dim, out_buffer)
                out, lse = results
                # 2. Attention over the keys of the round.
                if stage.own_indices:
                    stage_out, stage_lse = keys.forward(q, stage.inner_spec, stage.key_heads)
                    write_heads(lse, stage.own_indices, [stage_lse])
                    del stage_lse
                else:  # this rank has no heads in the last stages, but takes part in their all-to-alls
                    stage_out = q.new_empty((*q.shape[:3], keys.value_dim))
                del q
                # 3. All-to-all back to this rank's tokens. The stage's heads are written into the preallocated out.
                pending = start_head_to_parts(stage_out, self.axis, call.sizes, stage.query_ranges)
                write_heads(out, stage.queries, pending.wait())
                del stage_out, pending, keys  # freed before the next stage is sent
        out, lse = results
        return out, lse

    def differentiate(
        self,
        dout: Tensor,
        source: QKVSource,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
    ) -> None:
        """Runs backward over all stages, without autograd. Adds the gradients of q, k and v to `source`.

        Args:
            dout: [B, T, H, Dv].
            out, lse: as `attend` returned them.
            expansion: as in `attend`.
        """
        call, wide_dtype = self._staged_call(spec, expansion is not None), accumulation_dtype(dout.dtype)
        query_tensors: list[QueryTensor] = [source.q, partial(select_heads, out), partial(select_heads, dout)]
        with outside_autocast(source.device_type):
            latents = self._send_latents(call, source, expansion)
            for stage, stage_tensors, keys in self._pipeline(call, source, query_tensors, latents):
                # 1. q (projected again), out and dout of this rank's heads of the stage have arrived, in this order. A
                # rank without heads in the stage returns its empty q as dq.
                dq = stage_tensors[0]
                # 2. Backward of attention, with the saved lse: attention itself is not recomputed.
                if stage.own_indices:
                    q, stage_out, stage_dout = stage_tensors
                    stage_lse = select_heads(lse, stage.own_indices)
                    # dk and dv are summed over the stages of a round, then sent once.
                    dq = keys.backward(stage_dout, q, stage_out, stage_lse, stage.inner_spec, stage.key_heads)
                    del q, stage_out, stage_dout, stage_lse
                stage_tensors.clear()
                # 3. All-to-all of dq back to this rank's tokens, and backward of the projection of these heads.
                pending = start_head_to_parts(dq.to(dout.dtype), self.axis, call.sizes, stage.query_ranges)
                del dq
                source.add_q(stage.queries, pending.wait())
                del pending
                # 4. At the end of a round the same for dk and dv. If ranks share a key/value head, each sends a partial
                # sum, in the accumulation dtype.
                returned_keys = stage.returned_keys
                if returned_keys.heads and isinstance(keys, RoundKeys):
                    if not stage.ends_round:  # this rank is in the middle of its round, and sends no heads
                        keys = keys.without_heads()
                    token_grads = list[Tensor]()
                    for grad, x in ((keys.dk, keys.k), (keys.dv, keys.v)):
                        grad = torch.zeros_like(x, dtype=wide_dtype) if grad is None else grad
                        grad = grad.to(wide_dtype if returned_keys.has_shared_heads else dout.dtype)
                        transfer = start_head_to_seq(grad, self.axis, call.key_sizes, returned_keys.ranges)
                        token_grads.append(transfer.wait())
                        del grad, x, transfer
                    source.add_kv(returned_keys.heads, *token_grads)
                    del token_grads
                del keys  # freed before the next stage is sent
            if latents is not None:
                source.add_kv((0,), *latents.token_grads())

    def lse_to_seq(self, lse: Tensor, spec: AttentionSpec) -> Tensor:
        """Returns lse [B, T, H] of this rank's tokens, from lse [B, n, h] of its heads."""
        call = self._staged_call(spec)
        return start_head_to_seq(lse.unsqueeze(-1), self.axis, call.sizes, call.queries).wait().squeeze(-1)

    def empty_results(
        self,
        shape: Sequence[int],
        shard_tokens: int,
        key_heads: tuple[int, ...],
        q: Tensor,
        value_dim: int,
        out_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns empty tensors shaped like out and lse of `attend`.

        Args:
            shape, shard_tokens, key_heads: as in `StagedMethod.empty_results`.
            q: any tensor with the dtype and device of queries.
            value_dim: Dv.
            out_buffer: used as out, if it has the right shape and dtype.
        """
        out_shape = (*shape, len(key_heads), value_dim)
        fits = out_buffer is not None and out_buffer.shape == out_shape and out_buffer.dtype == q.dtype
        out = out_buffer if out_buffer is not None and fits else q.new_empty(out_shape)
        own_heads = len(split_heads(key_heads, self.axis.size).queries[self.axis.rank])
        return out, q.new_empty((shape[0], shard_tokens, own_heads), dtype=accumulation_dtype(q.dtype))

    def own_queries(self, spec: AttentionSpec) -> slice:
        """Returns the query heads that this rank attends with."""
        heads = self._staged_call(spec).queries[self.axis.rank]
        return slice(heads.start, heads.stop)

    def _stage_keys(self, key_heads: tuple[int, ...]) -> list[int]:
        return [stage.key_count for stage in stages_of(key_heads, self.axis.size, self.heads_per_stage)]

    def _pipeline(
        self, call: StagedCall, source: QKVSource, tensors: Sequence[QueryTensor], latents: Latents | None
    ) -> Iterator[tuple[LocalStage, list[Tensor], StageKeys]]:
        """Sends the heads of each stage to their ranks, and yields (stage, received tensors, keys of the round).

        The received tensors are in the order of `tensors`.

        Args:
            tensors: functions from query heads to a tensor to send, such as q.
            latents: the keys of all stages; None if each round has keys of its own.
        """
        keys, pending = None, list[PendingTensor]()
        for i, stage in enumerate(call.stages):
            pending = pending or self._send_stage(call, stage, source, tensors)
            stage_tensors = [wait() for wait in pending]
            pending.clear()
            if self.prefetch and i + 1 < len(call.stages):  # the next stage is in flight while this one attends
                pending = self._send_stage(call, call.stages[i + 1], source, tensors)
            if stage.received_keys.heads:
                # A round starts on some rank, and every rank took part in the all-to-alls of k and v. A rank whose own
                # round continues has received 0 heads, and uses the keys that it has.
                k, v = stage_tensors[:2]
                del stage_tensors[:2]
                keys = RoundKeys(self.inner, k, v) if stage.starts_round or keys is None else keys
                del k, v
            # The caller empties the list and drops the keys, to free their memory before the next stage is sent.
            yield stage, stage_tensors, cast(StageKeys, latents or keys)  # every rank has heads in the first stage
            keys = keys.without_heads() if keys is not None and stage.ends_round else keys

    def _send_latents(self, call: StagedCall, source: QKVSource, expansion: Expansion | None) -> Latents | None:
        """Sends latents to all ranks that attend with them; None without an expansion."""
        if expansion is None:
            return None
        k, v = source.kv((0,))
        if isinstance(self.latent_ring, GatheringRing):
            return NodeLatents(self.latent_ring, k, v, call.stages[0].inner_spec, expansion)
        return HeadLatents.gather(self.axis, call.key_sizes, self.inner, k, v, expansion)

    def _send_stage(
        self, call: StagedCall, stage: LocalStage, source: QKVSource, tensors: Sequence[QueryTensor]
    ) -> list[PendingTensor]:
        """Starts the all-to-alls of a stage: of k and v if a round starts on any rank, then of `tensors`.

        Returns one function per tensor, which waits for it.
        """
        pending: list[PendingTensor] = []

        def send(heads: list[Tensor], ranges: Sequence[range], sizes: Sequence[int]) -> None:
            # Popped, so that the tensor is freed when it is packed.
            transfer = start_packed_to_head(PackedHeads.cut(heads.pop(0), ranges), self.axis, sizes)
            if self.prefetch:
                pending.append(transfer.wait)
            else:  # frees the send buffer before the next tensor is projected
                result = transfer.wait()
                pending.append(lambda: result)

        if stage.received_keys.heads:
            keys = list(source.kv(stage.received_keys.heads))
            while keys:
                send(keys, stage.received_keys.ranges, call.key_sizes)
        for tensor in tensors:
            send([tensor(stage.queries)], stage.query_ranges, call.sizes)
        return pending

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Runs the inner method's `plan`, with the spec of each stage."""
        stages = zip(self._staged_call(spec).stages, self._staged_call(previous).stages, strict=True)
        # Most stages have the same inner spec, which is planned once.
        for inner_spec, inner_previous in {a.inner_spec: b.inner_spec for a, b in stages}.items():
            self.inner.plan(inner_spec, inner_previous, rows)

    def _staged_call(self, spec: AttentionSpec, has_latents: bool = False) -> StagedCall:
        """Returns the stages of a call. Cached per spec.

        Args:
            has_latents: True if latents are sent before the first stage, instead of the keys of each round.
        """
        rank, ranks, inner = self.axis.rank, self.axis.size, self.inner

        def make() -> StagedCall:
            queries, stages = split_heads(spec.key_heads, ranks).queries, list[LocalStage]()
            for stage in stages_of(spec.key_heads, ranks, self.heads_per_stage):
                stage = stage.without_rounds() if has_latents else stage
                rank_heads = stage.by_rank[rank]
                own_indices = tuple(head - queries[rank].start for head in rank_heads.queries)
                inner_spec = spec.with_heads(rank_heads.key_heads(spec.key_heads))
                key_rounds = stage.received_keys, stage.returned_keys, rank_heads.starts_round, rank_heads.ends_round
                own_keys = range(rank_heads.keys[0], rank_heads.keys[-1] + 1) if rank_heads.keys else range(0)
                local_stage = stage.queries, stage.query_ranges, *key_rounds, own_indices, own_keys, inner_spec
                stages.append(LocalStage(*local_stage))
            return StagedCall(self.sizes(spec.layout), self.sizes(spec.key_layout), queries, tuple(stages))

        return spec.cached(("stages", rank, ranks, inner.shard, inner.shards, self.heads_per_stage, has_latents), make)


class StagedCall(NamedTuple):
    """The stages of a call.

    Args:
        sizes: number of queries of each rank of the head axis, before an all-to-all.
        key_sizes: number of keys of each rank of the head axis, before an all-to-all.
        queries: for each rank, the query heads that it attends with in all stages.
        stages: this rank's part of each stage.
    """

    sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    queries: tuple[range, ...]
    stages: tuple[LocalStage, ...]


class LocalStage(NamedTuple):
    """A stage as one rank runs it.

    Args:
        queries, query_ranges: query heads of all ranks, and for each rank its part of them, as in `Stage`.
        received_keys, returned_keys: key/value heads of the all-to-alls before and after the stage, as in `Stage`.
        starts_round, ends_round: True if these all-to-alls have heads of this rank.
        own_indices: this rank's query heads of the stage, as indices into its query heads of all stages.
        key_heads: this rank's key/value heads of the stage.
        inner_spec: the spec of the call of `inner`: this rank's query heads of the stage and the keys of the round.
    """

    queries: tuple[int, ...]
    query_ranges: tuple[range, ...]
    received_keys: KeyHeads
    returned_keys: KeyHeads
    starts_round: bool
    ends_round: bool
    own_indices: tuple[int, ...]
    key_heads: range
    inner_spec: AttentionSpec
