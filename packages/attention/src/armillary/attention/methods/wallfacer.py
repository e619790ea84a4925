"""WallFacer (arXiv 2407.00611; later named StarTrail): teams of ranks that share a ring's work.

P ranks form teams of C, and R = P / C^2. Rank (team t, member a) does, in the order of the paper:

    1. gather   q, k, v of the team: every member has the queries and keys of C shards
    2. place    the team's k, v go to group a, team a R + t // C, member t % C
    3. ring     R ranks, one of each team of a group, pass keys on: together a team's members see all P / C teams
    4. scatter  partial results are merged by log-sum-exp, each member keeps its own tokens

C = 1 is Ring Attention; at C = sqrt(P) there is no ring. The ring makes R - 1 steps where Ring Attention makes P - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Step,
    Steps,
    all_gather,
    move,
    reduce_scatter,
    steps,
)
from armillary.attention.layouts import layout_of
from armillary.attention.mask import AttentionMask
from armillary.attention.memory import Sizes, kernel_forward, rotate_keys_forward
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import Backward, MethodOptions, OnSequence, RingWalk
from armillary.attention.methods.ring import Ring, backward_steps, check_backward, forward_steps
from armillary.attention.methods.ring import backward_memory as ring_backward_memory
from armillary.attention.methods.teams import Placement, Teams, fitting_teams
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import Moving
from armillary.core import Axis, FlatBuffer, SequenceLayout, start_exchange
from armillary.core.checked import flag
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.merge import start_merge_scatter
from armillary.core.collectives.reduce_scatter import start_reduce_scatter
from armillary.core.network import Send

Tensors = Sequence[Tensor]
Gathering = Callable[[], tuple[Tensor, ...]]
"""Waits for tensors that are being gathered."""


class WallFacer(Method):
    """WallFacer over one mesh axis of P ranks, in teams of C; C^2 divides P.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. Communicators are made for it and for its teams, so every rank of the
            axis must construct the method; construct it once and share it between layers.
        team: C.
        placement: "collect_intra" makes a team's members neighbours, "p2p_intra" those of a ring.
        backward: what goes round in backward: keys or (as published) queries; "auto" takes what sends fewer bytes.
        gather_keys: as published, gather the team's keys and send them on together. Otherwise each rank sends its own
            keys to the C ranks that its team's go to: (C - 1) 2 B T K D e less within teams, as much between them.

    Bytes sent, forward: (C - 1) (B T H D e + 2 B T K D e) all-gather, C 2 B T K D e for each of up to R exchanges p2p,
    (C - 1) (B T H D e + B T H a) reduce-scatter. Backward: (C - 1) (3 B T H D e + B T H a) all-gather, keys brought
    and placed again, the ring with C times what `Ring` sends a step, then (C - 1) 2 B T K D a and C 2 B T K D a to
    bring dk and dv home, and (C - 1) B T H D a for dq. The ring sends less under a mask, as `Ring` does, and a rank
    that is to keep its own keys sends none away. Without `gather_keys` the (C - 1) terms of keys, dk and dv are gone.

    Raises:
        ValueError: C^2 does not divide P, or an unknown placement or backward.
    """

    def __init__(
        self,
        axis: DeviceMesh,
        team: int,
        placement: Placement = "collect_intra",
        backward: Backward = "auto",
        gather_keys: bool = True,
    ) -> None:
        self.axis = Axis.of(axis)
        self.teams = Teams(self.axis.size, team, placement)
        self.gather_keys = flag("gather_keys", gather_keys)
        self.seat = self.teams.seat(self.axis.rank)
        self.team_ring = TeamRing(self.axis, self.teams, backward)
        self.mates = self.axis.part(self.teams.mates(self.seat[0]))
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        return team_layout(self.teams, length, kind, mask)

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> Gathering:
        return self._gather((q,), layout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        return self.forward_prefetched(None, q, k, v, spec)

    def forward_prefetched(
        self, started: Gathering | None, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Saved]:
        queries = started or self._gather((q,), spec.layout)
        (k_placed, v_placed), (q_team,) = self._place_keys(k, v, spec), queries()
        _, team = self.team_ring.forward(q_team, k_placed, v_placed, self._by_teams(spec))
        del q_team, k_placed, v_placed
        out, lse = start_merge_scatter(team.out, team.lse, self.mates, self._sizes(spec.layout)).wait()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        gathered = self._gather((saved.q, saved.out, dout, saved.lse), spec.layout)
        k, v = self._place_keys(saved.k, saved.v, spec)
        q, out, dout, lse = gathered()
        dq, dk, dv = self.team_ring.backward(dout, Saved(q, k, v, out, lse), self._by_teams(spec))
        del gathered, q, k, v, out, dout, lse  # gradients go back in their place
        queries = start_reduce_scatter(dq, self.mates, self._sizes(spec.layout))
        dk, dv = self._bring_home((dk, dv), spec)
        return queries.wait(), dk, dv

    def _by_teams(self, spec: AttentionSpec) -> AttentionSpec:
        """The call over teams as shards."""
        layout = self.teams.layout
        return spec.once("teams", lambda: replace(spec, layout=layout(spec.layout), key_layout=layout(spec.key_layout)))

    def _sizes(self, layout: SequenceLayout, team: int | None = None) -> tuple[int, ...]:
        """Tokens of each member of a team, by default this rank's."""
        return self.teams.sizes(layout, self.seat[0] if team is None else team)

    def _gather(self, tensors: Sequence[Tensor], layout: SequenceLayout) -> Gathering:
        """Step 1: starts gathering the team's tokens; the result waits for them."""
        moving = [start_all_gather(x, self.mates, self._sizes(layout)) for x in tensors]
        return lambda: tuple(move.wait() for move in moving)

    def _place_keys(self, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensors:
        """Steps 1 and 2 for keys: from this rank's own to those of the team that it keeps."""
        teams, (kept_team, kept_member) = self.teams, self.teams.kept(*self.seat)
        sizes = self._sizes(spec.key_layout, kept_team)
        if self.gather_keys:
            mine = self._gather((k, v), spec.key_layout)()
            (kept,) = self._swap({teams.keeper(*self.seat): mine}, {teams.rank(kept_team, kept_member): sum(sizes)})
            return kept
        own = (k, v)
        send = {teams.keeper(self.seat[0], a): own for a in range(teams.team)}
        parts = self._swap(send, {teams.rank(kept_team, a): size for a, size in enumerate(sizes)})
        return [torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)]

    def _bring_home(self, grads: Tensors, spec: AttentionSpec) -> Tensors:
        """Step 2 backwards: from sums for the keys that this rank keeps to those for its own."""
        teams, (kept_team, kept_member) = self.teams, self.teams.kept(*self.seat)
        mine, kept = self._sizes(spec.key_layout), self._sizes(spec.key_layout, kept_team)
        if self.gather_keys:
            (team,) = self._swap({teams.rank(kept_team, kept_member): grads}, {teams.keeper(*self.seat): sum(mine)})
            moving = [start_reduce_scatter(x, self.mates, mine) for x in team]
            return [move.wait() for move in moving]
        pieces = zip(*(x.split(kept, dim=1) for x in grads), strict=True)
        send = {teams.rank(kept_team, a): piece for a, piece in enumerate(pieces)}
        own = mine[self.seat[1]]
        parts = self._swap(send, {teams.keeper(self.seat[0], a): own for a in range(teams.team)})
        return [torch.stack(shares).sum(0) for shares in zip(*parts, strict=True)]

    def _swap(self, send: Mapping[int, Tensors], receive: Mapping[int, int]) -> list[Tensors]:
        """Sends tensors by rank, and receives as many like them, with so many tokens, by rank; in the order of these.

        What this rank would send itself stays where it is.
        """
        me, like = self.axis.rank, next(iter(send.values()))
        packed = {id(tensors): FlatBuffer.of(tensors) for rank, tensors in send.items() if rank != me}
        going = {rank: packed[id(tensors)] for rank, tensors in send.items() if rank != me}
        coming = {rank: FlatBuffer.like(like, tokens) for rank, tokens in receive.items() if rank != me}
        start_exchange(self.axis, going, coming).wait()
        return [send[rank] if rank == me else coming[rank].tensors for rank in receive]


def team_layout(teams: Teams, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
    """Each team has what one of P / C ranks would; for balance, every C-th token of what one of P / C^2 would."""
    if kind == "balanced":
        by_teams = teams.dealt(layout_of(kind, length, teams.ring, mask))
    else:
        by_teams = layout_of(kind, length, teams.ranks // teams.team, mask)
    return teams.seated(by_teams.refine(teams.team))


class TeamRing(Ring):
    """Step 3: Ring Attention among one member of each team of a group. Shards are teams."""

    def __init__(self, axis: Axis, teams: Teams, backward: Backward) -> None:
        super().__init__(axis, backward)
        (team, self.member), self.teams = teams.seat(axis.rank), teams
        self.group = team // teams.ring

    def ring(self, moving: Moving, spec: AttentionSpec) -> Rotation:
        def found() -> Rotation:
            topology = self.teams.ring_of(self.group, self.member, moving)
            return Rotation.of(self.axis, self.return_axis, topology, spec.grid)

        return spec.once((moving, id(self)), found)


# -- what is sent and computed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WallFacerPlan:
    """The collectives and exchanges of a call of WallFacer, on all ranks."""

    teams: Teams
    work: AttentionShape
    gather_keys: bool

    @property
    def mates(self) -> list[tuple[int, ...]]:
        """The ranks of each team."""
        return [self.teams.mates(team) for team in range(self.teams.ranks // self.teams.team)]

    @property
    def by_teams(self) -> AttentionShape:
        """The work over teams as shards."""
        layout, key_layout = (self.teams.layout(x) for x in (self.work.layout, self.work.key_layout))
        return replace(self.work, layout=layout, key_layout=key_layout)

    def gather(self, *sizes: int) -> tuple[Move, ...]:
        """Step 1 for tensors of queries, of so many bytes a token each."""
        return tuple(all_gather(self.mates, self.work.layout.sizes, size) for size in sizes)

    def scatter(self, *sizes: int) -> tuple[Move, ...]:
        """Step 4."""
        return tuple(reduce_scatter(self.mates, self.work.layout.sizes, size) for size in sizes)

    def bring(self, queries: tuple[Move, ...]) -> Steps:
        """Steps 1 and 2 for keys, beside the gathering of queries."""
        work, tokens = self.work, self.work.key_layout.sizes
        place = move("p2p", "ring", self._placing((work.k + work.v) * work.e))
        if not self.gather_keys:
            return steps(Step((*queries, place)))
        keys = (all_gather(self.mates, tokens, x * work.e) for x in (work.k, work.v))
        return steps(Step((*queries, *keys)), Step((place,)))

    def home(self, queries: tuple[Move, ...]) -> Steps:
        """Step 2 backwards, for gradients of keys, beside the scattering of those of queries; and back to members."""
        work, tokens = self.work, self.work.key_layout.sizes
        back = (Send(target, source, size) for source, target, size in self._placing((work.k + work.v) * work.a))
        keys = (reduce_scatter(self.mates, tokens, x * work.a) for x in (work.k, work.v))
        return steps(Step((*queries, move("p2p", "ring", back))), Step(tuple(keys) if self.gather_keys else ()))

    def _placing(self, size: int) -> Iterator[Send]:
        """To each keeper of a team its keys, of so many bytes a token: from one member, or each its own."""
        tokens = self.work.key_layout.sizes
        for team, mates in enumerate(self.mates):
            for member, rank in enumerate(mates):
                keeper = self.teams.keeper(team, member)
                if self.gather_keys:
                    yield Send(rank, keeper, sum(tokens[mate] for mate in mates) * size)
                else:
                    yield from (Send(mate, keeper, tokens[mate] * size) for mate in mates)


def comm_plan(
    work: AttentionShape,
    team: int,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
    gather_keys: bool = True,
) -> CommPlan:
    """What `WallFacer` with these options sends and computes over the shards of `work`."""
    parts = WallFacerPlan(Teams(work.layout.shards, team, placement), work, gather_keys)
    by_teams, lse, e = parts.by_teams, work.lse * work.a, work.e
    ring = forward_steps(by_teams, parts.teams.rings("keys"))
    back = backward_steps(by_teams, check_backward(backward), parts.teams.rings)
    inputs = parts.gather(work.q * e, work.out * e, work.out * e, lse)
    return CommPlan(
        steps(*parts.bring(parts.gather(work.q * e)), *ring, Step(parts.scatter(work.out * e, lse))),
        steps(*parts.bring(inputs), *back, *parts.home(parts.scatter(work.q * work.a))),
    )


def walk(layout: SequenceLayout, teams: Teams) -> RingWalk:
    """Step 3."""
    by_teams = teams.layout(layout)
    return RingWalk(by_teams, by_teams, teams.rings("keys"))


def published_bytes(work: AttentionShape, team: int) -> tuple[int, int]:
    """As arXiv 2407.00611 counts it: P / C^2 steps of a team's k and v; and q, k, v and out within the team."""
    ranks = work.layout.shards
    queries, keys = (work.layout.length // ranks * n * work.e for n in (work.q + work.out, work.k + work.v))
    return ranks // team * keys, (team - 1) * (queries + keys)


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, ranks: int, team: int) -> float:
    """q, k and v of the team, a ring of R = P / C^2 ranks over them, and then the members' parts of out and lse."""
    if team == 1:
        return rotate_keys_forward(x, ranks)
    all_, gathered = x.times(team), team * (x.q + 2 * x.k)
    ring = rotate_keys_forward(all_, ranks // team**2, onward=1)
    merging = 2 * kernel_forward(all_) + 2 * x.w * x.q + 5 * x.lse
    return gathered + max(ring, merging)


def backward_memory(x: Sizes, ranks: int, team: int, backward: Backward = "auto") -> float:
    """q, k, v, out, dout and lse of the team, a ring over them, and then each member's parts of the gradients.

    These are summed in float32: what is sent, what came, and the sums for dk and dv.
    """
    if team == 1:
        return ring_backward_memory(x, ranks, backward)
    all_ = x.times(team)
    gathered = all_.rotating + 2 * all_.k
    ring = ring_backward_memory(all_, ranks // team**2, backward, onward=1)
    home = 2 * x.w * (all_.q + 2 * all_.k) + 2 * x.w * x.k
    return max(gathered + ring, home)


# -- options ----------------------------------------------------------------------------------------------------------


def team_of(options: MethodOptions, ranks: int) -> int:
    """C as it is asked for, or the largest that fits."""
    return fitting_teams(ranks)[-1] if options.team is None else options.team


def arguments(options: MethodOptions, ranks: int) -> tuple[int, Placement, Backward]:
    """What follows the axis or the work, for so many ranks."""
    return team_of(options, ranks), options.placement, options.backward


def variants(ranks: int) -> Iterator[MethodOptions]:
    """Teams from 2 on, as with 1 it is Ring, in both placements."""
    for team in fitting_teams(ranks)[1:]:
        for placement in get_args(Placement):
            yield MethodOptions(team=team, placement=placement)


def shown(options: MethodOptions) -> str:
    """Such as " C=2 p2p_intra"."""
    placement = "" if options.placement == "collect_intra" else f" {options.placement}"
    return f"{'' if options.team is None else f' C={options.team}'}{placement}"


REGISTERED = OnSequence(
    build=lambda axis, options: WallFacer(axis, *arguments(options, axis.size())),
    comm_plan=lambda work, options: comm_plan(work, *arguments(options, work.layout.shards)),
    forward_memory=lambda x, ranks, options: forward_memory(x, ranks, team_of(options, ranks)),
    backward_memory=lambda x, ranks, options: backward_memory(x, ranks, team_of(options, ranks), options.backward),
    takes=("team", "placement", "backward"),
    variants=variants,
    shown=shown,
    layout=lambda length, ranks, options: team_layout(Teams(ranks, team_of(options, ranks), options.placement), length),
    walk=lambda layout, options: walk(layout, Teams(layout.shards, team_of(options, layout.shards), options.placement)),
    published=lambda work, options: published_bytes(work, team_of(options, work.layout.shards)),
)
