"""Who sits where in WallFacer (arXiv 2407.00611): pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import gcd, isqrt
from typing import Literal, get_args

from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.core import SequenceLayout
from armillary.core.checked import integer, one_of
from armillary.core.layout import Spans

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

    def dealt(self, layout: SequenceLayout) -> SequenceLayout:
        """Teams as shards, from a layout over R shards: the tokens of each go to C teams by turns.

        Member a of a team computes its queries against the keys of teams a, a + C, ...; where queries rotate, keys of
        these against the queries of its group. The C teams of a shard differ in group and in t % C, so that each query
        sees as many keys at every member, to one, and each key is seen by as many queries of every group: ranks have as
        even work as the R shards have, whatever the mask.

        Raises:
            ValueError: fewer tokens than ranks.
        """
        if layout.length < self.ranks:
            raise ValueError(f"a sequence of {layout.length} tokens is shorter than its {self.ranks} shards")
        turns = [_by_turns(layout.spans(shard), self.team) for shard in range(self.ring)]
        held = {self.dealt_to(shard, n): spans for shard, dealt in enumerate(turns) for n, spans in enumerate(dealt)}
        return SequenceLayout([held[team] for team in range(self.ranks // self.team)])

    def dealt_to(self, shard: int, group: int) -> int:
        """The team of a group that gets tokens of one of R shards: of all groups together, one for each t % C."""
        both = gcd(self.ring, self.team)  # the first teams of groups are multiples of it, modulo C
        first = shard - shard % both
        return group * self.ring + first + (shard + group * both // self.team) % both

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


def _by_turns(spans: Spans, n: int) -> list[list[range]]:
    """The tokens of a shard for each of `n`: the first has tokens 0, n, 2 n, ..."""
    starts = list(accumulate(map(len, spans), initial=0))
    return [[span[(turn - at) % n :: n] for span, at in zip(spans, starts, strict=False)] for turn in range(n)]
