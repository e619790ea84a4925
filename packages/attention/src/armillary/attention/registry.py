"""Methods by the names that people type on a command line: the only name table there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import AttentionShape, CommPlan, Role
from armillary.attention.memory import HeadStages
from armillary.attention.methods import all_gather, local, ring, token_ring, ulysses, upipe, upipe_plan, wallfacer
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import UNLESS_GIVEN, Backward, MethodOptions, OnHeads, OnSequence
from armillary.attention.methods.teams import Placement
from armillary.core import SequenceLayout

SEQUENCE_METHODS: dict[str, OnSequence] = {
    "ring": ring.REGISTERED,
    "token_ring": token_ring.REGISTERED,
    "wallfacer": wallfacer.REGISTERED,
    "all_gather": all_gather.REGISTERED,
}
HEAD_METHODS: dict[str, OnHeads] = {
    "ulysses": ulysses.REGISTERED,
    "upipe": upipe.REGISTERED,
}
LOCAL = local.REGISTERED
"""Of one rank, and of a head axis alone."""
ALIASES = {"usp": "ulysses+ring"}


def build_attention(
    name: str,
    mesh: DeviceMesh,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
) -> Method:
    """The method `name` on the axes of `mesh` (from `build_mesh`).

    Args:
        name: "local"; on the sequence axis "ring", "token_ring", "wallfacer" or "all_gather"; on the head axis
            "ulysses" or "upipe"; a pair of both, as in "upipe+wallfacer"; "usp" is "ulysses+ring". On a sequence axis
            of one rank all are `Local`.
        heads_per_stage: of UPipe; unless given, one query head for each rank of the head axis: the least memory.
        team, placement: of WallFacer; unless given, the largest team that fits.
        backward: of Ring and WallFacer: what goes round in backward.

    Raises:
        ValueError: an unknown name, a method that leaves an axis with more than one rank unused, an option for a
            method that does not have it, or a mesh without axes "ring" and "ulysses".
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
    """What the method of `build_attention` with these arguments sends and computes on so many ranks of both axes.

    Args:
        work: over `ring` shards.

    Raises:
        ValueError: as `build_attention`; `work` over another number of shards; fewer query heads than `ulysses`.
    """
    options = MethodOptions(heads_per_stage, team, placement, backward)
    return named_method(name, options).comm_plan(work, ring, ulysses)


@dataclass(frozen=True)
class NamedMethod:
    """What a name stands for, with options that it has.

    Args:
        head: what divides the heads; None: nothing.
        sequence: what divides the sequence; `LOCAL`: nothing.
    """

    name: str
    head: OnHeads | None
    sequence: OnSequence
    options: MethodOptions = UNLESS_GIVEN

    def __str__(self) -> str:
        """Its name, and options that differ from what they are unless given."""
        head = "" if self.head is None else self.head.shown(self.options)
        return f"{self.name}{self.sequence.shown(self.options)}{head}"

    @property
    def axes(self) -> tuple[Role, ...]:
        """Those that it divides work over."""
        return (*(["ring"] if self.sequence is not LOCAL else []), *(["ulysses"] if self.head else []))

    def build(self, mesh: DeviceMesh) -> Method:
        """As `build_attention`."""
        _check_mesh(mesh)
        self.check_used(mesh["ring"].size(), mesh["ulysses"].size())
        inner = (self.sequence if mesh["ring"].size() > 1 else LOCAL).build(mesh["ring"], self.options)
        return inner if self.head is None else self.head.build(mesh["ulysses"], inner, self.options)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """As `build_comm_plan`."""
        self.check_used(ring, ulysses)
        if work.layout.shards != ring:
            raise ValueError(
                f"the layout has {work.layout.shards} shards; {ring} are needed, one for each rank of ring"
            )

        def inside(work: AttentionShape) -> CommPlan:
            return self.sequence.comm_plan(work, self.options)

        return inside(work) if self.head is None else self.head.comm_plan(work, ulysses, inside, self.options)

    def layout(self, length: int, ring: int) -> SequenceLayout:
        """Zigzag, over so many ranks of the sequence axis: as `Method.layout` gives, not refined for a head axis."""
        return self.sequence.layout(length, ring, self.options)

    def stages(self, heads: int, key_heads: int, ulysses: int) -> HeadStages:
        """In which stages heads come to the first of so many ranks of the head axis."""
        at_once = None if self.head is None else self.head.heads_at_once(ulysses, self.options)
        return upipe_plan.head_stages(heads, key_heads, ulysses, at_once)

    def check_used(self, ring: int, ulysses: int) -> None:
        """Refuses an axis with more than one rank over which nothing is divided."""
        for axis, ranks in (("ring", ring), ("ulysses", ulysses)):
            if ranks > 1 and axis not in self.axes:
                raise ValueError(
                    f"{self.name} would leave axis {axis!r} with {ranks} ranks unused; use usp, or {axis}=1"
                )


def named_method(name: str, options: MethodOptions = UNLESS_GIVEN) -> NamedMethod:
    """What `build_attention` builds for this name.

    Raises:
        ValueError: an unknown name, or an option that the method does not have.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"{name!r} is no name of an attention method; known: {', '.join(names())}")
    head, _, sequence = ALIASES.get(name, name).rpartition("+")
    if not head and sequence in HEAD_METHODS:
        head, sequence = sequence, "local"
    if (head and head not in HEAD_METHODS) or (sequence != "local" and sequence not in SEQUENCE_METHODS):
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    found = NamedMethod(name, HEAD_METHODS.get(head), SEQUENCE_METHODS.get(sequence, LOCAL), options)
    _check_options(found)
    return found


def names() -> list[str]:
    """Every name that `build_attention` and `build_comm_plan` know."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, *ALIASES, *pairs]


def variants(ring: int, ulysses: int, heads: int) -> Iterator[NamedMethod]:
    """Every method that divides work over all ranks of both axes, with all its options that are worth trying."""
    for name, sequence in SEQUENCE_METHODS.items() if ring > 1 else [("local", LOCAL)]:
        for inside in sequence.variants(ring):
            if ulysses == 1:
                yield NamedMethod(name, None, sequence, inside)
                continue
            for outer, head in HEAD_METHODS.items():
                both = outer if sequence is LOCAL else f"{outer}+{name}"
                for options in head.variants(heads, ulysses):
                    mine = {option: getattr(options, option) for option in head.takes}
                    yield NamedMethod(both, head, sequence, inside._replace(**mine))


def _check_options(method: NamedMethod) -> None:
    every = {**SEQUENCE_METHODS, **HEAD_METHODS}
    has = (*method.sequence.takes, *(method.head.takes if method.head else ()))
    for option, given in method.options._asdict().items():
        if given != getattr(UNLESS_GIVEN, option) and option not in has:
            having = ", ".join(known for known, entry in every.items() if option in entry.takes)
            raise ValueError(f"{method.name} takes no {option}={given!r}; that is for {having}")


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed, such as build_mesh makes")
    axes = mesh.mesh_dim_names or ()
    if missing := [axis for axis in ("ring", "ulysses") if axis not in axes]:
        raise ValueError(
            f"the mesh has axes {axes} and no {' and '.join(missing)}; make it by build_mesh, or a method "
            f"from an axis, such as Ring(mesh[...])"
        )
