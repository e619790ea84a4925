"""Plan of `WallFacer`, with the four steps of its docstring: gather, place, ring, scatter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.ring import Backward, check_backward
from armillary.attention.methods.teams import Placement, Teams
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Send,
    Step,
    all_gather,
    move,
    reduce_scatter,
    steps,
)
from armillary.attention.planning.method_plan import SequencePlan, Sizes, kernel_forward, rotate_keys_forward
from armillary.attention.planning.ring import ring_backward_memory, ring_backward_steps, ring_forward_steps
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class WallFacerPlan(SequencePlan):
    """Plan of `WallFacer`, whose arguments are the fields.

    Raises:
        ValueError: an unknown `backward`.
    """

    team: int
    placement: Placement = "collect_intra"
    backward: Backward = "auto"
    gather_keys: bool = True

    def __post_init__(self) -> None:
        check_backward(self.backward)

    def teams(self, ranks: int) -> Teams:
        """Returns the teams. Raises ValueError if `team`^2 does not divide the ranks, or for an unknown placement."""
        return Teams(ranks, self.team, self.placement)

    @property
    def balanced_by(self) -> None:
        return None

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None
    ) -> SequenceLayout:
        return self.teams(ranks).layout(length, kind, mask)

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
        def start(query_moves: tuple[Move, ...]) -> tuple[Step, ...]:
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
                *start(gather(sizes, "q")),
                *ring_forward_steps(ring_work, teams.rings("keys")),
                Step(scatter(sizes, "out", "lse")),
            ),
            steps(
                *start(gather(sizes, "q", "out", "dout", "lse")),
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
        merge_bytes = 2 * kernel_forward(team_sizes) + team_sizes.lse + 2 * x.w * x.q + 2 * x.lse
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
        """Returns (p2p, collective) bytes as arXiv 2407.00611 counts them.

        The team's k and v are sent in P / C^2 steps; q, k and v are gathered and out is scattered within the team.
        """
        ranks, team = work.layout.shards, self.team
        queries, keys = (work.layout.length // ranks * n * work.e for n in (work.q + work.out, work.k + work.v))
        return ranks // team * keys, (team - 1) * (queries + keys)
