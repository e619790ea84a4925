"""An attention method as plain data: a name and its options, from which a `Job` can build it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method, build_attention
from armillary.attention.comm_plan import AttentionShape, CommPlan
from armillary.attention.methods.teams import Placement, Teams
from armillary.attention.methods.wallfacer import largest_team
from armillary.attention.registry import HEAD_METHODS, build_comm_plan
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class AttentionChoice:
    """The method `build_attention(name, mesh, ...)`; calling it with a mesh builds it, as a `Job` wants.

    Args:
        name: such as "ring", "usp" or "upipe+wallfacer".
        heads_per_stage: of UPipe; by default one query head for each rank of the head axis.
        team: of WallFacer; by default the largest that fits.
        placement: of WallFacer's teams.
    """

    name: str
    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"

    def __str__(self) -> str:
        teams = "" if self.team is None else f" C={self.team} {self.placement}"
        stages = "" if self.heads_per_stage is None else f", {self.heads_per_stage} heads a stage"
        return f"{self.name}{teams}{stages}"

    def __call__(self, mesh: DeviceMesh) -> Method:
        return build_attention(
            self.name, mesh, heads_per_stage=self.heads_per_stage, team=self.team, placement=self.placement
        )

    def layout(self, length: int, ranks: int) -> SequenceLayout:
        """Zigzag, over so many ranks of the sequence axis; what `Method.layout` gives, not refined for a head axis."""
        if self.sequence != "wallfacer":
            return SequenceLayout.zigzag(length, ranks)
        team = self.team_of(ranks)
        return Teams(ranks, team, self.placement).seated(SequenceLayout.zigzag(length, ranks // team).refine(team))

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """What it sends and computes on a mesh of ring x ulysses ranks."""
        return build_comm_plan(
            self.name, work, ring, ulysses, self.heads_per_stage, team=self.team, placement=self.placement
        )

    @property
    def head(self) -> str:
        """What divides the heads: "ulysses", "upipe" or ""."""
        return self._parts[0]

    @property
    def sequence(self) -> str:
        """What divides the sequence: "local", "ring", "token_ring", "wallfacer" or "all_gather"."""
        return self._parts[1]

    def team_of(self, ranks: int) -> int:
        """WallFacer's C on so many ranks."""
        return largest_team(ranks) if self.team is None else self.team

    @property
    def _parts(self) -> tuple[str, str]:
        head, _, sequence = ("ulysses+ring" if self.name == "usp" else self.name).rpartition("+")
        return (sequence, "local") if sequence in HEAD_METHODS else (head, sequence)
