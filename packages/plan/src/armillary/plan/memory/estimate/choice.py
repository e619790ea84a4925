"""An attention method as plain data: a name and its options, from which a `Job` can build it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan
from armillary.attention.registry import MethodOptions, NamedMethod, named_method
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class AttentionChoice:
    """The method `build_attention(name, mesh, ...)`; calling it with a mesh builds it, as a `Job` wants.

    Args:
        name: such as "ring", "usp" or "upipe+wallfacer".
        heads_per_stage, team, placement: options, as the trainer's `ParallelConfig` has them.
    """

    name: str
    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"

    @classmethod
    def of(cls, method: NamedMethod) -> AttentionChoice:
        """The same as data."""
        options = method.options
        return cls(method.name, options.heads_per_stage, options.team, options.placement)

    @property
    def method(self) -> NamedMethod:
        """What the registry knows of it.

        Raises:
            ValueError: an unknown name, or an option that the method does not have.
        """
        return named_method(self.name, MethodOptions(self.heads_per_stage, self.team, self.placement))

    def __str__(self) -> str:
        return str(self.method)

    def __call__(self, mesh: DeviceMesh) -> Method:
        return self.method.build(mesh)

    def layout(self, length: int, ranks: int) -> SequenceLayout:
        """Zigzag, over so many ranks of the sequence axis; what `Method.layout` gives, not refined for a head axis."""
        return self.method.layout(length, ranks)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """What it sends and computes on a mesh of ring x ulysses ranks."""
        return self.method.comm_plan(work, ring, ulysses)
