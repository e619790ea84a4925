"""WallFacer (arXiv 2407.00611; later named StarTrail): teams of C ranks share the work of a ring.

P ranks form teams of C, and R = P / C^2 consecutive teams form a group: there are C groups. Rank (team t, member a)
does the steps of the paper's algorithm 1:

    1. gather    q, k, v of the team: every member has q_team, k_team and v_team of C shards
    2. place     k_team, v_team are sent to r_send: member t % C of team a R + t // C, which is in group a
    3. ring      the same member of each of a group's R teams: they rotate keys; the members of a team together see all
                 P / C teams
    4. scatter   partial results are merged by log-sum-exp, and each member receives its own tokens

C = 1 is Ring Attention; at C = sqrt(P) there is no ring. The ring has R - 1 hops, Ring Attention P - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.attention.methods.ring import Backward, Ring
from armillary.attention.methods.teams import Placement, Teams
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import RotatingSide
from armillary.core import (
    Axis,
    FlatBuffer,
    SequenceLayout,
    start_all_gather,
    start_exchange,
    start_merge_scatter,
    start_reduce_scatter,
)
from armillary.core.validation import check_bool

Tensors = Sequence[Tensor]
PendingGather = Callable[[], tuple[Tensor, ...]]
"""Waits for the tensors of an all-gather in flight and returns them."""


class WallFacer(Method):
    """WallFacer over one mesh axis of P ranks, in teams of C; C^2 divides P.

    The full sequence is q, out [B, N, H, D], k [B, N_k, K, D] and v [B, N_k, K, Dv], sharded on dim 1; a rank has T
    queries and S keys of it. Any layout is exact; `layout` returns one with even work, zigzag by default.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. Communicators are created on it and for its teams, so every rank of
            the axis must construct the method. Construct it once and share it between layers.
        team: C.
        placement: "collect_intra" makes the members of a team neighbours, "p2p_intra" the ranks of a ring.
        backward: the side that rotates in backward: keys, or queries as published; "auto" takes the one that
            sends fewer bytes.
        gather_keys: gathers the team's keys, then sends them together, as published. False: each rank sends its own
            keys to the C target ranks: (C - 1) 2 B T K D e less within teams, the same bytes between teams.

    Bytes sent by a rank, with Dv = D and N_k = N. Forward: (C - 1) (B T H D e + 2 B T K D e) all-gather, C 2 B T K D e
    for each of up to R exchanges p2p, (C - 1) (B T H D e + B T H a) reduce-scatter. Backward:
    (C - 1) (3 B T H D e + B T H a) all-gather; keys gathered and placed again; the ring, with C times the bytes of
    `Ring` a step; then (C - 1) 2 B T K D a and C 2 B T K D a to return dk and dv, and (C - 1) B T H D a for dq. The
    ring sends less under a mask, as `Ring` does, and a rank that is its own r_send places nothing. With
    `gather_keys=False` the (C - 1) terms of keys, dk and dv are 0.

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
        self.gather_keys = check_bool("gather_keys", gather_keys)
        self.seat = self.teams.seat(self.axis.rank)  # (team, member)
        self.team_ring = TeamRing(self.axis, self.teams, backward)
        self.team_axis = self.axis.part(self.teams.team_ranks(self.seat[0]))
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        return self.teams.layout(length, kind, mask)

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        self.team_ring.plan(self._team_spec(spec), self._team_spec(previous), rows)

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> PendingGather:
        return self._gather((q,), layout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        return self.forward_prefetched(None, q, k, v, spec)

    def forward_prefetched(
        self, pending_q: PendingGather | None, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /
    ) -> tuple[Tensor, Saved]:
        # 1, 2: q_team is in flight while k_team and v_team are gathered and sent to r_send.
        pending_q = pending_q or self._gather((q,), spec.layout)
        (ring_k, ring_v), (q_team,) = self._place_keys(k, v, spec), pending_q()
        # 3: R - 1 hops; the partial O and lse of the team's queries over 1 / C of all keys.
        _, partial_result = self.team_ring.forward(q_team, ring_k, ring_v, self._team_spec(spec))
        del q_team, ring_k, ring_v
        # 4: reduce-scatter over the team, by log-sum-exp: O_final of this rank's own queries.
        sizes = self._sizes(spec.layout)
        out, lse = start_merge_scatter(partial_result.out, partial_result.lse, self.team_axis, sizes).wait()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        # 1, 2: as in forward; the gradient of queries also needs out, dout and lse.
        pending = self._gather((saved.q, saved.out, dout, saved.lse), spec.layout)
        k, v = self._place_keys(saved.k, saved.v, spec)
        q, out, dout, lse = pending()
        # 3: dq of the team's queries from 1 / C of all keys; dk and dv of the placed keys from the group's queries.
        dq, dk, dv = self.team_ring.backward(dout, Saved(q, k, v, out, lse), self._team_spec(spec))
        del pending, q, k, v, out, dout, lse  # freed before the buffers of the returning gradients are allocated
        # 4: sums over the team. dq is in flight while dk and dv return to the ranks that sent the keys.
        pending_dq = start_reduce_scatter(dq, self.team_axis, self._sizes(spec.layout))
        dk, dv = self._return_key_grads((dk, dv), spec)
        return pending_dq.wait(), dk, dv

    def _team_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec of the ring's attention, whose layouts have a shard for each team. Cached per spec."""
        by_teams = self.teams.by_teams
        return spec.cached(
            "teams", lambda: replace(spec, layout=by_teams(spec.layout), key_layout=by_teams(spec.key_layout))
        )

    def _sizes(self, layout: SequenceLayout, team: int | None = None) -> tuple[int, ...]:
        """Returns the number of tokens of each member of a team, by default this rank's."""
        return self.teams.member_sizes(layout, self.seat[0] if team is None else team)

    def _gather(self, tensors: Tensors, layout: SequenceLayout) -> PendingGather:
        """Starts to gather [B, T, ...] tensors of the team (step 1). The result waits for [B, C T, ...]."""
        pending = [start_all_gather(x, self.team_axis, self._sizes(layout)) for x in tensors]
        return lambda: tuple(transfer.wait() for transfer in pending)

    def _place_keys(self, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensors:
        """Returns k, v [B, C T, K, D] of the team whose keys this rank has at the ring's first step (steps 1, 2)."""
        teams, (source_team, source_member) = self.teams, self.teams.key_source(*self.seat)
        source_sizes = self._sizes(spec.key_layout, source_team)
        if self.gather_keys:
            # Sends k_team, v_team to r_send, and receives another team's from r_recv.
            kv_team = self._gather((k, v), spec.key_layout)()
            receive = {teams.rank(source_team, source_member): sum(source_sizes)}
            (ring_kv,) = self._exchange({teams.key_target(*self.seat): kv_team}, receive)
            return ring_kv
        # Sends own k, v to the C target ranks of the team, and receives k, v from each member of another team.
        own_kv = (k, v)
        send = {teams.key_target(self.seat[0], member): own_kv for member in range(teams.team)}
        receive = {teams.rank(source_team, member): size for member, size in enumerate(source_sizes)}
        return [torch.cat(x, dim=1) for x in zip(*self._exchange(send, receive), strict=True)]

    def _return_key_grads(self, grads: Tensors, spec: AttentionSpec) -> Tensors:
        """Returns dk, dv [B, T, K, D] of this rank's own keys, summed over all ranks: `_place_keys` in reverse.

        Args:
            grads: dk and dv of the keys that `_place_keys` returned.
        """
        teams, (source_team, source_member) = self.teams, self.teams.key_source(*self.seat)
        sizes, source_sizes = self._sizes(spec.key_layout), self._sizes(spec.key_layout, source_team)
        if self.gather_keys:
            # Returns dk, dv to the sender of the keys, then reduce-scatters them over the team.
            receive = {teams.key_target(*self.seat): sum(sizes)}
            (team_grads,) = self._exchange({teams.rank(source_team, source_member): grads}, receive)
            pending = [start_reduce_scatter(x, self.team_axis, sizes) for x in team_grads]
            return [transfer.wait() for transfer in pending]
        # Sends each member its tokens, and sums the gradients from the C ranks that have this rank's keys.
        member_grads = zip(*(x.split(source_sizes, dim=1) for x in grads), strict=True)
        send = {teams.rank(source_team, member): x for member, x in enumerate(member_grads)}
        receive = {teams.key_target(self.seat[0], member): sizes[self.seat[1]] for member in range(teams.team)}
        return [torch.stack(x).sum(0) for x in zip(*self._exchange(send, receive), strict=True)]

    def _exchange(self, send: Mapping[int, Tensors], receive: Mapping[int, int]) -> list[Tensors]:
        """Sends and receives tensors, and waits. Tensors for this rank itself are returned without a copy.

        Args:
            send: [B, t, ...] tensors by receiving rank.
            receive: number of tokens on dim 1 by sending rank, for tensors that are otherwise shaped alike.

        Returns:
            The tensors of each rank, in the order of `receive`.
        """
        own_rank, like = self.axis.rank, next(iter(send.values()))
        # Keyed by `id`: the same tensors may be sent to several ranks, and are packed once.
        buffers = {id(tensors): FlatBuffer.of(tensors) for rank, tensors in send.items() if rank != own_rank}
        send_buffers = {rank: buffers[id(tensors)] for rank, tensors in send.items() if rank != own_rank}
        receive_buffers = {rank: FlatBuffer.like(like, tokens) for rank, tokens in receive.items() if rank != own_rank}
        start_exchange(self.axis, send_buffers, receive_buffers).wait()
        return [send[rank] if rank == own_rank else receive_buffers[rank].tensors for rank in receive]


class TeamRing(Ring):
    """Ring Attention among one member of each team of a group (step 3). Shards are teams."""

    def __init__(self, axis: Axis, teams: Teams, backward: Backward) -> None:
        super().__init__(axis, backward)
        (team, self.member), self.teams = teams.seat(axis.rank), teams
        self.group = team // teams.ring_size

    def rotation(self, side: RotatingSide, spec: AttentionSpec) -> Rotation:
        def make() -> Rotation:
            topology = self.teams.ring_of(self.group, self.member, side)
            return Rotation.of(self.axis, self.return_axis, topology, spec.grid)

        return spec.cached((side, id(self.axis)), make)
