"""The steps of a ring: the bytes and pairs of `Rotation.rotate` and of the reductions of `rotation/returns.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from armillary.attention.planning.comm_plan import AttentionShape, Move, Payload, Step, Steps, move, steps
from armillary.attention.planning.send import Send
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid

ReturnedTokens = Callable[[RingTopology, Grid, int], Iterable[Send]]
"""Returns the sends of all ranks of a ring, in tokens, that a reduction starts after a step above 0."""


def rotation_steps(
    work: AttentionShape,
    rings: Sequence[RingTopology],
    rotating: Payload,
    returned: Payload | None = None,
    returned_tokens: ReturnedTokens | None = None,
) -> Steps:
    """Returns R steps in which shards are sent on while a block is computed, and its results return afterwards.

    Args:
        work: has the shards that the rings name.
        rings: rings of R ranks, which together have all ranks of the axis. Each sends in its cheaper direction.
        rotating: tensors of the shard that is sent on.
        returned: results that return to the shard's owner; None: nothing returns.
        returned_tokens: `ring_reduce_tokens` or `direct_reduce_tokens`, if something returns.
    """
    grid, heads = work.grid, len(work.key_heads)
    # The method turns its rings by the same rule, from the same grid.
    rings = [ring.cheaper_direction(grid) for ring in rings]

    def moves(token_sends: ReturnedTokens, step: int, payload: Payload) -> Move:
        counts = (send for ring in rings for send in token_sends(ring, grid, step))
        size = payload.size
        sends = (Send(source, target, tokens * size) for source, target, tokens in counts)
        return move("p2p", "ring", payload.tensors, sends)

    def step_of(step: int) -> Step:
        ranks = sum(len(ring.ranks) for ring in rings)
        pairs, blocks = [0] * ranks, [(0, 0)] * ranks
        for ring in rings:
            for place, rank in enumerate(ring.ranks):
                blocks[rank] = ring.query_key_shards(place, ring.origin(place, step))
                pairs[rank] = grid.pairs(*blocks[rank], work.batch) * heads
        later_moves = ()
        if returned and returned_tokens and step > 0:  # at step 0 each rank has its own shard
            later_moves = (moves(returned_tokens, step, returned),)
        return Step((moves(hop_tokens, step, rotating),), tuple(pairs), later_moves, tuple(blocks))

    return steps(*map(step_of, range(len(rings[0].ranks))))


def hop_tokens(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `Rotation.rotate` at a step, in tokens."""
    reach = ring.reach(grid)
    for place, rank in enumerate(ring.ranks):
        yield Send(rank, ring.ahead(place, 1), reach[ring.origin(place, step)].counts[step + 1])


def ring_reduce_tokens(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `RingReduce` for the shards of a step: sums to the next rank, and finished ones home."""
    reach = ring.reach(grid)
    for place, rank in enumerate(ring.ranks):
        origin = ring.origin(place, step)
        current_count, next_count = reach[origin].counts[step : step + 2]
        yield Send(rank, ring.ahead(place, 1), next_count)
        yield Send(rank, ring.ranks[origin], current_count - next_count)


def direct_reduce_tokens(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `DirectReduce` for the shards of a step: results of the tokens that a rank sees, home."""
    for place, rank in enumerate(ring.ranks):
        origin = ring.origin(place, step)
        yield Send(rank, ring.ranks[origin], ring.visible_tokens(grid, place, origin).count)
