"""Communication plans: the bytes that all ranks send and the pairs that they compute, step by step.

A plan is computed from an `AttentionShape`, without running the method. Tests compare it with the `CommLedger` of every
rank, to the byte, and the planner predicts time from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

import torch

from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.grid import Grid
from armillary.core import SequenceLayout, accumulation_dtype
from armillary.core.internal import KINDS, PHASES, check_choice

Kind = Literal["p2p", "all_to_all", "all_gather", "reduce_scatter"]
Role = Literal["ring", "ulysses", "nodes", "devices"]
"""Axis of a method: "ring" is the sequence axis, whichever method works on it; "ulysses" is the head axis; "nodes" and
"devices" are the two sequence axes of a ring between nodes."""


class Payload(NamedTuple):
    """Tensors that are sent together, such as ("k", "v"); `size`: bytes of one token, or of one token and head."""

    tensors: tuple[str, ...]
    size: int


class Send(NamedTuple):
    """A message of `bytes` bytes from rank `source` to rank `target`."""

    source: int
    target: int
    bytes: int


class Move(NamedTuple):
    """One exchange or collective on all ranks that take part.

    With R ranks on the sequence axis and U on the head axis, rank (r, u) has number r * U + u.

    Args:
        kind, axis: the ledger counts the bytes under this kind and axis.
        tensors: names of the tensors that are sent.
        sends: the sends of at least 1 byte. In an all-gather over C ranks, each rank sends the tokens of C - 1 ranks to
            its neighbour, as one `Send`. An all-to-all, and our reduce-scatter, is one send to each peer.
    """

    kind: Kind
    axis: Role
    tensors: tuple[str, ...]
    sends: tuple[Send, ...]


Block = tuple[int, int]
"""A query shard and a key shard. A rank computes attention between them during a step."""


class Step(NamedTuple):
    """Moves and computation that overlap.

    Args:
        moves: moves in flight during the step.
        pairs: for each rank, the number of visible (query, key) pairs that it computes during the step, summed over its
            query heads and the rows of the batch. Empty if no rank computes.
        later_moves: moves of the step's results, which start once its pairs are computed. They overlap with the
            computation of the next step. A next step that computes nothing starts after they have ended.
        blocks: for each rank, the block whose pairs it computes; None on a rank without a block.
        heads: for each rank of the head axis, the query heads that it computes. Empty: all heads on every rank.
        expanded: for each rank, the keys that it expands from latents during the step, summed over its key/value heads
            and the rows of the batch; 0 if finished keys are sent. Backward also computes gradients of as many.
    """

    moves: tuple[Move, ...] = ()
    pairs: tuple[int, ...] = ()
    later_moves: tuple[Move, ...] = ()
    blocks: tuple[Block | None, ...] = ()
    heads: tuple[Sequence[int], ...] = ()
    expanded: tuple[int, ...] = ()


Steps = tuple[Step, ...]


JoinedShards = tuple[tuple[int, ...], ...]
"""Groups of shards of the sequence axis. A method that gathers shards (WallFacer, all-gather) computes with each group
as one shard, and the blocks of its plan number the groups."""


@dataclass(frozen=True)
class CommPlan:
    """The steps of `forward` and `backward` of one attention call.

    One all-to-all is not in the plan: on a head axis, a call that returns lse or has sinks also sends lse [B, T, H],
    except UPipe on q, k and v, whose plan has it.

    Args:
        query_shards, key_shards: the groups of shards that blocks number; None: blocks number the shards themselves.
    """

    forward: Steps
    backward: Steps
    query_shards: JoinedShards | None = None
    key_shards: JoinedShards | None = None

    def bytes(self, rank: int, kind: Kind | None = None, phase: str | None = None, axis: Role | None = None) -> int:
        """Returns the bytes that a ledger counts on `rank`.

        Args:
            kind, phase, axis: count only bytes of this kind, phase ("forward" or "backward") and axis; None: of any.

        Raises:
            ValueError: an unknown kind, phase or axis.
        """
        for name, value, choices in (("kind", kind, KINDS), ("phase", phase, PHASES), ("axis", axis, get_args(Role))):
            check_choice(name, choices[0] if value is None else value, choices)
        filters, sent_bytes = (kind, phase, axis), self._bytes_sent.get(rank, {})
        return sum(
            size
            for labels, size in sent_bytes.items()
            if all(value in (None, label) for value, label in zip(filters, labels, strict=True))
        )

    @cached_property
    def _bytes_sent(self) -> dict[int, Counter[tuple[str, str, str]]]:
        """Bytes of each rank by kind, phase and axis."""
        sent_bytes = defaultdict[int, Counter[tuple[str, str, str]]](Counter)
        for phase, phase_steps in (("forward", self.forward), ("backward", self.backward)):
            moves = Counter(move for step in phase_steps for move in (*step.moves, *step.later_moves))
            for step_move, times in moves.items():  # the stages of UPipe repeat their moves
                for source, _, size in step_move.sends:
                    sent_bytes[source][step_move.kind, phase, step_move.axis] += times * size
        return sent_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The properties of an attention call that determine the bytes and pairs of its plan. Hashable.

    Args:
        layout, key_layout: layouts of queries and of keys over the P shards of the sequence axis.
        key_heads: for each query head, its key/value head, both as indices into the heads of the call.
        kv_heads: K.
        head_dim, value_dim: D and Dv.
        projected: True if the call projects q, k and v from hidden states, as in models. If False, the call gets
            finished q, k and v, and UPipe sends lse too.
        latent: (Dr, L) if rotary keys and latents are sent instead of k and v (`Method.sends_latents`).

    Raises:
        ValueError: layouts with different numbers of shards.
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
    latent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.layout.shards != self.key_layout.shards:
            raise ValueError(
                f"queries have {self.layout.shards} shards and keys {self.key_layout.shards}; the numbers must be equal"
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
        latent: tuple[int, int] | None = None,
    ) -> AttentionShape:
        """Returns the shape of a call with H query heads that share K key/value heads evenly.

        By default `key_layout` is `layout` (self-attention) and `value_dim` is `head_dim`.

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
            latent=latent,
        )

    def expanded(self, tokens: int) -> int:
        """Returns the keys, over all heads and rows, that expand from the latents of `tokens` tokens; 0 without."""
        return 0 if self.latent is None else tokens * self.batch * self.kv_heads

    @property
    def grid(self) -> Grid:
        """Visible pairs of each (query shard, key shard)."""
        return planned_grid(self.layout, self.key_layout, self.mask)

    # -- elements of one token, over all rows of the batch -----------------------------------------------------------

    @property
    def q(self) -> int:
        """Elements of q for one token: B H D."""
        return self.lse * self.head_dim

    @property
    def out(self) -> int:
        """Elements of out for one token: B H Dv."""
        return self.lse * self.value_dim

    @property
    def lse(self) -> int:
        """Elements of lse for one token: B H."""
        return self.batch * len(self.key_heads)

    @property
    def k(self) -> int:
        """Elements of k for one token: B K D, or B Dr of a rotary key."""
        return self.batch * (self.kv_heads * self.head_dim if self.latent is None else self.latent[0])

    @property
    def v(self) -> int:
        """Elements of v for one token: B K Dv, or B L of a latent."""
        return self.batch * (self.kv_heads * self.value_dim if self.latent is None else self.latent[1])

    def payload(self, *tensors: str) -> Payload:
        """Returns the payload of tensors such as "k" and "v" on the sequence axis."""
        # lse and gradients are sent in the accumulation dtype, the others in the inputs' dtype.
        input_elements = {"q": self.q, "out": self.out, "dout": self.out, "k": self.k, "v": self.v}
        accumulated_elements = {"lse": self.lse, "dq": self.q, "dk": self.k, "dv": self.v}
        token_bytes = {name: count * self.e for name, count in input_elements.items()}
        token_bytes |= {name: count * self.a for name, count in accumulated_elements.items()}
        return Payload(tensors, sum(token_bytes[name] for name in tensors))

    # -- bytes of an element -----------------------------------------------------------------------------------------

    @property
    def e(self) -> int:
        """Bytes of an element of the inputs."""
        return self.dtype.itemsize

    @property
    def a(self) -> int:
        """Bytes of an element of lse and of unfinished gradient sums."""
        return accumulation_dtype(self.dtype).itemsize


# A ring between nodes has a grid for each pair of nodes, which all plans over the same shards share: forward and
# backward, and every method on the head axis. `grid_of` caches fewer, for the calls of a run.
planned_grid = lru_cache(maxsize=2048)(Grid)


Groups = Iterable[Sequence[int]]
"""Groups of ranks. Each group runs a collective of its own, at the same time as the other groups."""


def move(kind: Kind, axis: Role, tensors: tuple[str, ...], sends: Iterable[Send]) -> Move:
    """Returns a move of these sends. Drops sends of 0 bytes and sends from a rank to itself."""
    return Move(kind, axis, tensors, tuple(send for send in sends if send.bytes and send.source != send.target))


def all_gather(groups: Groups, tokens: Sequence[int], payload: Payload) -> Move:
    """Returns an all-gather in each group. Each rank's tokens are padded to the largest count in its group."""

    # An all-gather is a ring of C ranks: in each of C - 1 steps, each rank passes one rank's tokens to its neighbour.
    def sends() -> Iterator[Send]:
        for group in groups:
            padded_bytes = max(tokens[rank] for rank in group) * (len(group) - 1) * payload.size
            yield from (Send(rank, group[(i + 1) % len(group)], padded_bytes) for i, rank in enumerate(group))

    return move("all_gather", "ring", payload.tensors, sends())


def send_to_each(kind: Kind, axis: Role, groups: Groups, payload: Payload, count: Callable[[int, int], int]) -> Move:
    """Returns a move in which each rank sends `count(source, target)` tokens to each other rank of its group."""
    sends = (
        Send(source, target, count(source, target) * payload.size)
        for ranks in groups
        for source in ranks
        for target in ranks
    )
    return move(kind, axis, payload.tensors, sends)


def reduce_scatter(groups: Groups, tokens: Sequence[int], payload: Payload) -> Move:
    """Returns a reduce-scatter in each group: to each other rank, a rank sends partial sums of that rank's tokens."""
    return send_to_each("reduce_scatter", "ring", groups, payload, lambda _, target: tokens[target])


def steps(*all_steps: Step) -> Steps:
    """Returns the given steps. Drops moves without sends, and steps without moves and computation."""
    filled_steps = (
        step._replace(moves=_nonempty(step.moves), later_moves=_nonempty(step.later_moves)) for step in all_steps
    )
    return tuple(step for step in filled_steps if any(step))


def _nonempty(moves: Iterable[Move]) -> tuple[Move, ...]:
    return tuple(move for move in moves if move.sends)


def overlap(moves: Iterable[Move], next_steps: Steps) -> Steps:
    moves = _nonempty(moves)
    if not moves:  # without moves, an empty plan must stay empty
        return next_steps
    first = next_steps[0] if next_steps else Step()
    return (first._replace(moves=(*moves, *first.moves)), *next_steps[1:])


def side_by_side(groups: Sequence[tuple[Steps, Sequence[int]]], total: int) -> Steps:
    """Merges the steps of disjoint groups of ranks that run at the same time.

    Args:
        groups: (steps, ranks) of each group. Its rank r is rank `ranks[r]` of the result, of `total` ranks.
    """
    ranks_of = [list(ranks) for _, ranks in groups]

    def join_moves(group_moves: Iterable[Sequence[Move]]) -> tuple[Move, ...]:
        # Joins moves of the same kind, axis and tensors: the first ones of all groups, then the second ones, and so on.
        sends = dict[tuple[Kind, Role, tuple[str, ...], int], list[Send]]()
        for ranks, moves in zip(ranks_of, group_moves, strict=True):
            counts = Counter[tuple[Kind, Role, tuple[str, ...]]]()
            for kind, axis, tensors, move_sends in moves:
                label = (kind, axis, tensors)
                joined_sends = sends.setdefault((*label, counts[label]), [])
                joined_sends += [Send(ranks[source], ranks[target], size) for source, target, size in move_sends]
                counts[label] += 1
        return tuple(Move(*label[:3], tuple(joined_sends)) for label, joined_sends in sends.items())

    def join(same_time: Sequence[Step]) -> Step:
        # A rank that computes nothing has 0 pairs and the block None.
        pairs: list[int] = [0] * total if any(step.pairs for step in same_time) else []
        expanded: list[int] = [0] * total if any(step.expanded for step in same_time) else []
        blocks: list[Block | None] = [None] * total if any(step.blocks for step in same_time) else []
        for ranks, step in zip(ranks_of, same_time, strict=True):
            for rank, count in zip(ranks, step.pairs, strict=False):  # a step without computation has no pairs
                pairs[rank] = count
            for rank, count in zip(ranks, step.expanded, strict=False):
                expanded[rank] = count
            for rank, block in zip(ranks, step.blocks, strict=False):
                blocks[rank] = block
        moves = join_moves(step.moves for step in same_time)
        later_moves = join_moves(step.later_moves for step in same_time)
        return Step(moves, tuple(pairs), later_moves, tuple(blocks), expanded=tuple(expanded))

    return tuple(map(join, zip_longest(*(group_steps for group_steps, _ in groups), fillvalue=Step())))
