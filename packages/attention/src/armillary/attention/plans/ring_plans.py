"""Plans of the methods on one sequence axis: `Local`, `AllGatherKV`, `Ring`, `TokenRing` and `WallFacer`.

The steps of rings are also those of rings between nodes (`node_ring_plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.ring import Backward, cheaper_side, check_backward
from armillary.attention.methods.wallfacer import Placement, Teams
from armillary.attention.plans.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Payload,
    Send,
    Step,
    Steps,
    all_gather,
    move,
    reduce_scatter,
    steps,
)
from armillary.attention.plans.method_plan import (
    SequencePlan,
    Sizes,
    kernel_backward,
    kernel_forward,
    rotate_keys_backward,
    rotate_keys_forward,
    rotate_queries_backward,
)
from armillary.attention.rings.topology import RingTopology, RotatingSide
from armillary.attention.tiling.grid import Grid
from armillary.core import SequenceLayout
from armillary.core.internal import Side

TokenSends = Callable[[RingTopology, Grid, int], Iterable[Send]]
"""Returns the sends of all ranks of a ring that start at a step. `Send.bytes` is the number of tokens here."""


# -- without a ring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalPlan(SequencePlan):
    """Plan of `Local`: one block, no communication."""

    takes_latents = True
    sends_keys = False

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        if work.layout.shards > 1:
            raise ValueError(f"the layout has {work.layout.shards} shards; local attention needs 1")
        pairs = work.grid.pairs(0, 0, work.batch) * len(work.key_heads)
        expanded = work.expanded(work.key_layout.length)
        attend = (Step(pairs=(pairs,), blocks=((0, 0),), expanded=(expanded,)),)
        return CommPlan(attend, attend)

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        return kernel_forward(x) + x.expansion

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return max(kernel_backward(x) + x.expansion, x.q + 2 * x.block_k + x.collapse)


@dataclass(frozen=True)
class AllGatherPlan(SequencePlan):
    """Plan of `AllGatherKV`."""

    takes_latents = True

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        ranks, tokens = range(work.layout.shards), work.key_layout.sizes
        gather = Step(tuple(all_gather([ranks], tokens, work.payload(name)) for name in ("k", "v")))
        scatter = Step(tuple(reduce_scatter([ranks], tokens, work.payload(name)) for name in ("dk", "dv")))
        heads = len(work.key_heads)
        pairs = tuple(heads * sum(work.grid.pairs(r, s, work.batch) for s in ranks) for r in ranks)
        # Latents are expanded shard by shard.
        visible_tokens = (sum(n for s, n in enumerate(tokens) if work.grid.pairs(r, s, work.batch)) for r in ranks)
        attend = Step(
            pairs=pairs, blocks=tuple((r, 0) for r in ranks), expanded=tuple(map(work.expanded, visible_tokens))
        )
        return CommPlan(steps(gather, attend), steps(gather, attend, scatter), key_shards=(tuple(ranks),))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of the second of two tiles: a causal square of own keys, then half of the queries against other keys."""
        if ranks == 1:
            return kernel_forward(x) + x.expansion
        all_keys = 2 * ranks * x.k  # k and v of all ranks
        # The float32 sum of out, lse, and the second tile's out and lse for half of the queries. Beside them either
        # the first tile's out, while it becomes float32, or the second's in float32 and a weight for each query in it.
        merge_bytes, block = x.w * x.out + x.lse, kernel_forward(x, 0.5)
        return all_keys + merge_bytes + block + max(x.out, (x.w * x.out + x.lse) / 2) + x.expansion

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of the second tile's kernel, or of the reduce-scatter of dk and dv."""
        if ranks == 1:
            return kernel_backward(x) + x.expansion
        all_keys = 2 * ranks * x.k  # k and v of all ranks
        all_sums = x.w * all_keys  # dk and dv of all ranks, in float32
        # The second tile: all k and v, dq of the first tile, and the kernel on half of the queries.
        kernel_bytes = all_keys + x.q + kernel_backward(x, queries=0.5, keys=ranks - 1)
        # The reduce-scatter: dq in float32, the received dk and dv of all ranks, and their sums for own keys.
        scatter_bytes = x.w * x.q + all_sums + 2 * x.w * x.k
        if x.expanded is not None:
            # Latents are expanded shard by shard. Beside the last shard's kernel are the sums of the others, and dq in
            # float32. Then the sums of all shards are joined.
            kernel_bytes = all_keys + x.expansion + x.w * x.q + kernel_backward(x, queries=0.5) - all_sums / ranks
            scatter_bytes += all_sums
        return all_sums + max(kernel_bytes, scatter_bytes)


# -- rings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RingPlan(SequencePlan):
    """Plan of `Ring`.

    Raises:
        ValueError: an unknown `backward`.
    """

    takes_latents = True
    backward: Backward = "auto"

    def __post_init__(self) -> None:
        check_backward(self.backward)

    @property
    def balanced_by(self) -> Side:
        return "both" if self.backward == "queries" else "queries"

    @property
    def rotates_latents(self) -> bool:
        return self.backward != "queries"

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        def rings(side: RotatingSide) -> list[RingTopology]:
            return [RingTopology.of_all(work.layout.shards, side)]

        return CommPlan(ring_forward_steps(work, rings("keys")), ring_backward_steps(work, self.backward, rings))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        return rotate_keys_forward(x, ranks)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return ring_backward_memory(x, ranks, self.backward)

    def published_bytes(self, work: AttentionShape) -> tuple[int, int]:
        """Returns (p2p, 0). arXiv 2407.00611 counts k and v in P steps, although they are sent in P - 1 of these."""
        return work.layout.length * (work.k + work.v) * work.e, 0


@dataclass(frozen=True)
class TokenRingPlan(SequencePlan):
    """Plan of `TokenRing`."""

    takes_latents = True
    sends_keys = False

    @property
    def balanced_by(self) -> Side:
        return "keys"

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        rings = [RingTopology.of_all(work.layout.shards, "queries")]
        forward = rotation_steps(work, rings, work.payload("q"), work.payload("out", "lse"), direct_reduce_sends)
        return CommPlan(forward, pass_queries_backward_steps(work, rings, direct_reduce_sends))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak at the second or third step, when the step's partial result is copied into the buffer to be sent."""
        if ranks == 1:
            return kernel_forward(x) + x.expansion
        # Results: this rank's own, the step's and its copy, and a buffer that receives one for half of the tokens.
        results = (1 + 1 + 1 + 0.5) * kernel_forward(x) + x.expansion
        # Queries in use and, except at the last step, queries that arrive.
        second = x.q * min(ranks - 1, 2)
        # Before the third step, the first returned result was merged into this rank's own one, in float32 from then on.
        third = x.q * min(ranks - 2, 2) + (x.w - 1) * x.out if ranks > 2 else 0
        return results + max(second, third)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return rotate_queries_backward(x, ranks, direct=True)


# -- teams -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WallFacerPlan(SequencePlan):
    """Plan of `WallFacer`, with the steps of its docstring: (1) gather, (2) place, (3) ring, (4) scatter.

    Raises:
        ValueError: an unknown `backward`.
    """

    takes_latents = True
    team: int
    placement: Placement = "collect_intra"
    backward: Backward = "auto"
    gather_keys: bool = True

    def __post_init__(self) -> None:
        check_backward(self.backward)

    def teams(self, ranks: int) -> Teams:
        return Teams(ranks, self.team, self.placement)

    @property
    def balanced_by(self) -> None:
        return None

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        return self.teams(ranks).layout(length, kind, mask, states)

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        teams = self.teams(work.layout.shards)
        ranks_of = [teams.team_ranks(team) for team in range(teams.ranks // teams.team_size)]
        sizes, key_sizes = work.layout.sizes, work.key_layout.sizes

        # Steps 1 and 4: all-gathers and reduce-scatters within teams.
        def gather(sizes: Sequence[int], *tensors: str) -> tuple[Move, ...]:
            return tuple(all_gather(ranks_of, sizes, work.payload(name)) for name in tensors)

        def scatter(sizes: Sequence[int], *tensors: str) -> tuple[Move, ...]:
            return tuple(reduce_scatter(ranks_of, sizes, work.payload(name)) for name in tensors)

        # Step 2: keys travel to the ranks of the ring.
        def key_sends(size: int) -> Iterator[Send]:
            for team, ranks in enumerate(ranks_of):
                for member, rank in enumerate(ranks):
                    target = teams.key_target(team, member)
                    if self.gather_keys:  # each member sends the keys of the whole team to one rank
                        yield Send(rank, target, sum(key_sizes[sender] for sender in ranks) * size)
                    else:  # each member sends its own keys to the targets of all members
                        yield from (Send(sender, target, key_sizes[sender] * size) for sender in ranks)

        kv, dkv = work.payload("k", "v"), work.payload("dk", "dv")
        placement = move("p2p", "ring", kv.tensors, key_sends(kv.size))
        returns = move(
            "p2p", "ring", dkv.tensors, (Send(target, source, size) for source, target, size in key_sends(dkv.size))
        )

        # Queries are gathered (1) while keys are gathered, which are placed (2) afterwards.
        def gather_and_place(query_moves: tuple[Move, ...]) -> tuple[Step, ...]:
            if not self.gather_keys:
                return (Step((*query_moves, placement)),)
            return Step((*query_moves, *gather(key_sizes, "k", "v"))), Step((placement,))

        # Step 3: within the ring a team is one shard.
        layout, key_layout = teams.by_teams(work.layout), teams.by_teams(work.key_layout)
        ring_work = replace(work, layout=layout, key_layout=key_layout)
        # In backward, dk and dv return (2, 1) while dq is scattered (4).
        key_scatter = scatter(key_sizes, "dk", "dv") if self.gather_keys else ()
        members = tuple(ranks_of) if teams.team_size > 1 else None
        return CommPlan(
            steps(
                *gather_and_place(gather(sizes, "q")),
                *ring_forward_steps(ring_work, teams.rings("keys")),
                Step(scatter(sizes, "out", "lse")),
            ),
            steps(
                *gather_and_place(gather(sizes, "q", "out", "dout", "lse")),
                *ring_backward_steps(ring_work, self.backward, teams.rings),
                Step((*scatter(sizes, "dq"), returns)),
                Step(key_scatter),
            ),
            query_shards=members,
            key_shards=members,
        )

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak in the ring of R = P / C^2 ranks, with the team's q, k and v, or in the merge of partial results."""
        team = self.team  # C
        if team == 1:
            return rotate_keys_forward(x, ranks)
        team_sizes, gather_bytes = x.times(team), team * (x.q + 2 * x.k)
        ring = rotate_keys_forward(team_sizes, ranks // team**2, onward=1)
        # Partial out and lse of the team's queries, sent and received, and a contiguous copy of lse; for own queries,
        # two outs in float32, and the lse and weights of the merge.
        merge_bytes = 2 * kernel_forward(team_sizes) + team_sizes.lse + 2 * x.w * x.out + 2 * x.lse
        return max(gather_bytes + ring, merge_bytes)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak in the ring, with all gathered tensors of the team, or in the reduce-scatter of float32 gradients."""
        team = self.team
        if team == 1:
            return ring_backward_memory(x, ranks, self.backward)
        team_sizes = x.times(team)
        gather_bytes = team_sizes.rotating + 2 * team_sizes.k
        ring = ring_backward_memory(team_sizes, ranks // team**2, self.backward, onward=1)
        # Gradients of the team's tokens, sent and received, in float32, and the sums of dk and dv for own keys.
        scatter_bytes = 2 * x.w * (team_sizes.q + 2 * team_sizes.k) + 2 * x.w * x.k
        return max(gather_bytes + ring, scatter_bytes)

    def published_bytes(self, work: AttentionShape) -> tuple[int, int]:
        """Returns (p2p, collective) bytes as arXiv 2407.00611 counts them."""
        # The team's k and v are sent in P / C^2 steps; q, k and v are gathered and out is scattered within the team.
        ranks, team = work.layout.shards, self.team
        queries, keys = (work.layout.length // ranks * n * work.e for n in (work.q + work.out, work.k + work.v))
        return ranks // team * keys, (team - 1) * (queries + keys)


# -- the steps of rings ------------------------------------------------------------------------------------------------


def ring_forward_steps(work: AttentionShape, rings: Sequence[RingTopology]) -> Steps:
    return rotation_steps(work, rings, work.payload("k", "v"))


def ring_backward_steps(
    work: AttentionShape, backward: Backward, rings: Callable[[RotatingSide], Sequence[RingTopology]]
) -> Steps:
    """Returns the steps of `Ring.backward` on all ranks; `rings` returns the rings for the side that rotates."""
    side = backward_side(work, backward)
    if side == "queries":
        return pass_queries_backward_steps(work, rings(side), ring_reduce_sends)
    return rotation_steps(work, rings(side), work.payload("k", "v"), work.payload("dk", "dv"), ring_reduce_sends)


def backward_side(work: AttentionShape, backward: Backward) -> RotatingSide:
    one_row = replace(work, batch=1)
    queries = (work.layout.length, len(work.key_heads), work.value_dim, work.head_dim)
    keys = (work.key_layout.length, one_row.k + one_row.v)
    return cheaper_side(backward, queries, keys, work.dtype, work.grid)


def pass_queries_backward_steps(
    work: AttentionShape, rings: Sequence[RingTopology], returned_tokens: TokenSends
) -> Steps:
    rotating_payload = work.payload("q", "out", "dout", "lse")
    return rotation_steps(work, rings, rotating_payload, work.payload("dq"), returned_tokens)


def rotation_steps(
    work: AttentionShape,
    rings: Sequence[RingTopology],
    rotating: Payload,
    returned: Payload | None = None,
    return_sends: TokenSends | None = None,
) -> Steps:
    """Returns the R steps of rings of R ranks each, which together are all ranks of the axis.

    Args:
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

    # At each step every rank computes a block with its rotating shard, and sends the shard on, except at the last.
    def step_of(step: int) -> Step:
        ranks = sum(len(ring.ranks) for ring in rings)
        pairs, blocks, expanded = [0] * ranks, [(0, 0)] * ranks, [0] * ranks
        for ring in rings:
            for index, rank in enumerate(ring.ranks):
                origin = ring.origin(index, step)
                blocks[rank] = ring.query_key_shards(index, origin)
                pairs[rank] = grid.pairs(*blocks[rank], work.batch) * heads
                if ring.rotating_side == "keys":  # expands the latents that a rank has, unless it sees none of them
                    expanded[rank] = work.expanded(ring.reach(grid)[origin].counts[step]) if pairs[rank] else 0
                elif step == 0:  # the keys stay, and are expanded once
                    expanded[rank] = work.expanded(work.key_layout.sizes[blocks[rank][1]])
        later_moves = ()
        if returned and return_sends and step > 0:  # at step 0 each rank computes with its own shard
            later_moves = (moves(return_sends, step, returned),)
        rotation = moves(rotation_sends, step, rotating)
        return Step((rotation,), tuple(pairs), later_moves, tuple(blocks), expanded=tuple(expanded))

    return steps(*map(step_of, range(len(rings[0].ranks))))


def rotation_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `Rotation.rotate`, in tokens."""
    reach = ring.reach(grid)
    for index, rank in enumerate(ring.ranks):
        # Each rank sends the tokens that later ranks need.
        yield Send(rank, ring.ahead(index, 1), reach[ring.origin(index, step)].counts[step + 1])


def ring_reduce_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `RingReduce`, in tokens."""
    reach = ring.reach(grid)
    for index, rank in enumerate(ring.ranks):
        origin = ring.origin(index, step)
        current_count, next_count = reach[origin].counts[step : step + 2]
        # Partial sums of tokens that later ranks need go to the next rank, finished sums to the owner.
        yield Send(rank, ring.ahead(index, 1), next_count)
        yield Send(rank, ring.ranks[origin], current_count - next_count)


def direct_reduce_sends(ring: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
    """Yields the sends of `DirectReduce`, in tokens."""
    for index, rank in enumerate(ring.ranks):
        origin = ring.origin(index, step)
        # Each rank sends its results for visible tokens to the owner.
        yield Send(rank, ring.ranks[origin], ring.visible_tokens(grid, index, origin).count)


# -- the memory of a ring ----------------------------------------------------------------------------------------------


def ring_backward_memory(x: Sizes, ranks: int, backward: Backward, onward: float = 0.5) -> float:
    """Peak of `Ring.backward` in a layout that is as even by keys as by queries, as zigzag is under a causal mask."""
    if rotates_queries(x, backward):
        return rotate_queries_backward(x, ranks, direct=False)
    return rotate_keys_backward(x, ranks, onward)


def rotates_queries(x: Sizes, backward: Backward) -> bool:
    # `cheaper_side` for the sizes of a rank, in an even layout.
    query_bytes, key_bytes = x.rotating + x.w * x.q, 2 * x.k * (1 + x.w)
    return backward == "queries" or (backward == "auto" and query_bytes < key_bytes)
