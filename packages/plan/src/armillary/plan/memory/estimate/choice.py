"""`AttentionChoice`: an attention method by its name and options, which a `Job` builds on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method
from armillary.attention.plans import MethodOptions, NamedMethod, Placement, named_method


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
