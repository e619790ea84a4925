"""Methods by the names that people type on a command line: the only name table there is."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.all_gather import AllGatherKV
from armillary.attention.local import Local
from armillary.attention.method import Method
from armillary.attention.ring import Ring
from armillary.attention.teams import Placement
from armillary.attention.token_ring import TokenRing
from armillary.attention.ulysses import Ulysses
from armillary.attention.upipe import UPipe
from armillary.attention.wall_facer import WallFacer

SEQUENCE_METHODS: dict[str, Callable[[DeviceMesh], Method]] = {
    "ring": Ring,
    "token_ring": TokenRing,
    "wallfacer": lambda axis: WallFacer(axis, team=largest_team(axis.size())),
    "all_gather": AllGatherKV,
}
HEAD_METHODS: dict[str, Callable[[DeviceMesh, Method, int | None], Method]] = {
    "ulysses": lambda axis, inner, _: Ulysses(axis, inner) if axis.size() > 1 else inner,
    "upipe": lambda axis, inner, heads: UPipe(axis, inner, axis.size() if heads is None else heads),
}


def build_attention(
    name: str,
    mesh: DeviceMesh,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
) -> Method:
    """The method `name` on the axes of `mesh` (from `build_mesh`).

    Args:
        name: "local"; on the sequence axis "ring", "token_ring", "wallfacer" (with the largest team that fits) or
            "all_gather"; on the head axis "ulysses" or "upipe"; a pair of both, as in "upipe+wallfacer"; "usp" is
            "ulysses+ring".
        heads_per_stage: of UPipe; unless given, one query head for each rank of the head axis: the least memory.
        team, placement: of WallFacer; unless given, the largest team that fits.

    Raises:
        ValueError: an unknown name, a method that leaves an axis with more than one rank unused, or heads per stage or
            a team for a method without.
    """
    head, _, sequence = ("ulysses+ring" if name == "usp" else name).rpartition("+")
    if not head and sequence in HEAD_METHODS:
        head, sequence = sequence, "local"
    if (head and head not in HEAD_METHODS) or (sequence != "local" and sequence not in SEQUENCE_METHODS):
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    if heads_per_stage is not None and head != "upipe":
        raise ValueError(f"{name} has no stages to put {heads_per_stage} heads into; upipe has")
    _check_used(name, mesh, "ring", sequence != "local")
    _check_used(name, mesh, "ulysses", bool(head))
    if sequence == "wallfacer":
        ranks = mesh["ring"].size()
        inner = WallFacer(mesh["ring"], largest_team(ranks) if team is None else team, placement)
    elif team is not None:
        raise ValueError(f"{name} has no teams of {team} ranks; wallfacer has")
    else:
        inner = Local() if sequence == "local" else SEQUENCE_METHODS[sequence](mesh["ring"])
    return HEAD_METHODS[head](mesh["ulysses"], inner, heads_per_stage) if head else inner


def names() -> list[str]:
    """Every name that `build_attention` knows."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, "usp", *pairs]


def largest_team(ranks: int) -> int:
    """The largest C whose square divides the number of ranks."""
    return max(c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0)


def _check_used(name: str, mesh: DeviceMesh, axis: str, used: bool) -> None:
    ranks = mesh[axis].size()
    if ranks > 1 and not used:
        raise ValueError(f"{name} would leave axis {axis!r} with {ranks} ranks unused; use usp, or {axis}=1")
