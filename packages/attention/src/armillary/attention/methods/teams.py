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

from armillary.attention.mask import AttentionMask, layout_of
from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.core import SequenceLayout
from armillary.core.parts import Spans, check_choice, integer

Placement = Literal["collect_intra", "p2p_intra"]


def fitting_teams(ranks: int) -> list[int]:
    """Returns each team size C whose square divides the number of ranks."""
    return [c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0]


@dataclass(frozen=True)
class Teams:
    """Teams of the ranks of one axis.

    Args:
        ranks: P.
        team_size: C, the number of members of a team (d_a in the paper).
        placement: "collect_intra" makes the members of a team neighbours on the axis, so that the collectives of a team
            stay within a node; "p2p_intra" makes the ranks of a ring neighbours, so that its sends do.

    Raises:
        ValueError: a team size that is not an integer of at least 1, or whose square does not divide P; an unknown
            placement.
    """

    ranks: int
    team_size: int
    placement: Placement

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, get_args(Placement))
        object.__setattr__(self, "team_size", integer("team", self.team_size))
        if self.team_size < 1 or self.ranks % self.team_size**2:
            raise ValueError(
                f"team={self.team_size}: its square must divide the {self.ranks} ranks; "
                f"possible: {fitting_teams(self.ranks)}"
            )

    @property
    def ring_size(self) -> int:
        """R = P / C^2: the number of ranks of a ring, and of teams of a group (the paper's team group size)."""
        return self.ranks // self.team_size**2

    def rank(self, team: int, member: int) -> int:
        """Returns the rank on the axis of member `member` (r_a in the paper) of team `team` (r_t)."""
        if self.placement == "collect_intra":
            return team * self.team_size + member
        group, index = divmod(team, self.ring_size)
        return (group * self.team_size + member) * self.ring_size + index

    def team_and_member(self, rank: int) -> tuple[int, int]:
        """Returns (team, member) of a rank: the inverse of `rank`."""
        if self.placement == "collect_intra":
            return divmod(rank, self.team_size)
        # Rings are consecutive runs of R ranks: first the rings of group 0, by member, then those of group 1, ...
        ring, index = divmod(rank, self.ring_size)
        group, member = divmod(ring, self.team_size)
        return group * self.ring_size + index, member

    def team_ranks(self, team: int) -> tuple[int, ...]:
        """Returns the ranks of a team, in member order."""
        return tuple(self.rank(team, member) for member in range(self.team_size))

    # -- algorithms 2 and 3 of the paper ------------------------------------------------------------------------------

    def key_target(self, team: int, member: int) -> int:
        """Returns the rank to which a member sends its team's keys before the ring (get_init_send, algorithm 2).

        Member a of team t sends to member t % C of team a R + t // C, which is in group a. So the C members send the
        keys to a different group each, and the ranks of a ring receive the keys of different teams.
        """
        return self.rank(member * self.ring_size + team // self.team_size, team % self.team_size)

    def key_source(self, team: int, member: int) -> tuple[int, int]:
        """Returns the (team, member) from which a member receives keys before the ring: the inverse of `key_target`."""
        group, index = divmod(team, self.ring_size)
        return index * self.team_size + member, group

    def ring_of(self, group: int, member: int, rotating_side: RotatingSide) -> RingTopology:
        """Returns the ring of the same member of each team of a group (algorithm 3). A shard is a team (`by_teams`)."""
        teams = tuple(group * self.ring_size + index for index in range(self.ring_size))
        key_teams = tuple(self.key_source(team, member)[0] for team in teams)
        stationary_teams, rotating_teams = (teams, key_teams) if rotating_side == "keys" else (key_teams, teams)
        return RingTopology(
            tuple(self.rank(team, member) for team in teams), stationary_teams, rotating_teams, rotating_side
        )

    def rings(self, rotating_side: RotatingSide) -> list[RingTopology]:
        """Returns all C^2 rings: one for each member of each of the C groups."""
        members = range(self.team_size)
        return [self.ring_of(group, member, rotating_side) for group in range(self.team_size) for member in members]

    # -- layouts ------------------------------------------------------------------------------------------------------

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        """Returns the layout over P ranks in which the tokens of each team together are a shard of layout `kind`.

        For "balanced", `deal` divides each of the R shards of a balanced layout over C teams.

        Raises:
            ValueError: an unknown kind, or fewer tokens than ranks.
        """
        if kind == "balanced":
            # Balanced by pairs alone (`balanced_by=None`): teams gather all their queries and keys anyway, so that
            # keeping documents uncut would save almost no bytes.
            teams = self.deal(layout_of(kind, length, self.ring_size, mask, balanced_by=None))
        else:
            teams = layout_of(kind, length, self.ranks // self.team_size, mask)
        return self.in_rank_order(teams.refine(self.team_size))

    def by_teams(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns the layout over P / C teams: shard t has the tokens of all members of team t, in member order."""
        teams = map(self.team_ranks, range(self.ranks // self.team_size))
        return SequenceLayout([[span for rank in ranks for span in layout.spans(rank)] for ranks in teams])

    def member_sizes(self, layout: SequenceLayout, team: int) -> tuple[int, ...]:
        """Returns the number of tokens of each member of a team."""
        return tuple(layout.sizes[rank] for rank in self.team_ranks(team))

    def in_rank_order(self, members: SequenceLayout) -> SequenceLayout:
        """Returns the layout over ranks.

        Args:
            members: layout with one shard per rank, ordered by team and then by member.
        """
        team_members = map(self.team_and_member, range(self.ranks))
        return SequenceLayout([members.spans(team * self.team_size + member) for team, member in team_members])

    def deal(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns a layout over P / C teams: the tokens of each shard are dealt, one by one, to C teams.

        Ranks are then as balanced as the R shards are, under any mask.

        Args:
            layout: a layout over R shards.

        Raises:
            ValueError: fewer tokens than ranks.
        """
        # If keys rotate, member a of team t computes the queries of team t against the keys of teams a, a + C, a + 2 C,
        # ... If queries rotate, it computes the queries of all teams of its group against one of these teams' keys.
        # The C teams that share a shard are in different groups and have different t % C (`dealt_team`). So each member
        # number gets an equal part of the shard's keys, within one token, and each group an equal part of its queries.
        if layout.length < self.ranks:
            raise ValueError(f"a sequence of {layout.length} tokens is shorter than its {self.ranks} shards")
        team_spans = dict[int, list[range]]()
        for shard in range(self.ring_size):
            for group, spans in enumerate(_deal_tokens(layout.spans(shard), self.team_size)):
                team_spans[self.dealt_team(shard, group)] = spans
        return SequenceLayout([team_spans[team] for team in range(self.ranks // self.team_size)])

    def dealt_team(self, shard: int, group: int) -> int:
        """Returns the team t of group `group` that takes tokens of `shard`, one of R.

        The C teams that share a shard have different t % C.
        """
        # Team t = g R + offset, because group g starts at team g R. As g counts the C groups, g R modulo C runs d times
        # through the C / d multiples of d = gcd(R, C). So the offset grows by 1, modulo d, after each run, and t % C
        # takes each value once.
        divisor = gcd(self.ring_size, self.team_size)
        first = shard - shard % divisor
        return group * self.ring_size + first + (shard + group * divisor // self.team_size) % divisor


def _deal_tokens(spans: Spans, n: int) -> list[list[range]]:
    """Returns the spans of `n` groups, to which the tokens of a shard go in turn: group 0 gets tokens 0, n, 2 n, ..."""
    starts = list(accumulate(map(len, spans), initial=0))
    return [[span[(group - start) % n :: n] for span, start in zip(spans, starts, strict=False)] for group in range(n)]
