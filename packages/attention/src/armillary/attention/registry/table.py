"""The registry's tables: one line for each attention method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.base import Method
from armillary.attention.methods.local import Local
from armillary.attention.methods.ring import Ring
from armillary.attention.methods.teams import Placement, fitting_teams
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.wallfacer import WallFacer
from armillary.attention.planning.all_gather import AllGatherPlan
from armillary.attention.planning.local import LocalPlan
from armillary.attention.planning.ring import RingPlan
from armillary.attention.planning.token_ring import TokenRingPlan
from armillary.attention.planning.ulysses import UlyssesPlan
from armillary.attention.planning.upipe import UPipePlan
from armillary.attention.planning.wallfacer import WallFacerPlan
from armillary.attention.registry.entry import HeadEntry, MethodOptions, SequenceEntry


def wallfacer_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields teams of 2 ranks and more, as 1 is Ring, in both placements."""
    for team in fitting_teams(ranks)[1:]:
        for placement in get_args(Placement):
            yield MethodOptions(team=team, placement=placement)


def wallfacer_suffix(options: MethodOptions) -> str:
    """Returns options such as " C=2 p2p_intra"."""
    placement = "" if options.placement == "collect_intra" else f" {options.placement}"
    return f"{'' if options.team is None else f' C={options.team}'}{placement}"


def largest_team(options: MethodOptions, ranks: int) -> MethodOptions:
    """Takes the largest team that fits by default."""
    return options if options.team is not None else options._replace(team=fitting_teams(ranks)[-1])


def upipe_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields one and two heads per rank and stage, if that makes several stages."""
    return (MethodOptions(heads_per_stage=count) for count in (ranks, 2 * ranks) if count < heads)


def upipe_suffix(options: MethodOptions) -> str:
    """Returns options such as ", 8 heads a stage"."""
    return "" if options.heads_per_stage is None else f", {options.heads_per_stage} heads a stage"


def one_head_per_rank(options: MethodOptions, ranks: int) -> MethodOptions:
    """Takes one query head per rank and stage by default: the least memory."""
    return options if options.heads_per_stage is not None else options._replace(heads_per_stage=ranks)


def local(axis: DeviceMesh) -> Method:
    """Returns attention on one rank, which needs no axis."""
    return Local()


def ulysses(axis: DeviceMesh, inner: Method) -> Method:
    """Returns the inner method alone on a head axis of one rank."""
    return Ulysses(axis, inner) if axis.size() > 1 else inner


SEQUENCE_METHODS: dict[str, SequenceEntry] = {
    "ring": SequenceEntry(Ring, RingPlan, options=("backward",)),
    "token_ring": SequenceEntry(TokenRing, TokenRingPlan),
    "wallfacer": SequenceEntry(
        WallFacer,
        WallFacerPlan,
        options=("team", "placement", "backward"),
        resolve=largest_team,
        variants=wallfacer_variants,
        suffix=wallfacer_suffix,
    ),
    "all_gather": SequenceEntry(AllGatherKV, AllGatherPlan),
}
HEAD_METHODS: dict[str, HeadEntry] = {
    "ulysses": HeadEntry(ulysses, UlyssesPlan),
    "upipe": HeadEntry(
        UPipe,
        UPipePlan,
        options=("heads_per_stage",),
        resolve=one_head_per_rank,
        variants=upipe_variants,
        suffix=upipe_suffix,
    ),
}
LOCAL = SequenceEntry(local, LocalPlan)
"""The sequence method of one rank, and of a head axis alone."""
ALIASES = {"usp": "ulysses+ring"}
