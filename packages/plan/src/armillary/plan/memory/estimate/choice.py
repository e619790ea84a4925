"""`AttentionChoice`: an attention method by its name and options, which a `Job` builds on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan
from armillary.attention.registry import MethodOptions, NamedMethod, named_method
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class AttentionChoice:
    """A method by name and options. A call with a mesh builds it, as `build_attention(name, mesh, ...)` does.

    Args:
        name: name in the registry, such as "ring", "usp" or "upipe+wallfacer".
        heads_per_stage, team, placement, nodes: options of the trainer's `ParallelConfig`.
    """

    name: str
    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    nodes: int | None = None

    @classmethod
    def of(cls, method: NamedMethod) -> AttentionChoice:
        """Returns the choice that builds this method."""
        options = method.options
        return cls(method.name, options.heads_per_stage, options.team, options.placement, options.nodes)

    @property
    def method(self) -> NamedMethod:
        """The registry's method.

        Raises:
            ValueError: an unknown name, or an option that the method does not have.
        """
        return named_method(self.name, MethodOptions(self.heads_per_stage, self.team, self.placement, nodes=self.nodes))

    def __str__(self) -> str:
        return str(self.method)

    def __call__(self, mesh: DeviceMesh) -> Method:
        return self.method.build(mesh)

    def mesh_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of the axes of the mesh that the method is built on: `ring` may be split."""
        return self.method.mesh_axes(axes)

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None
    ) -> SequenceLayout:
        """Layout over `ranks` sequence ranks, as of `Method.layout` but not refined for a head axis."""
        return self.method.layout(length, ranks, kind, mask)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """Communication plan on a mesh of ring x ulysses ranks."""
        return self.method.comm_plan(work, ring, ulysses)
