"""Methods by the names that people type on a command line: the only name table there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import Schedule, Work
from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.all_gather import schedule as all_gather_schedule
from armillary.attention.methods.base import Method
from armillary.attention.methods.head_axis import Inside
from armillary.attention.methods.local import Local
from armillary.attention.methods.local import schedule as local_schedule
from armillary.attention.methods.ring import Backward, Ring
from armillary.attention.methods.ring import schedule as ring_schedule
from armillary.attention.methods.teams import Placement
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.token_ring import schedule as token_ring_schedule
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.ulysses import schedule as ulysses_schedule
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.upipe import schedule as upipe_schedule
from armillary.attention.methods.wallfacer import WallFacer
from armillary.attention.methods.wallfacer import schedule as wall_facer_schedule


class Options(NamedTuple):
    """What a method may be told besides its axes."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"

    def heads_of(self, ranks: int) -> int:
        """The heads per stage told, or one for each rank of the head axis."""
        return ranks if self.heads_per_stage is None else self.heads_per_stage

    def team_of(self, ranks: int) -> int:
        """The team told, or the largest that fits."""
        return largest_team(ranks) if self.team is None else self.team


@dataclass(frozen=True)
class OnSequence:
    """A method on the sequence axis, its schedule, and the options that it has."""

    build: Callable[[DeviceMesh, Options], Method]
    schedule: Callable[[Work, Options], Schedule]
    has: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnHeads:
    """A method on the head axis around another, its schedule on so many ranks, and the options that it has."""

    build: Callable[[DeviceMesh, Method, Options], Method]
    schedule: Callable[[Work, int, Inside, Options], Schedule]
    has: tuple[str, ...] = ()


SEQUENCE_METHODS: dict[str, OnSequence] = {
    "ring": OnSequence(
        lambda axis, options: Ring(axis, options.backward),
        lambda work, options: ring_schedule(work, options.backward),
        ("backward",),
    ),
    "token_ring": OnSequence(lambda axis, _: TokenRing(axis), lambda work, _: token_ring_schedule(work)),
    "wallfacer": OnSequence(
        lambda axis, options: WallFacer(axis, options.team_of(axis.size()), options.placement, options.backward),
        lambda work, options: wall_facer_schedule(
            work, options.team_of(work.layout.shards), options.placement, options.backward
        ),
        ("team", "placement", "backward"),
    ),
    "all_gather": OnSequence(lambda axis, _: AllGatherKV(axis), lambda work, _: all_gather_schedule(work)),
}
HEAD_METHODS: dict[str, OnHeads] = {
    "ulysses": OnHeads(
        lambda axis, inner, _: Ulysses(axis, inner) if axis.size() > 1 else inner,
        lambda work, ranks, inner, _: ulysses_schedule(work, ranks, inner),
    ),
    "upipe": OnHeads(
        lambda axis, inner, options: UPipe(axis, inner, options.heads_of(axis.size())),
        lambda work, ranks, inner, options: upipe_schedule(work, ranks, inner, options.heads_of(ranks)),
        ("heads_per_stage",),
    ),
}


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
            "ulysses" or "upipe"; a pair of both, as in "upipe+wallfacer"; "usp" is "ulysses+ring".
        heads_per_stage: of UPipe; unless given, one query head for each rank of the head axis: the least memory.
        team, placement: of WallFacer; unless given, the largest team that fits.
        backward: of Ring and WallFacer: what goes round in backward.

    Raises:
        ValueError: an unknown name, a method that leaves an axis with more than one rank unused, an option for a
            method that does not have it, or a mesh without axes "ring" and "ulysses".
    """
    head, sequence, options = _parsed(name, Options(heads_per_stage, team, placement, backward))
    _check_mesh(mesh)
    _check_used(name, "ring", mesh["ring"].size(), sequence != "local")
    _check_used(name, "ulysses", mesh["ulysses"].size(), bool(head))
    inner = Local() if sequence == "local" else SEQUENCE_METHODS[sequence].build(mesh["ring"], options)
    return HEAD_METHODS[head].build(mesh["ulysses"], inner, options) if head else inner


def build_schedule(
    name: str,
    work: Work,
    ring: int = 1,
    ulysses: int = 1,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
) -> Schedule:
    """What the method of `build_attention` with these arguments sends and computes on so many ranks of both axes.

    Args:
        work: over `ring` shards.

    Raises:
        ValueError: as `build_attention`; `work` over another number of shards; fewer query heads than `ulysses`.
    """
    head, sequence, options = _parsed(name, Options(heads_per_stage, team, placement, backward))
    _check_used(name, "ring", ring, sequence != "local")
    _check_used(name, "ulysses", ulysses, bool(head))
    if work.layout.shards != ring:
        raise ValueError(f"the layout has {work.layout.shards} shards; {ring} are needed, one for each rank of ring")

    def inside(work: Work) -> Schedule:
        return local_schedule(work) if sequence == "local" else SEQUENCE_METHODS[sequence].schedule(work, options)

    return HEAD_METHODS[head].schedule(work, ulysses, inside, options) if head else inside(work)


def names() -> list[str]:
    """Every name that `build_attention` and `build_schedule` know."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, "usp", *pairs]


def largest_team(ranks: int) -> int:
    """The largest C whose square divides the number of ranks."""
    return max(c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0)


def _parsed(name: str, options: Options) -> tuple[str, str, Options]:
    """(method on the head axis or "", method on the sequence axis or "local", options), all of them known."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"{name!r} is no name of an attention method; known: {', '.join(names())}")
    head, _, sequence = ("ulysses+ring" if name == "usp" else name).rpartition("+")
    if not head and sequence in HEAD_METHODS:
        head, sequence = sequence, "local"
    if (head and head not in HEAD_METHODS) or (sequence != "local" and sequence not in SEQUENCE_METHODS):
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    every = {**SEQUENCE_METHODS, **HEAD_METHODS}
    has = [option for part in (head, sequence) if part in every for option in every[part].has]
    for option, told in options._asdict().items():
        if told != Options._field_defaults[option] and option not in has:
            having = ", ".join(known for known, method in every.items() if option in method.has)
            raise ValueError(f"{name} takes no {option}={told!r}; that is for {having}")
    return head, sequence, options


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed, such as build_mesh makes")
    axes = mesh.mesh_dim_names or ()
    if missing := [axis for axis in ("ring", "ulysses") if axis not in axes]:
        raise ValueError(
            f"the mesh has axes {axes} and no {' and '.join(missing)}; make it by build_mesh, or a method "
            f"from an axis, such as Ring(mesh[...])"
        )


def _check_used(name: str, axis: str, ranks: int, used: bool) -> None:
    if ranks > 1 and not used:
        raise ValueError(f"{name} would leave axis {axis!r} with {ranks} ranks unused; use usp, or {axis}=1")
