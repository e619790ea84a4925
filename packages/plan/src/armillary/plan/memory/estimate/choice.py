"""`AttentionChoice`: an attention method by its name and options, which a `Job` builds on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, AttentionShape, CommPlan, Method
from armillary.attention.plans import MethodOptions, NamedMethod, Placement, UPipePlan, named_method
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class AttentionChoice:
    """A method by name and options. Calling it with a mesh builds the method, as `build_attention(name, mesh)` does.

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

    @cached_property  # a search asks each choice for its method thousands of times
    def method(self) -> NamedMethod:
        """The method in the registry, with these options.

        Raises:
            ValueError: an unknown name, or an option that the method does not have.
        """
        return named_method(self.name, MethodOptions(self.heads_per_stage, self.team, self.placement, nodes=self.nodes))

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)  # without the cached method, whose registry entry has functions that cannot be pickled

    def __str__(self) -> str:
        return str(self.method)

    def __call__(self, mesh: DeviceMesh) -> Method:
        return self.method.build(mesh)

    def mesh_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns the axis sizes of the mesh on which the method is built. Methods over nodes split `ring` in two."""
        return self.method.mesh_axes(axes)

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None
    ) -> SequenceLayout:
        """Returns the layout over `ranks` sequence ranks. Unlike `Method.layout`, it has no shards for a head axis."""
        return self.method.layout(length, ranks, kind, mask)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """Returns the communication plan on a mesh of ring x ulysses ranks."""
        return self.method.comm_plan(work, ring, ulysses)

    def checkpointed_comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan | None:
        """Returns the plan in a block under a checkpoint policy; None if it is `comm_plan`.

        There Ulysses runs as UPipe with all heads in one stage, so backward sends q, k, v and out again.
        """
        method = self.method
        head = method.head_plan(ulysses)
        if head is None or head.projects_in_stages or ulysses == 1:
            return None
        return UPipePlan(method=method.name).comm_plan(work, ulysses, method.sequence_plan(ring).comm_plan)
