"""Methods by the names that people type on a command line: the only name table there is."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import AttentionShape, CommPlan
from armillary.attention.methods import all_gather, local, ring, token_ring, ulysses, upipe, wallfacer
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import Backward, MethodOptions, OnHeads, OnSequence
from armillary.attention.methods.local import Local
from armillary.attention.methods.teams import Placement

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
    head, sequence, options = _parsed(name, MethodOptions(heads_per_stage, team, placement, backward))
    _check_mesh(mesh)
    _check_used(name, "ring", mesh["ring"].size(), sequence != "local")
    _check_used(name, "ulysses", mesh["ulysses"].size(), bool(head))
    inner = Local() if sequence == "local" else SEQUENCE_METHODS[sequence].build(mesh["ring"], options)
    return HEAD_METHODS[head].build(mesh["ulysses"], inner, options) if head else inner


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
    head, sequence, options = _parsed(name, MethodOptions(heads_per_stage, team, placement, backward))
    _check_used(name, "ring", ring, sequence != "local")
    _check_used(name, "ulysses", ulysses, bool(head))
    if work.layout.shards != ring:
        raise ValueError(f"the layout has {work.layout.shards} shards; {ring} are needed, one for each rank of ring")

    def inside(work: AttentionShape) -> CommPlan:
        return local.comm_plan(work) if sequence == "local" else SEQUENCE_METHODS[sequence].comm_plan(work, options)

    return HEAD_METHODS[head].comm_plan(work, ulysses, inside, options) if head else inside(work)


def names() -> list[str]:
    """Every name that `build_attention` and `build_comm_plan` know."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, "usp", *pairs]


def _parsed(name: str, options: MethodOptions) -> tuple[str, str, MethodOptions]:
    """(method on the head axis or "", method on the sequence axis or "local", options), all of them known."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"{name!r} is no name of an attention method; known: {', '.join(names())}")
    head, _, sequence = ("ulysses+ring" if name == "usp" else name).rpartition("+")
    if not head and sequence in HEAD_METHODS:
        head, sequence = sequence, "local"
    if (head and head not in HEAD_METHODS) or (sequence != "local" and sequence not in SEQUENCE_METHODS):
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    every = {**SEQUENCE_METHODS, **HEAD_METHODS}
    has = [option for part in (head, sequence) if part in every for option in every[part].takes]
    for option, told in options._asdict().items():
        if told != MethodOptions._field_defaults[option] and option not in has:
            having = ", ".join(known for known, method in every.items() if option in method.takes)
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
