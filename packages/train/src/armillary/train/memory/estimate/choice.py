"""An attention method as plain data: a name and its options, from which a `Job` can build it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method, build_attention
from armillary.attention.build import HEAD_METHODS, largest_team


@dataclass(frozen=True)
class AttentionChoice:
    """The method `build_attention(name, mesh, heads_per_stage, team)`; calling it with a mesh builds it, for a `Job`.

    Args:
        name: such as "ring", "usp" or "upipe+wallfacer".
        heads_per_stage: of UPipe; by default one query head for each rank of the head axis.
        team: of WallFacer; by default the largest that fits.
    """

    name: str
    heads_per_stage: int | None = None
    team: int | None = None

    def __call__(self, mesh: DeviceMesh) -> Method:
        return build_attention(self.name, mesh, self.heads_per_stage, self.team)

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
