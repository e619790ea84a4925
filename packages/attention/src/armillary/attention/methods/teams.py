"""Who sits where in WallFacer (arXiv 2407.00611): pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal, get_args

from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.core import SequenceLayout
from armillary.core.checked import integer, one_of

Placement = Literal["collect_intra", "p2p_intra"]


def fitting_teams(ranks: int) -> list[int]:
    """Each C whose square divides the number of ranks."""
    return [c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0]


@dataclass(frozen=True)
class Teams:
    """Who is who: P ranks of an axis as P / C teams of C members, R consecutive teams to a group, C groups.

    `collect_intra` makes the members of a team neighbours on the axis, so that gathers stay within a node; `p2p_intra`
    makes the ranks of a ring neighbours.
    """

    ranks: int
    team: int
    placement: Placement

    def __post_init__(self) -> None:
        one_of("placement", self.placement, get_args(Placement))
        object.__setattr__(self, "team", integer("team", self.team))
        if self.team < 1 or self.ranks % self.team**2:
            raise ValueError(
                f"team={self.team}: its square must divide the {self.ranks} ranks; "
                f"possible: {fitting_teams(self.ranks)}"
            )

    @property
    def ring(self) -> int:
        """R, ranks in a ring: teams in a group."""
        return self.ranks // self.team**2

    def rank(self, team: int, member: int) -> int:
        """The rank on the axis of one member of one team."""
        if self.placement == "collect_intra":
            return team * self.team + member
        group, place = divmod(team, self.ring)
        return (group * self.team + member) * self.ring + place

    def seat(self, rank: int) -> tuple[int, int]:
        """(team, member) of a rank."""
        if self.placement == "collect_intra":
            return divmod(rank, self.team)
        rest, place = divmod(rank, self.ring)
        group, member = divmod(rest, self.team)
        return group * self.ring + place, member

    def seated(self, cut: SequenceLayout) -> SequenceLayout:
        """The same shards in the order of ranks: `cut` has those of the first team's members first, and so on."""
        seats = (self.seat(rank) for rank in range(self.ranks))
        return SequenceLayout([cut.spans(team * self.team + member) for team, member in seats])

    def keeper(self, team: int, member: int) -> int:
        """The rank to which this member of a team sends the team's keys (step 2)."""
        return self.rank(member * self.ring + team // self.team, team % self.team)

    def kept(self, team: int, member: int) -> tuple[int, int]:
        """(team, member) whose keys this member of a team is sent: the inverse of `keeper`."""
        group, place = divmod(team, self.ring)
        return place * self.team + member, group

    def mates(self, team: int) -> tuple[int, ...]:
        """The ranks of a team."""
        return tuple(self.rank(team, member) for member in range(self.team))

    def sizes(self, layout: SequenceLayout, team: int) -> tuple[int, ...]:
        """Tokens of each member of a team."""
        return tuple(layout.sizes[rank] for rank in self.mates(team))

    def layout(self, layout: SequenceLayout) -> SequenceLayout:
        """That of the ranks, with teams as shards."""
        teams = range(self.ranks // self.team)
        return SequenceLayout([[span for rank in self.mates(team) for span in layout.spans(rank)] for team in teams])

    def ring_of(self, group: int, member: int, moving: Moving) -> RingTopology:
        """A ring: one member of each team of a group. Shards are teams."""
        teams = tuple(group * self.ring + j for j in range(self.ring))
        keys = tuple(j * self.team + member for j in range(self.ring))
        stationary, rotating = (teams, keys) if moving == "keys" else (keys, teams)
        return RingTopology(tuple(self.rank(team, member) for team in teams), stationary, rotating, moving)

    def rings(self, moving: Moving) -> list[RingTopology]:
        """All rings."""
        each = range(self.team)
        return [self.ring_of(group, member, moving) for group in each for member in each]
