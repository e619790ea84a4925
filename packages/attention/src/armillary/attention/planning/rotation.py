"""Communication plans of rings: the sends of `Rotation.rotate` and of the reductions in `rotation/returns.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from armillary.attention.planning.comm_plan import AttentionShape, Move, Payload, Step, Steps, move, steps
from armillary.attention.planning.send import Send
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid

TokenSends = Callable[[RingTopology, Grid, int], Iterable[Send]]
"""Returns the sends of all ranks of a ring that start at a step. `Send.bytes` is the number of tokens here."""


def rotation_steps(
    work: AttentionShape,
    rings: Sequence[RingTopology],
    rotating: Payload,
    returned: Payload | None = None,
    return_sends: TokenSends | None = None,
) -> Steps:
    """Returns the R steps of rings. At each step every rank computes a block with its rotating shard, and sends the
    shard on, except at the last step.

    Args:
        work: the call; the rings' shards are those of its layouts.
        rings: rings of R ranks each, which together are all ranks of the axis. Each turns in its cheaper direction.
        rotating: tensors of the rotating shard.
        returned: results that return to the shard's owner after the block is computed; None if there are none.
        return_sends: the way they return, `ring_reduce_sends` or `direct_reduce_sends`; needed with `returned`.
    """
    grid, heads = work.grid, len(work.key_heads)
    # `Rotation.of` chooses the direction by the same rule.
    rings = [ring.cheaper_direction(grid) for ring in rings]

    def moves(token_sends: TokenSends, step: int, payload: Payload) -> Move:
        counts = (send for ring in rings for send in token_sends(ring, grid, step))
        size = payload.size
        sends = (Send(source, target, tokens * size) for source, target, tokens in counts)
        return move("p2p", "ring", payload.tensors, sends)

    def step_of(step: int) -> Step:
        ranks = sum(len(ring.ranks) for ring in rings)
        pairs, blocks = [0] * ranks, [(0, 0)] * ranks
        for ring in rings:
            for index, rank in enumerate(ring.ranks):
                blocks[rank] = ring.query_key_shards(index, ring.origin(index, step))
                pairs[rank] = grid.pairs(*blocks[rank], work.batch) * heads
        later_moves = ()
        if returned and return_sends and step > 0:  # at step 0 each rank computes with its own shard
            later_moves = (moves(return_sends, step, returned),)
        return Step((moves(rotation_sends, step, rotating),), tuple(pairs), later_moves, tuple(blocks))

    return steps(*map(step_of, range(len(rings[0].ranks))))


def rotation_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `Rotation.rotate`, in tokens: each rank sends the tokens that later ranks need."""
    reach = ring.reach(grid)
    for index, rank in enumerate(ring.ranks):
        yield Send(rank, ring.ahead(index, 1), reach[ring.origin(index, step)].counts[step + 1])


def ring_reduce_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `RingReduce`, in tokens.

    Each rank sends partial sums of tokens that later ranks need to the next rank, and finished sums to the owner.
    """
    reach = ring.reach(grid)
    for index, rank in enumerate(ring.ranks):
        origin = ring.origin(index, step)
        current_count, next_count = reach[origin].counts[step : step + 2]
        yield Send(rank, ring.ahead(index, 1), next_count)
        yield Send(rank, ring.ranks[origin], current_count - next_count)


def direct_reduce_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `DirectReduce`, in tokens: each rank sends its results for visible tokens to the owner."""
    for index, rank in enumerate(ring.ranks):
        origin = ring.origin(index, step)
        yield Send(rank, ring.ranks[origin], ring.visible_tokens(grid, index, origin).count)
