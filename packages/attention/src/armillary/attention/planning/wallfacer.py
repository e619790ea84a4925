"""Plan of `WallFacer`, with the four steps of its docstring: gather, place, ring, scatter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.ring import Backward, check_backward
from armillary.attention.methods.teams import Placement, Teams
from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Send,
    Step,
    Steps,
    all_gather,
    move,
    reduce_scatter,
    steps,
)
from armillary.attention.planning.memory import Sizes, kernel_forward, rotate_keys_forward
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
        team_steps = TeamSteps(teams, work, self.gather_keys)
        # Within the ring a team is one shard.
        layout, key_layout = (teams.by_teams(x) for x in (work.layout, work.key_layout))
        ring_work = replace(work, layout=layout, key_layout=key_layout)
        gather, scatter = team_steps.gather, team_steps.scatter
        members = tuple(team_steps.team_ranks) if teams.team_size > 1 else None
        return CommPlan(
            # Queries are gathered (1) while keys are gathered and placed (1, 2); then the ring (3) and the scatter (4).
            steps(
                *team_steps.place_keys(gather("q")),
                *ring_forward_steps(ring_work, teams.rings("keys")),
                Step(scatter("out", "lse")),
            ),
            # The same, with dk and dv on the way back (2, 1) while dq is scattered (4).
            steps(
                *team_steps.place_keys(gather("q", "out", "dout", "lse")),
                *ring_backward_steps(ring_work, self.backward, teams.rings),
                *team_steps.return_key_grads(scatter("dq")),
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


@dataclass(frozen=True)
class TeamSteps:
    """The steps of WallFacer before and after the ring, on all ranks."""

    teams: Teams
    work: AttentionShape
    gather_keys: bool

    @property
    def team_ranks(self) -> list[tuple[int, ...]]:
        """The ranks of each team, in member order."""
        return [self.teams.team_ranks(team) for team in range(self.teams.ranks // self.teams.team_size)]

    def gather(self, *tensors: str) -> tuple[Move, ...]:
        """Returns step 1 for tensors of queries: all-gathers within teams."""
        sizes = self.work.layout.sizes
        return tuple(all_gather(self.team_ranks, sizes, self.work.payload(name)) for name in tensors)

    def scatter(self, *tensors: str) -> tuple[Move, ...]:
        """Returns step 4 for tensors of queries: reduce-scatters within teams."""
        sizes = self.work.layout.sizes
        return tuple(reduce_scatter(self.team_ranks, sizes, self.work.payload(name)) for name in tensors)

    def place_keys(self, query_moves: tuple[Move, ...]) -> Steps:
        """Returns steps 1 and 2 for keys. `query_moves` are in flight during the first of them."""
        work, tokens = self.work, self.work.key_layout.sizes
        payload = work.payload("k", "v")
        placement = move("p2p", "ring", payload.tensors, self._key_sends(payload.size))
        if not self.gather_keys:
            return steps(Step((*query_moves, placement)))
        gathers = (all_gather(self.team_ranks, tokens, work.payload(name)) for name in payload.tensors)
        return steps(Step((*query_moves, *gathers)), Step((placement,)))

    def return_key_grads(self, query_moves: tuple[Move, ...]) -> Steps:
        """Returns steps 2 and 1 backwards, for dk and dv. `query_moves` are in flight during the first of them."""
        work, tokens = self.work, self.work.key_layout.sizes
        payload = work.payload("dk", "dv")
        sends = (Send(target, source, size) for source, target, size in self._key_sends(payload.size))
        scatters = (reduce_scatter(self.team_ranks, tokens, work.payload(name)) for name in payload.tensors)
        returns = move("p2p", "ring", payload.tensors, sends)
        return steps(Step((*query_moves, returns)), Step(tuple(scatters) if self.gather_keys else ()))

    def _key_sends(self, size: int) -> Iterator[Send]:
        """Yields the sends of keys in step 2, of `size` bytes a token."""
        tokens = self.work.key_layout.sizes
        for team, ranks in enumerate(self.team_ranks):
            for member, rank in enumerate(ranks):
                target = self.teams.key_target(team, member)
                if self.gather_keys:  # each member sends the keys of the whole team to one rank
                    yield Send(rank, target, sum(tokens[sender] for sender in ranks) * size)
                else:  # each member sends its own keys to the targets of all members
                    yield from (Send(sender, target, tokens[sender] * size) for sender in ranks)
