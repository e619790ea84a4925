"""UPipe, or Untied Ulysses (arXiv 2602.21196): Ulysses over a few heads at a time.

    for each stage of heads:
        project      q of the stage, and k, v where new ones are needed (a round's later stages reuse them)
        all-to-all   sequence shards become head shards
        attend       with any sequence-axis method
        all-to-all   back, into the output

So only one stage's q, k, v and out exist at a time. Backward keeps x, out and the log-sum-exp alone and walks over the
same stages, projecting again; attention itself is not repeated. With all heads in one stage that is the checkpoint
placement of DistFlashAttention (arXiv 2310.03294), for any method. Which heads meet when: `stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.interface import StagedMethod
from armillary.attention.call.sources import Finished, Heads, QKVSource, select_heads, write_heads
from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import MethodOptions, OnHeads
from armillary.attention.methods.head_axis import Arriving, HeadMethod, checked_inner, split_heads
from armillary.attention.methods.stages import Keys, Stage
from armillary.attention.methods.upipe_plan import backward_memory, comm_plan, forward_memory, heads_of, stages_of
from armillary.core import Axis
from armillary.core.accumulate import accumulation_dtype
from armillary.core.checked import flag
from armillary.core.collectives.all_to_all import (
    PackedHeads,
    start_head_to_parts,
    start_head_to_seq,
    start_packed_to_head,
    start_seq_to_head,
)
from armillary.core.recompute import outside_autocast

Column = Callable[[Heads], Tensor]
"""Gives [B, T, len(heads), D] of this rank's tokens."""


@dataclass
class OnHand:
    """Key/value heads [B, n, k, D] and [B, n, k, Dv] of n tokens, and the sums of their gradients so far."""

    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Takes in the gradients of one stage."""
        self.dk = dk if self.dk is None else self.dk.to(accumulation_dtype(dk.dtype)).add_(dk)
        self.dv = dv if self.dv is None else self.dv.to(accumulation_dtype(dv.dtype)).add_(dv)

    def spent(self) -> OnHand:
        """No heads any more, of the same dims."""
        return OnHand(*(x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (self.k, self.v)))


class StageWork(NamedTuple):
    """A stage of a call, as one rank of the head axis does it.

    Args:
        queries, ranges: query heads of all ranks in rank order, and where each rank's are among them.
        arriving, leaving: key/value heads that are sent before, and whose gradients are sent back after the stage.
        own: where this rank's query heads of the stage are among all of its own.
        first, last: as of its `Share`.
        inside: the call as `inner` sees it: this rank's heads of the stage, against the keys on hand.
    """

    queries: tuple[int, ...]
    ranges: tuple[range, ...]
    arriving: Keys
    leaving: Keys
    own: tuple[int, ...]
    first: bool
    last: bool
    inside: AttentionSpec


class Walk(NamedTuple):
    """A call over stages: tokens of queries and of keys, and query heads, of each rank of the head axis; the stages."""

    tokens: tuple[int, ...]
    keys: tuple[int, ...]
    queries: tuple[range, ...]
    stages: tuple[StageWork, ...]


class UPipe(HeadMethod, StagedMethod):
    """Ulysses in stages of heads, around `inner` (Local unless given).

    Attention intermediates (q, k, v and out of one stage, after and while they are sent) take
    (2 S + 2 min(K, S)) / (2 H + 2 K) of what Ulysses' take, for S heads a stage.

    Args:
        axis: a 1-D mesh of U ranks, such as `mesh["ulysses"]`. With one rank, heads come in stages and nothing moves.
        inner: any sequence-axis method over another axis.
        heads_per_stage: S, query heads of a stage over all ranks of the axis, a multiple of U. All unless given.
        prefetch: bring the next stage's heads while this one attends. Costs their memory, sent and received: while a
            stage attends, (2 S + 2 min(K, S)) heads become up to (4 S + 2 min(K, S)) within a round, and
            (4 S + 6 min(K, S)) at the last stage of a round.

    Bytes sent, even case, T tokens: forward as Ulysses, (U - 1) / U * (2 H + 2 max(K, U)) B T D e, as keys come in once
    a round. Backward q, k and v come in again, with out and dout, (U - 1) / U * (3 H + 2 max(K, U)) B T D e; and
    gradients go home, (U - 1) / U * (H e + 2 max(K, U) c) B T D, where c = e, or a if ranks share key heads (K < U).
    `inner` sends what it sends for each stage: a ring turns the keys of a round once a stage. Given finished q, k and
    v, lse goes there and back besides, (U - 1) / U * B T H a each way.

    Raises:
        ValueError: heads_per_stage is no multiple of U; `inner` is no method, has a head axis of its own, or works on
            this axis or on one that shares other ranks with it.
    """

    def __init__(
        self,
        axis: DeviceMesh | Axis,
        inner: Method | None = None,
        heads_per_stage: int | None = None,
        prefetch: bool = False,
    ) -> None:
        if checked_inner(inner).head_axis is not None:
            raise ValueError(f"inner {type(inner).__name__} divides heads itself; give a sequence-axis method")
        super().__init__(axis, inner)
        self.heads_per_stage, self.prefetch = heads_of(heads_per_stage, self.axis.size), flag("prefetch", prefetch)

    @classmethod
    def around(cls, method: Method, heads_per_stage: int | None = None) -> UPipe:
        """`method` in the form that keeps x, out and lse alone: itself if it is UPipe, else all heads in one stage."""
        if isinstance(method, UPipe):
            return method
        made = cls.__new__(cls)  # what `method` is made of was checked then, and this is called by every block
        made.compose(method.head_axis or Axis.alone("ulysses"), method.sequence_method)
        made.heads_per_stage, made.prefetch = heads_of(heads_per_stage, made.axis.size), False
        made.kernel = method.kernel
        return made

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        out, lse = self.attend(Finished((q, k, v)), spec)
        return out, Saved(q, k, v, out, self.lse_to_seq(lse, spec))

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        source, lse, walk = Finished((saved.q, saved.k, saved.v)), saved.lse.unsqueeze(-1), self._walk(spec)
        lse = start_seq_to_head(lse, self.axis, walk.tokens, walk.queries).wait().squeeze(-1)
        self.differentiate(dout, source, saved.out, lse, spec)
        dq, dk, dv = source.gradients()
        return dq, dk, dv

    # -- the walk over stages, without autograd -----------------------------------------------------------------------

    def attend(self, source: QKVSource, spec: AttentionSpec, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out [B, T, H, Dv] of this rank's tokens, lse [B, n, h] of its heads, for n tokens of its sequence shard).

        Args:
            into: becomes out, if it has its shape and dtype.
        """
        walk, results = self._walk(spec), list[Tensor]()

        def work(stage: StageWork, arrived: list[Tensor], keys: OnHand) -> None:
            q = arrived.pop()
            if not results:
                results.extend(self.results(q.shape[0], q, keys.v, spec, into))
            out, lse = results
            if stage.own:
                part, saved = self.inner.forward(q, keys.k, keys.v, stage.inside)
                write_heads(lse, stage.own, [saved.lse])
                del saved
            else:
                part = q.new_empty((*q.shape[:3], keys.v.shape[3]))
            del q
            moving = start_head_to_parts(part, self.axis, walk.tokens, stage.ranges)
            write_heads(out, stage.queries, moving.wait())

        with outside_autocast(source.device_type):
            self._each_stage(walk, source, [source.q], work)
        out, lse = results
        return out, lse

    def differentiate(self, dout: Tensor, source: QKVSource, out: Tensor, lse: Tensor, spec: AttentionSpec) -> None:
        """Gives `source` the gradients of its q, k and v, from dout [B, T, H, Dv] and what `attend` returned."""
        walk = self._walk(spec)

        def work(stage: StageWork, arrived: list[Tensor], keys: OnHand) -> None:
            dq = arrived[0]
            if stage.own:
                part_lse = select_heads(lse, stage.own)
                saved = Saved(arrived[0], keys.k, keys.v, arrived[1], part_lse)
                dq, dk, dv = self.inner.backward(arrived[2], saved, stage.inside)
                keys.add(dk, dv)
                del saved, dk, dv
            arrived.clear()
            moving = start_head_to_parts(dq.to(dout.dtype), self.axis, walk.tokens, stage.ranges)
            del dq
            source.add_q(stage.queries, moving.wait())
            del moving
            if stage.leaving.heads:
                leaving = keys if stage.last else keys.spent()
                source.add_kv(stage.leaving.heads, *self._bring_home(leaving, stage.leaving, dout.dtype, walk.keys))

        columns: list[Column] = [source.q, partial(select_heads, out), partial(select_heads, dout)]
        with outside_autocast(source.device_type):
            self._each_stage(walk, source, columns, work)

    def lse_to_seq(self, lse: Tensor, spec: AttentionSpec) -> Tensor:
        """lse [B, n, h] of this rank's heads -> [B, T, H] of its tokens."""
        walk = self._walk(spec)
        return start_head_to_seq(lse.unsqueeze(-1), self.axis, walk.tokens, walk.queries).wait().squeeze(-1)

    def results(
        self, batch: int, q: Tensor, v: Tensor, spec: AttentionSpec, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse of `attend`, still without content, for q [..., D] and v [..., Dv]."""
        walk = self._walk(spec)
        shape = (batch, walk.tokens[self.axis.rank], len(spec.key_heads), v.shape[3])
        fits = into is not None and into.shape == shape and into.dtype == q.dtype
        out = into if into is not None and fits else q.new_empty(shape)
        own = len(walk.queries[self.axis.rank])
        return out, q.new_empty((batch, sum(walk.tokens), own), dtype=accumulation_dtype(q.dtype))

    def own_queries(self, spec: AttentionSpec) -> slice:
        """The query heads that this rank of the axis works on."""
        mine = self._walk(spec).queries[self.axis.rank]
        return slice(mine.start, mine.stop)

    def _each_stage(
        self,
        walk: Walk,
        source: QKVSource,
        columns: Sequence[Column],
        work: Callable[[StageWork, list[Tensor], OnHand], None],
    ) -> None:
        """Calls work(stage, arrived, keys on hand), where `arrived` has what `columns` give for a stage's query heads.

        `work` takes things out of `arrived`: what nobody holds any more makes room for what is sent next.
        """
        keys, coming = None, self._bring(walk, 0, source, columns)
        for i, stage in enumerate(walk.stages, start=1):
            arrived = [arrive() for arrive in coming]
            coming.clear()
            if self.prefetch:
                coming = self._bring(walk, i, source, columns)
            if stage.arriving.heads:
                k, v = arrived[:2]
                del arrived[:2]
                keys = OnHand(k, v) if stage.first or keys is None else keys
                del k, v
            assert keys is not None  # every rank has heads in the first stage
            work(stage, arrived, keys)
            keys = keys.spent() if stage.last else keys
            if not self.prefetch:
                coming = self._bring(walk, i, source, columns)

    def _bring(self, walk: Walk, i: int, source: QKVSource, columns: Sequence[Column]) -> list[Arriving]:
        """Makes and sends what stage `i` needs, if there is one: k and v where some arrive, then each column."""
        coming: list[Arriving] = []
        for stage in walk.stages[i : i + 1]:
            if stage.arriving.heads:
                keys = list(source.kv(stage.arriving.heads))
                while keys:
                    packed = PackedHeads.cut(keys.pop(0), stage.arriving.ranges)
                    coming.append(self._send(packed, walk.keys))
                    del packed
            for column in columns:
                packed = PackedHeads.cut(column(stage.queries), stage.ranges)
                coming.append(self._send(packed, walk.tokens))
                del packed
        return coming

    def _send(self, packed: PackedHeads, sizes: Sequence[int]) -> Arriving:
        """Starts the all-to-all; without prefetch, also waits for it, so that what was sent can go."""
        moving = start_packed_to_head(packed, self.axis, sizes)
        if self.prefetch:
            return moving.wait
        arrived = moving.wait()
        return lambda: arrived

    def _bring_home(
        self, keys: OnHand, leaving: Keys, dtype: torch.dtype, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's tokens; unfinished sums, where ranks share a head, in the accumulation dtype."""
        home = list[Tensor]()
        for grad, x in ((keys.dk, keys.k), (keys.dv, keys.v)):
            grad = torch.zeros_like(x, dtype=accumulation_dtype(dtype)) if grad is None else grad
            grad = grad.to(accumulation_dtype(dtype) if leaving.shared else dtype)
            home.append(start_head_to_seq(grad, self.axis, sizes, leaving.ranges).wait())
        dk, dv = home
        return dk, dv

    def _walk(self, spec: AttentionSpec) -> Walk:
        axis, inner, at_once = self.axis, self.inner, self.heads_per_stage
        place = ("walk", axis.rank, axis.size, inner.shard, inner.shards, at_once)
        return spec.once(place, lambda: self._found(spec))

    def _found(self, spec: AttentionSpec) -> Walk:
        rank, queries = self.axis.rank, split_heads(spec.key_heads, self.axis.size).queries
        start = queries[rank].start

        def of(stage: Stage) -> StageWork:
            mine = stage.shares[rank]
            own = tuple(head - start for head in mine.queries)
            inside = spec.with_heads(mine.key_heads(spec.key_heads))
            leads = stage.queries, stage.query_ranges, stage.arriving, stage.leaving
            return StageWork(*leads, own, mine.first, mine.last, inside)

        stages = stages_of(spec.key_heads, self.axis.size, self.heads_per_stage)
        return Walk(self.sizes(spec.layout), self.sizes(spec.key_layout), queries, tuple(map(of, stages)))


# -- options ----------------------------------------------------------------------------------------------------------


def heads_at_once(ranks: int, options: MethodOptions) -> int | None:
    """The heads per stage that are asked for, or one for each rank of the head axis."""
    return heads_of(ranks if options.heads_per_stage is None else options.heads_per_stage, ranks)


def variants(heads: int, ranks: int) -> Iterator[MethodOptions]:
    """The fewest heads a stage, and twice as many, while there are stages."""
    return (MethodOptions(heads_per_stage=count) for count in (ranks, 2 * ranks) if count < heads)


def shown(options: MethodOptions) -> str:
    """Such as ", 8 heads a stage"."""
    return "" if options.heads_per_stage is None else f", {options.heads_per_stage} heads a stage"


REGISTERED = OnHeads(
    build=lambda axis, inner, options: UPipe(axis, inner, heads_at_once(axis.size(), options)),
    comm_plan=lambda work, ranks, inner, options: comm_plan(work, ranks, inner, heads_at_once(ranks, options)),
    forward_memory=forward_memory,
    backward_memory=backward_memory,
    projects_in_stages=True,
    heads_at_once=heads_at_once,
    takes=("heads_per_stage",),
    variants=variants,
    shown=shown,
)
