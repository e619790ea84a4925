"""Entries of the registry: a method's class, its plan and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from armillary.attention.methods.base import Method
from armillary.attention.methods.ring import Backward
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.base import HeadPlan, MethodPlan, SequencePlan
from armillary.attention.planning.comm_plan import Role


class MethodOptions(NamedTuple):
    """Options of all methods, besides their axes."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"
    nodes: int | None = None


DEFAULT_OPTIONS = MethodOptions()


@dataclass(frozen=True)
class Entry:
    """Entry of a method, on either axis.

    Args:
        method: the class. Called with the axis of a mesh, on the head axis also with the inner method, and with the
            options by name.
        plan: class of the communication plan, called with the options by name.
        options: fields of `MethodOptions` that the method has.
        mesh_options: further fields that only the plan is called with; the method reads them from its mesh.
        defaults: values of options that are None, for a number of ranks on the method's axis.
        variants: function of (ranks of its axis, query heads): the options that a search tries; none if other methods
            cover them.
    """

    method: Callable[..., Method]
    plan: type[MethodPlan]
    options: tuple[str, ...] = ()
    mesh_options: tuple[str, ...] = ()
    defaults: Callable[[int], MethodOptions] = lambda ranks: DEFAULT_OPTIONS
    variants: Callable[[int, int], Iterable[MethodOptions]] = lambda ranks, heads: (DEFAULT_OPTIONS,)

    def resolve(self, options: MethodOptions, ranks: int) -> MethodOptions:
        """Fills in options that are None."""
        defaults = self.defaults(ranks)._asdict()
        return options._replace(**{name: x for name, x in defaults.items() if getattr(options, name) is None})

    def arguments(self, options: MethodOptions, ranks: int, plan: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments of `method`, or of `plan`, on `ranks` ranks of the method's axis."""
        resolved, names = self.resolve(options, ranks), (*self.options, *(self.mesh_options if plan else ()))
        return {name: getattr(resolved, name) for name in names}


@dataclass(frozen=True)
class SequenceEntry(Entry):
    """Entry of a method on the sequence axis.

    Args:
        axes: mesh axes that `method` is called with: the sequence axis, or two that it is split into.
    """

    plan: type[SequencePlan] = SequencePlan
    axes: tuple[Role, ...] = ("ring",)


@dataclass(frozen=True)
class HeadEntry(Entry):
    """Entry of a method on the head axis, around another."""

    plan: type[HeadPlan] = HeadPlan
