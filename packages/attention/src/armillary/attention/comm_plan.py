"""What an attention method sends and computes, step by step, on all of its ranks: pure values, without tensors.

Each method's file has a function `comm_plan` beside the method, from `AttentionShape` to `CommPlan`. It is the method's
closed form: what a `CommLedger` counts is what it says, to the byte, and a planner predicts time from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

import torch

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.grid import Grid, grid_of
from armillary.core import SequenceLayout
from armillary.core.accumulate import accumulation_dtype
from armillary.core.checked import one_of
from armillary.core.network import Send
from armillary.core.observe.ledger import KINDS, PHASES

Kind = Literal["p2p", "all_to_all", "all_gather", "reduce_scatter"]
Role = Literal["ring", "ulysses"]
"""The axis of a method: "ring" is the sequence axis, whatever runs on it, "ulysses" the head axis."""


class Move(NamedTuple):
    """One exchange or collective, on all ranks that take part; ranks are shards, r * U + u.

    Args:
        kind: as a ledger counts it.
        sends: of a collective too: an all-gather is given as a ring, each rank sending its block on C - 1 times; an
            all-to-all, and a reduce-scatter of ours, as a send to each peer. Without those of no bytes.
    """

    kind: Kind
    axis: Role
    sends: tuple[Send, ...]


class Step(NamedTuple):
    """What goes on at the same time.

    Args:
        moves: under way.
        pairs: meanwhile each rank computes so many visible (query, key) pairs, summed over its query heads and the
            batch; empty: nothing is computed.
        leaving: under way as soon as that is computed, until what the next step computes is, or to its beginning if it
            computes nothing.
    """

    moves: tuple[Move, ...] = ()
    pairs: tuple[int, ...] = ()
    leaving: tuple[Move, ...] = ()


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class CommPlan:
    """One attention call: steps that follow each other, as `forward` and `backward` of the method take them.

    Left out: what a call costs extra that returns its lse, or has sinks (an all-to-all of lse [B, T, H] back, where
    there is a head axis).
    """

    forward: Steps
    backward: Steps

    def bytes(self, rank: int, kind: Kind | None = None, phase: str | None = None, axis: Role | None = None) -> int:
        """What a ledger counts on `rank`: by one kind, in one phase ("forward", "backward"), on one axis; None: all.

        Raises:
            ValueError: a kind, phase or axis that there is none of.
        """
        for name, word, known in (("kind", kind, KINDS), ("phase", phase, PHASES), ("axis", axis, get_args(Role))):
            one_of(name, known[0] if word is None else word, known)
        wanted = (rank, kind, phase, axis)
        return sum(n for key, n in self._sent.items() if all(w in (None, k) for w, k in zip(wanted, key, strict=True)))

    @cached_property
    def _sent(self) -> Counter[tuple[int, Kind, str, Role]]:
        sent = Counter[tuple[int, Kind, str, Role]]()
        for phase, steps in (("forward", self.forward), ("backward", self.backward)):
            for move in (move for step in steps for move in (*step.moves, *step.leaving)):
                for send in move.sends:
                    sent[send.source, move.kind, phase, move.axis] += send.bytes
        return sent


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """An attention call, as far as it matters for what is sent and computed. Hashable.

    Args:
        layout, key_layout: of queries and of keys over the P shards of the sequence axis.
        key_heads: for each query head at hand, the key/value head at hand that it uses.
        kv_heads: K, key/value heads at hand.
        head_dim, value_dim: D and Dv.
        projected: from hidden states, as models attend; with finished q, k and v UPipe sends lse there and back too.

    Raises:
        ValueError: layouts of unequal numbers of shards.
    """

    batch: int
    layout: SequenceLayout
    key_layout: SequenceLayout
    mask: AttentionMask
    key_heads: tuple[int, ...]
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    projected: bool = True

    def __post_init__(self) -> None:
        if self.layout.shards != self.key_layout.shards:
            raise ValueError(
                f"queries lie in {self.layout.shards} shards, keys in {self.key_layout.shards}; both need as many"
            )

    @classmethod
    def of(
        cls,
        layout: SequenceLayout,
        mask: AttentionMask,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        batch: int = 1,
        value_dim: int | None = None,
        key_layout: SequenceLayout | None = None,
        projected: bool = True,
    ) -> AttentionShape:
        """Of H query heads that share K key/value heads evenly; self-attention with Dv = D unless told otherwise.

        Raises:
            ValueError: K does not divide H.
        """
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads: K must divide H")
        return cls(
            batch=batch,
            layout=layout,
            key_layout=layout if key_layout is None else key_layout,
            mask=mask,
            key_heads=tuple(h * kv_heads // heads for h in range(heads)),
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            dtype=dtype,
            projected=projected,
        )

    @classmethod
    def of_saved(cls, saved: Saved, spec: AttentionSpec) -> AttentionShape:
        """What a method's walk has before it."""
        return cls(
            batch=saved.q.shape[0],
            layout=spec.layout,
            key_layout=spec.key_layout,
            mask=spec.mask,
            key_heads=spec.key_heads,
            kv_heads=saved.k.shape[2],
            head_dim=saved.q.shape[3],
            value_dim=saved.v.shape[3],
            dtype=saved.q.dtype,
        )

    @property
    def grid(self) -> Grid:
        """What shards see of each other."""
        return grid_of(self.layout, self.key_layout, self.mask)

    # -- elements of one token, over all rows of the batch -----------------------------------------------------------

    @property
    def q(self) -> int:
        return self.lse * self.head_dim

    @property
    def out(self) -> int:
        return self.lse * self.value_dim

    @property
    def lse(self) -> int:
        return self.batch * len(self.key_heads)

    @property
    def k(self) -> int:
        return self.batch * self.kv_heads * self.head_dim

    @property
    def v(self) -> int:
        return self.batch * self.kv_heads * self.value_dim

    # -- bytes of an element -----------------------------------------------------------------------------------------

    @property
    def e(self) -> int:
        """Of the inputs."""
        return self.dtype.itemsize

    @property
    def a(self) -> int:
        """Of lse and of gradients that are not finished."""
        return accumulation_dtype(self.dtype).itemsize


Groups = Iterable[Sequence[int]]
"""Ranks that take part in a collective together; several such collectives at once."""


def move(kind: Kind, axis: Role, sends: Iterable[Send]) -> Move:
    """Without what nobody sends, or sends itself."""
    return Move(kind, axis, tuple(send for send in sends if send.bytes and send.source != send.target))


def all_gather(groups: Groups, tokens: Sequence[int], size: int) -> Move:
    """Each rank's tokens, padded to those of the longest of its group; `size` bytes a token."""

    def sends() -> Iterator[Send]:
        for group in groups:
            padded = max(tokens[rank] for rank in group) * (len(group) - 1) * size
            yield from (Send(rank, group[(i + 1) % len(group)], padded) for i, rank in enumerate(group))

    return move("all_gather", "ring", sends())


def to_each(kind: Kind, axis: Role, groups: Groups, size: Callable[[int, int], int]) -> Move:
    """`size(source, target)` bytes to each rank of the group."""
    sends = (Send(source, target, size(source, target)) for ranks in groups for source in ranks for target in ranks)
    return move(kind, axis, sends)


def reduce_scatter(groups: Groups, tokens: Sequence[int], size: int) -> Move:
    """To each rank its tokens of what the others have summed; `size` bytes a token."""
    return to_each("reduce_scatter", "ring", groups, lambda _, target: tokens[target] * size)


def steps(*these: Step) -> Steps:
    """Without empty moves, and without steps at which nothing happens."""
    filled = (Step(_filled(step.moves), step.pairs, _filled(step.leaving)) for step in these)
    return tuple(step for step in filled if any(step))


def _filled(moves: Iterable[Move]) -> tuple[Move, ...]:
    return tuple(move for move in moves if move.sends)


def beside(moves: Iterable[Move], following: Steps) -> Steps:
    """The moves under way during the first of some steps."""
    moves = _filled(moves)
    if not moves:
        return following
    first = following[0] if following else Step()
    return (first._replace(moves=(*moves, *first.moves)), *following[1:])


def placed(these: Steps, ranks: Sequence[int], total: int) -> Steps:
    """The same steps where rank r is rank ranks[r] of `total`."""

    def moved(moves: Sequence[Move]) -> tuple[Move, ...]:
        return tuple(Move(kind, axis, tuple(map(sent, sends))) for kind, axis, sends in moves)

    def sent(send: Send) -> Send:
        return Send(ranks[send.source], ranks[send.target], send.bytes)

    def of(step: Step) -> Step:
        pairs = [0] * total if step.pairs else []
        for rank, count in zip(ranks, step.pairs, strict=False):
            pairs[rank] = count
        return Step(moved(step.moves), tuple(pairs), moved(step.leaving))

    return tuple(of(step) for step in these)


def together(many: Sequence[Steps]) -> Steps:
    """Steps of disjoint groups of ranks side by side, the first with the first."""
    if len(many) == 1:
        return many[0]
    return tuple(_joined(abreast) for abreast in zip_longest(*many, fillvalue=Step()))


def _joined(abreast: Sequence[Step]) -> Step:
    moves, leaving = (_merged(many) for many in zip(*((step.moves, step.leaving) for step in abreast), strict=True))
    computing = [step.pairs for step in abreast if step.pairs]
    return Step(moves, tuple(map(sum, zip(*computing, strict=True))), leaving)


def _merged(abreast: Sequence[Sequence[Move]]) -> tuple[Move, ...]:
    """Moves of one kind, axis and turn become one."""
    sends = dict[tuple[Kind, Role, int], list[Send]]()
    for moves in abreast:
        turns = Counter[tuple[Kind, Role]]()
        for kind, axis, some in moves:
            sends.setdefault((kind, axis, turns[kind, axis]), []).extend(some)
            turns[kind, axis] += 1
    return tuple(Move(kind, axis, tuple(some)) for (kind, axis, _), some in sends.items())
