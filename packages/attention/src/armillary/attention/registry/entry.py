"""Entries of the registry: the class of a method, its plan and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from armillary.attention.methods.base import Method
from armillary.attention.methods.ring import Backward
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.comm_plan import Role
from armillary.attention.planning.method_plan import HeadPlan, MethodPlan, SequencePlan


class MethodOptions(NamedTuple):
    """The options that may accompany the name of a method. A method uses some of them."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"
    nodes: int | None = None


DEFAULT_OPTIONS = MethodOptions()


@dataclass(frozen=True)
class Entry:
    """Entry of a method on the sequence axis or on the head axis.

    Args:
        method: the class, or a function that constructs the method. Called with its mesh axes, on the head axis also
            with the inner method, and with the options as keyword arguments.
        plan: class of the plan. Called with the options and the method's name as keyword arguments.
        options: names of the fields of `MethodOptions` that method and plan take.
        mesh_options: names of the fields that only the plan takes, because the method reads them from its mesh.
        defaults: function of the number of ranks on the method's axis, which returns values for options that are None.
        variants: function of (ranks on the method's axis, query heads), which yields the options that a search tries.
            It yields none where the method would do the same as another one.
    """

    method: Callable[..., Method]
    plan: type[MethodPlan]
    options: tuple[str, ...] = ()
    mesh_options: tuple[str, ...] = ()
    defaults: Callable[[int], MethodOptions] = lambda ranks: DEFAULT_OPTIONS
    variants: Callable[[int, int], Iterable[MethodOptions]] = lambda ranks, heads: (DEFAULT_OPTIONS,)

    def resolve(self, options: MethodOptions, ranks: int) -> MethodOptions:
        """Returns the options with defaults for those that are None."""
        defaults = self.defaults(ranks)._asdict()
        return options._replace(**{name: x for name, x in defaults.items() if getattr(options, name) is None})

    def arguments(self, options: MethodOptions, ranks: int, plan: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments of `method` for an axis of `ranks` ranks, or of `plan` if `plan` is True."""
        resolved, names = self.resolve(options, ranks), (*self.options, *(self.mesh_options if plan else ()))
        return {name: getattr(resolved, name) for name in names}


@dataclass(frozen=True)
class SequenceEntry(Entry):
    """Entry of a method on the sequence axis.

    Args:
        axes: names of the mesh axes that `method` takes: the sequence axis, or the two axes that replace it.
    """

    plan: type[SequencePlan] = SequencePlan
    axes: tuple[Role, ...] = ("ring",)


@dataclass(frozen=True)
class HeadEntry(Entry):
    """Entry of a method on the head axis, which takes an inner method on the sequence axis."""

    plan: type[HeadPlan] = HeadPlan
