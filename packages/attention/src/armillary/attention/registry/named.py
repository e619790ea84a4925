"""Methods by name: lookup, construction and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.methods.base import Method
from armillary.attention.methods.ring import Backward
from armillary.attention.methods.teams import Placement
from armillary.attention.planning.base import HeadPlan, MethodPlan, SequencePlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Role
from armillary.attention.planning.memory import HeadStages
from armillary.attention.planning.upipe import head_stages
from armillary.attention.registry.entry import DEFAULT_OPTIONS, HeadEntry, MethodOptions, SequenceEntry
from armillary.attention.registry.table import ALIASES, HEAD_METHODS, LOCAL, SEQUENCE_METHODS
from armillary.core import SequenceLayout


def build_attention(
    name: str,
    mesh: DeviceMesh,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
) -> Method:
    """Constructs the method `name` on the axes of `mesh` (from `build_mesh`).

    Args:
        name: "local"; on the sequence axis "ring", "token_ring", "wallfacer" or "all_gather"; on the head axis
            "ulysses" or "upipe"; a pair of both, such as "upipe+wallfacer"; "usp" is "ulysses+ring". On a sequence axis
            of one rank all are `Local`.
        heads_per_stage: of UPipe. By default one query head for each rank of the head axis: the least memory.
        team, placement: of WallFacer. By default the largest team that fits.
        backward: of Ring and WallFacer: the side that rotates in backward.

    Raises:
        ValueError: an unknown name, a method that leaves an axis with more than one rank unused, an option of another
            method, or a mesh without axes "ring" and "ulysses".
    """
    return named_method(name, MethodOptions(heads_per_stage, team, placement, backward)).build(mesh)


def build_comm_plan(
    name: str,
    work: AttentionShape,
    ring: int = 1,
    ulysses: int = 1,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
) -> CommPlan:
    """Returns the communication plan of the method of `build_attention` with these arguments, on ring x ulysses ranks.

    Args:
        work: over `ring` shards.

    Raises:
        ValueError: as `build_attention`; `work` over another number of shards; fewer query heads than `ulysses`; a
            method without a communication plan.
    """
    options = MethodOptions(heads_per_stage, team, placement, backward)
    return named_method(name, options).comm_plan(work, ring, ulysses)


@dataclass(frozen=True)
class NamedMethod:
    """The entries of a name, with options.

    Args:
        head: divides the heads; None: they are not divided.
        sequence: divides the sequence; `LOCAL`: it is not divided.
    """

    name: str
    head: HeadEntry | None
    sequence: SequenceEntry
    options: MethodOptions = DEFAULT_OPTIONS

    def __str__(self) -> str:
        """The name, and options that differ from the default."""
        head = "" if self.head is None else self.head.suffix(self.options)
        return f"{self.name}{self.sequence.suffix(self.options)}{head}"

    @property
    def axes(self) -> tuple[Role, ...]:
        """Axes over which work is divided."""
        return (*(["ring"] if self.sequence is not LOCAL else []), *(["ulysses"] if self.head else []))

    def build(self, mesh: DeviceMesh) -> Method:
        """Constructs the method, as `build_attention`."""
        _check_mesh(mesh)
        ring, ulysses = mesh["ring"].size(), mesh["ulysses"].size()
        self.check_used(ring, ulysses)
        sequence = self.sequence if ring > 1 else LOCAL
        inner = sequence.method(mesh["ring"], **sequence.arguments(self.options, ring))
        if self.head is None:
            return inner
        return self.head.method(mesh["ulysses"], inner, **self.head.arguments(self.options, ulysses))

    # -- plans --------------------------------------------------------------------------------------------------------

    def missing(self, *functions: str) -> tuple[str, ...]:
        """Returns those of some functions of a plan, such as "comm_plan", that the method's plans do not define."""
        plans: list[tuple[type[MethodPlan], type[MethodPlan]]] = [(self.sequence.plan, SequencePlan)]
        if self.head is not None:
            plans.append((self.head.plan, HeadPlan))
        return tuple(f for f in functions if any(getattr(plan, f) is getattr(base, f) for plan, base in plans))

    def sequence_plan(self, ring: int) -> SequencePlan:
        """Returns the plan of the sequence method on `ring` ranks."""
        return self.sequence.plan(**self.sequence.arguments(self.options, ring), method=self.name)

    def head_plan(self, ulysses: int) -> HeadPlan | None:
        """Returns the plan of the head method on `ulysses` ranks; None: there is no head method."""
        if self.head is None:
            return None
        return self.head.plan(**self.head.arguments(self.options, ulysses), method=self.name)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """Returns the communication plan, as `build_comm_plan`."""
        self.check_used(ring, ulysses)
        if work.layout.shards != ring:
            raise ValueError(
                f"the layout has {work.layout.shards} shards; {ring} are needed, one for each rank of ring"
            )
        inner, head = self.sequence_plan(ring), self.head_plan(ulysses)
        return inner.comm_plan(work) if head is None else head.comm_plan(work, ulysses, inner.comm_plan)

    def layout(self, length: int, ring: int) -> SequenceLayout:
        """Returns the zigzag layout of `Method.layout` over `ring` ranks, not refined for a head axis."""
        return self.sequence_plan(ring).layout(length, ring)

    def stages(self, heads: int, key_heads: int, ulysses: int) -> HeadStages:
        """Returns the stages in which the first of `ulysses` ranks of the head axis gets its heads."""
        options = self.options if self.head is None else self.head.resolve(self.options, ulysses)
        return head_stages(heads, key_heads, ulysses, options.heads_per_stage)

    def check_used(self, ring: int, ulysses: int) -> None:
        """Raises ValueError for an axis of several ranks over which nothing is divided."""
        for axis, ranks in (("ring", ring), ("ulysses", ulysses)):
            if ranks > 1 and axis not in self.axes:
                raise ValueError(
                    f"{self.name} would leave axis {axis!r} with {ranks} ranks unused; use usp, or {axis}=1"
                )


def named_method(name: str, options: MethodOptions = DEFAULT_OPTIONS) -> NamedMethod:
    """Looks up a name.

    Raises:
        ValueError: an unknown name, or an option of another method.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"{name!r} is no name of an attention method; known: {', '.join(names())}")
    head, _, sequence = ALIASES.get(name, name).rpartition("+")
    if not head and sequence in HEAD_METHODS:
        head, sequence = sequence, "local"
    if (head and head not in HEAD_METHODS) or (sequence != "local" and sequence not in SEQUENCE_METHODS):
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    method = NamedMethod(name, HEAD_METHODS.get(head), SEQUENCE_METHODS.get(sequence, LOCAL), options)
    _check_options(method)
    return method


def names() -> list[str]:
    """Returns every name of `build_attention` and `build_comm_plan`."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, *ALIASES, *pairs]


def unplanned(*functions: str) -> dict[str, tuple[str, ...]]:
    """Returns the names whose plans do not define all of some functions, with those that are missing."""
    return {name: missing for name in names() if (missing := named_method(name).missing(*functions))}


def variants(ring: int, ulysses: int, heads: int) -> Iterator[NamedMethod]:
    """Yields every method that divides work over all ranks of both axes, with all options worth trying."""
    sequences = SEQUENCE_METHODS if ring > 1 else {"local": LOCAL}
    for name, sequence in sequences.items():
        for options in sequence.variants(ring, heads):
            if ulysses == 1:
                yield NamedMethod(name, None, sequence, options)
                continue
            for head_name, head in HEAD_METHODS.items():
                pair = head_name if sequence is LOCAL else f"{head_name}+{name}"
                for head_options in head.variants(ulysses, heads):
                    values = {option: getattr(head_options, option) for option in head.options}
                    yield NamedMethod(pair, head, sequence, options._replace(**values))


def _check_options(method: NamedMethod) -> None:
    accepted = (*method.sequence.options, *(method.head.options if method.head else ()))
    for option, value in method.options._asdict().items():
        if value != getattr(DEFAULT_OPTIONS, option) and option not in accepted:
            entries = {**SEQUENCE_METHODS, **HEAD_METHODS}
            owners = ", ".join(name for name, entry in entries.items() if option in entry.options)
            raise ValueError(f"{method.name} takes no {option}={value!r}; that is for {owners}")


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed, such as build_mesh makes")
    axes = mesh.mesh_dim_names or ()
    if absent := [axis for axis in ("ring", "ulysses") if axis not in axes]:
        raise ValueError(
            f"the mesh has axes {axes} and no {' and '.join(absent)}; make it by build_mesh, or a method "
            f"from an axis, such as Ring(mesh[...])"
        )
