"""The arrangement of ranks in WallFacer (arXiv 2407.00611): teams, team groups and rings. No communication.

P ranks form P / C teams of C members, and R = P / C^2 consecutive teams form a team group; there are C groups. For
P = 8, C = 2 (R = 2), with the ranks of placement "collect_intra":

                      group 0             group 1
                  team 0   team 1     team 2   team 3
    member 0         0        2          4        6         the ring of member 0 in group 0 is ranks 0, 2
    member 1         1        3          5        7         the ring of member 1 in group 0 is ranks 1, 3
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import gcd, isqrt
from typing import Literal, get_args

from armillary.attention.mask import AttentionMask
from armillary.attention.mask.layouts import layout_of
from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.core import SequenceLayout
from armillary.core.spans import Spans
from armillary.core.validation import check_choice, integer

Placement = Literal["collect_intra", "p2p_intra"]


def fitting_teams(ranks: int) -> list[int]:
    """Returns each team size C whose square divides the number of ranks."""
    return [c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0]


@dataclass(frozen=True)
class Teams:
    """Teams of the ranks of one axis.

    Args:
        ranks: P.
        team: C, the members of a team (d_a in the paper).
        placement: "collect_intra" makes the members of a team neighbours on the axis, so that gathers stay within a
            node; "p2p_intra" makes the ranks of a ring neighbours.

    Raises:
        ValueError: C^2 does not divide P, or an unknown placement.
    """

    ranks: int
    team: int
    placement: Placement

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, get_args(Placement))
        object.__setattr__(self, "team", integer("team", self.team))
        if self.team < 1 or self.ranks % self.team**2:
            raise ValueError(
                f"team={self.team}: its square must divide the {self.ranks} ranks; "
                f"possible: {fitting_teams(self.ranks)}"
            )

    @property
    def ring_size(self) -> int:
        """R = P / C^2, the ranks of a ring and the teams of a group (the paper's team group size)."""
        return self.ranks // self.team**2

    def rank(self, team: int, member: int) -> int:
        """Returns the rank on the axis of a member (r_a in the paper) of a team (r_t)."""
        if self.placement == "collect_intra":
            return team * self.team + member
        group, index = divmod(team, self.ring_size)
        return (group * self.team + member) * self.ring_size + index

    def seat(self, rank: int) -> tuple[int, int]:
        """Returns the (team, member) of a rank."""
        if self.placement == "collect_intra":
            return divmod(rank, self.team)
        ring, index = divmod(rank, self.ring_size)
        group, member = divmod(ring, self.team)
        return group * self.ring_size + index, member

    def team_ranks(self, team: int) -> tuple[int, ...]:
        """Returns the ranks of a team, in member order."""
        return tuple(self.rank(team, member) for member in range(self.team))

    # -- algorithms 2 and 3 of the paper ------------------------------------------------------------------------------

    def key_target(self, team: int, member: int) -> int:
        """Returns the rank to which a member sends its team's keys (get_init_send, algorithm 2)."""
        return self.rank(member * self.ring_size + team // self.team, team % self.team)

    def key_source(self, team: int, member: int) -> tuple[int, int]:
        """Returns the (team, member) that sends its team's keys to this member: the inverse of `key_target`."""
        group, index = divmod(team, self.ring_size)
        return index * self.team + member, group

    def ring_of(self, group: int, member: int, rotating_side: RotatingSide) -> RingTopology:
        """Returns the ring of one member of each team of a group (algorithm 3). Its shards are teams (`by_teams`)."""
        teams = tuple(group * self.ring_size + index for index in range(self.ring_size))
        key_teams = tuple(self.key_source(team, member)[0] for team in teams)
        stationary_teams, rotating_teams = (teams, key_teams) if rotating_side == "keys" else (key_teams, teams)
        return RingTopology(
            tuple(self.rank(team, member) for team in teams), stationary_teams, rotating_teams, rotating_side
        )

    def rings(self, rotating_side: RotatingSide) -> list[RingTopology]:
        """Returns all C^2 rings."""
        return [self.ring_of(group, member, rotating_side) for group in range(self.team) for member in range(self.team)]

    # -- layouts ------------------------------------------------------------------------------------------------------

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        """Returns the layout over P ranks in which each team's tokens are a shard of layout `kind`.

        "balanced" distributes the tokens of a balanced layout over R shards to teams (`deal`).

        Raises:
            ValueError: an unknown kind, or fewer tokens than ranks.
        """
        if kind == "balanced":
            # Teams gather all of their queries and keys, so keeping documents uncut would save almost no bytes.
            teams = self.deal(layout_of(kind, length, self.ring_size, mask, balanced_by=None))
        else:
            teams = layout_of(kind, length, self.ranks // self.team, mask)
        return self.in_rank_order(teams.refine(self.team))

    def by_teams(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns a layout over P ranks as one over P / C teams."""
        teams = map(self.team_ranks, range(self.ranks // self.team))
        return SequenceLayout([[span for rank in ranks for span in layout.spans(rank)] for ranks in teams])

    def member_sizes(self, layout: SequenceLayout, team: int) -> tuple[int, ...]:
        """Returns the number of tokens of each member of a team."""
        return tuple(layout.sizes[rank] for rank in self.team_ranks(team))

    def in_rank_order(self, members: SequenceLayout) -> SequenceLayout:
        """Returns the layout over ranks from a layout over members: those of team 0, then of team 1, ..."""
        seats = map(self.seat, range(self.ranks))
        return SequenceLayout([members.spans(team * self.team + member) for team, member in seats])

    def deal(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns the layout over P / C teams in which C teams take the tokens of each of R shards in turn.

        Ranks are then as balanced as the R shards are, under any mask.

        Raises:
            ValueError: fewer tokens than ranks.
        """
        # Member a of team t computes the queries of team t against the keys of teams a, a + C, ...; if queries rotate,
        # the keys of these teams against the queries of its group. The C teams of a shard are in different groups and
        # have different t % C (`dealt_team`). So the keys of a shard are spread over all members evenly, within one
        # token, and its queries over all groups.
        if layout.length < self.ranks:
            raise ValueError(f"a sequence of {layout.length} tokens is shorter than its {self.ranks} shards")
        team_spans = dict[int, list[range]]()
        for shard in range(self.ring_size):
            for group, spans in enumerate(_deal_tokens(layout.spans(shard), self.team)):
                team_spans[self.dealt_team(shard, group)] = spans
        return SequenceLayout([team_spans[team] for team in range(self.ranks // self.team)])

    def dealt_team(self, shard: int, group: int) -> int:
        """Returns the team of a group that takes tokens of one of R shards. Over all groups, t % C takes each value."""
        # Group g starts at team g R. Modulo C, g R takes the C / d multiples of d = gcd(R, C), each of them d times, so
        # the teams of a shard are shifted by one more in each of these d rounds.
        divisor = gcd(self.ring_size, self.team)
        first = shard - shard % divisor
        return group * self.ring_size + first + (shard + group * divisor // self.team) % divisor


def _deal_tokens(spans: Spans, n: int) -> list[list[range]]:
    """Deals the tokens of a shard to `n` shards in turn: the first gets tokens 0, n, 2 n, ..."""
    starts = list(accumulate(map(len, spans), initial=0))
    return [[span[(turn - start) % n :: n] for span, start in zip(spans, starts, strict=False)] for turn in range(n)]
