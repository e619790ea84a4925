"""WallFacer (arXiv 2407.00611; later named StarTrail): teams of C ranks share the work of a ring.

P ranks form P / C teams of C members, and R = P / C^2 consecutive teams form a group: there are C groups. For P = 8,
C = 2 (R = 2), with the ranks of placement "collect_intra":

                      group 0             group 1
                  team 0   team 1     team 2   team 3
    member 0         0        2          4        6         the ring of member 0 in group 0 is ranks 0, 2
    member 1         1        3          5        7         the ring of member 1 in group 0 is ranks 1, 3

Member a of team t runs the paper's algorithm 1:

    1. gather    q, k and v of the team: every member has q_team, k_team and v_team, of C shards
    2. place     sends k_team and v_team to r_send, which is member t % C of team a R + t // C, and receives another
                 team's keys from r_recv. The C members send them to the C groups, one each
    3. ring      rotates the received keys around R ranks: member a of each team of its group. Each of a team's members
                 sees the keys of R teams, and all members together those of all P / C teams
    4. scatter   merges the partial results of the members by log-sum-exp; each member receives its own tokens

The ring has R - 1 hops, Ring Attention P - 1. With C = 1 both are the same; with C = sqrt(P) the ring has one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, isqrt
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.attention_mask import layout_of
from armillary.attention.methods.base import Method
from armillary.attention.methods.ring import Backward, Ring
from armillary.attention.rings.topology import RingTopology, RotatingSide
from armillary.attention.tiling.grid import Grid
from armillary.attention.tiling.latents import Expansion
from armillary.core import (
    Axis,
    FlatBuffer,
    SequenceLayout,
    start_all_gather,
    start_exchange,
    start_merge_scatter,
    start_reduce_scatter,
)
from armillary.core.internal import check_bool, check_choice, integer

Placement = Literal["collect_intra", "p2p_intra"]
Tensors = Sequence[Tensor]
PendingGather = Callable[[], tuple[Tensor, ...]]
"""Waits for the tensors of an all-gather in flight and returns them."""


class WallFacer(Method):
    """WallFacer over one mesh axis of P ranks, in teams of C; C^2 divides P.

    The full sequence is q [B, N, H, D], k [B, N_k, K, D], v [B, N_k, K, Dv] and out [B, N, H, Dv], sharded on dim 1; a
    rank has T queries and S keys of it. Any layout is exact; `layout` returns one with even work, zigzag by default.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. Communicators are created on it and for its teams, so every rank of
            the axis must construct the method. Construct it once and share it between layers.
        team: C.
        placement: "collect_intra" makes the members of a team neighbours, "p2p_intra" the ranks of a ring.
        backward: the side that rotates in backward: "keys", or "queries" as published; "auto" chooses as in `Ring`.
        gather_keys: True gathers the team's keys on each member, which sends them on together, as published. False
            makes each member send only its own keys, to all C target ranks of its team: (C - 1) 2 B T K D e less within
            teams, the same bytes between teams.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, with Dv = D and N_k = N:

        forward    gather q, k, v          (C - 1) (B T H D e + 2 B T K D e)       all-gather
                   place k, v              C 2 B T K D e                           p2p
                   ring                    (R - 1) C 2 B T K D e                   p2p
                   scatter out, lse        (C - 1) (B T H D e + B T H a)           reduce-scatter
        backward   gather q, out, dout,    (C - 1) (3 B T H D e + B T H a)         all-gather
                   lse
                   gather and place k, v   as in forward
                   ring                    R - 1 hops of C times the bytes of a hop of `Ring`
                   return dk, dv           C 2 B T K D a p2p, then (C - 1) 2 B T K D a reduce-scatter
                   scatter dq              (C - 1) B T H D a                       reduce-scatter

    Under a mask the ring sends less, as `Ring` does. A rank that is its own r_send sends nothing to place and return
    keys. With `gather_keys=False` a rank that is the r_send of any member of its team sends 1 / C less, and the (C - 1)
    terms of k, v, dk and dv are 0.

    Raises:
        ValueError: `team` is not an integer of at least 1 whose square divides P; an unknown placement or backward;
            `gather_keys` is not a bool.
    """

    def __init__(
        self,
        axis: DeviceMesh,
        team: int,
        placement: Placement = "collect_intra",
        backward: Backward = "auto",
        gather_keys: bool = True,
    ) -> None:
        self.axis: Axis = Axis.of(axis)
        self.teams: Teams = Teams(self.axis.size, team, placement)
        self.gather_keys: bool = check_bool("gather_keys", gather_keys)
        self.team_index: int
        self.member: int
        self.team_index, self.member = self.teams.team_and_member(self.axis.rank)
        self.team_ring: TeamRing = TeamRing(self.axis, self.teams, backward)
        self.team_axis: Axis = self.axis.part(self.teams.team_ranks(self.team_index))
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    takes_latents = True

    @property
    def balanced_by(self) -> None:
        """None: both sides are made even, and bytes are ignored."""
        return None

    def layout(
        self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        return self.teams.layout(length, kind, mask, states)

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Runs the `plan` of the ring between teams."""
        self.team_ring.plan(self._team_spec(spec), self._team_spec(previous), rows)

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> PendingGather:
        """Starts to gather q_team (step 1)."""
        return self._gather((q,), layout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        return self.forward_prefetched(None, q, k, v, spec, expansion)

    def forward_prefetched(
        self,
        pending_q: PendingGather | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
        /,
    ) -> tuple[Tensor, Saved]:
        # 1, 2: q_team is in flight while k_team and v_team are gathered and sent to r_send.
        pending_q = pending_q or self._gather((q,), spec.layout)
        (ring_k, ring_v), (q_team,) = self._place_keys(k, v, spec), pending_q()
        # 3: R - 1 hops: partial out and lse of the team's queries over the keys of R teams, 1 / C of all keys.
        partial_out, partial_saved = self.team_ring.forward(q_team, ring_k, ring_v, self._team_spec(spec), expansion)
        partial_lse = partial_saved.lse
        # Freed before the reduce-scatter's buffers are allocated; `pending_q` and `partial_saved` refer to them too.
        del pending_q, q_team, ring_k, ring_v, partial_saved
        # 4: reduce-scatter over the team, by log-sum-exp: the final out and lse of this rank's own queries.
        out, lse = start_merge_scatter(partial_out, partial_lse, self.team_axis, self._sizes(spec.layout)).wait()
        return out, Saved(q, k, v, out, lse)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # 1, 2: as in forward; the gradient of queries also needs out, dout and lse.
        pending = self._gather((saved.q, saved.out, dout, saved.lse), spec.layout)
        k, v = self._place_keys(saved.k, saved.v, spec)
        q, out, dout, lse = pending()
        # 3: dq of the team's queries, from 1 / C of all keys; dk and dv of the received keys, from the group's queries.
        dq, dk, dv = self.team_ring.backward(dout, Saved(q, k, v, out, lse), self._team_spec(spec), expansion)
        del pending, q, k, v, out, dout, lse  # freed before the buffers of the returning gradients are allocated
        # 4: sums over the team. dq is in flight while dk and dv return to the ranks that sent the keys.
        pending_dq = start_reduce_scatter(dq, self.team_axis, self._sizes(spec.layout))
        dk, dv = self._return_key_grads((dk, dv), spec)
        return pending_dq.wait(), dk, dv

    def _team_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec of the ring's attention, whose layouts have one shard per team. Cached per spec."""
        by_teams = self.teams.by_teams
        return spec.cached(
            "teams", lambda: replace(spec, layout=by_teams(spec.layout), key_layout=by_teams(spec.key_layout))
        )

    def _sizes(self, layout: SequenceLayout, team: int | None = None) -> tuple[int, ...]:
        """Returns the number of tokens of each member of team `team`, by default of this rank's team."""
        return tuple(layout.sizes[rank] for rank in self.teams.team_ranks(self.team_index if team is None else team))

    def _gather(self, tensors: Tensors, layout: SequenceLayout) -> PendingGather:
        """Starts to gather [B, T, ...] tensors of all members of the team (step 1).

        Returns:
            A function that waits, and returns the tensors [B, C T, ...].
        """
        pending = [start_all_gather(x, self.team_axis, self._sizes(layout)) for x in tensors]
        return lambda: tuple(transfer.wait() for transfer in pending)

    def _place_keys(self, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensors:
        """Returns k and v, C S tokens, of the team whose keys this rank has at the ring's first step (steps 1, 2)."""
        teams = self.teams
        source_team, source_member = teams.key_source(self.team_index, self.member)
        source_sizes = self._sizes(spec.key_layout, source_team)
        if self.gather_keys:
            # Sends k_team, v_team to r_send, and receives another team's keys from r_recv.
            kv_team = self._gather((k, v), spec.key_layout)()
            send = {teams.key_target(self.team_index, self.member): kv_team}
            receive = {teams.rank(source_team, source_member): sum(source_sizes)}
            (ring_kv,) = self._exchange(send, receive)
            return ring_kv
        # Sends this rank's k, v to r_send of each member of its team, and receives k, v from each member of one other
        # team. The same tuple for all targets: `_exchange` packs it once.
        own_kv = (k, v)
        send = {teams.key_target(self.team_index, member): own_kv for member in range(teams.team_size)}
        receive = {teams.rank(source_team, member): size for member, size in enumerate(source_sizes)}
        return [torch.cat(x, dim=1) for x in zip(*self._exchange(send, receive), strict=True)]

    def _return_key_grads(self, grads: Tensors, spec: AttentionSpec) -> Tensors:
        """Returns dk and dv of this rank's own S tokens, summed over all ranks: `_place_keys` in reverse.

        Args:
            grads: dk and dv of the C S tokens that `_place_keys` returned.
        """
        teams = self.teams
        source_team, source_member = teams.key_source(self.team_index, self.member)
        sizes, source_sizes = self._sizes(spec.key_layout), self._sizes(spec.key_layout, source_team)
        if self.gather_keys:
            # Returns dk, dv to the sender of the keys, then sums this team's dk, dv over its members.
            send = {teams.rank(source_team, source_member): grads}
            receive = {teams.key_target(self.team_index, self.member): sum(sizes)}
            (team_grads,) = self._exchange(send, receive)
            pending = [start_reduce_scatter(x, self.team_axis, sizes) for x in team_grads]
            return [transfer.wait() for transfer in pending]
        # Sends each member of the other team the gradients of its tokens. Receives the gradients of this rank's tokens
        # from the C ranks that have its keys, and sums them.
        member_grads = zip(*(x.split(source_sizes, dim=1) for x in grads), strict=True)
        send = {teams.rank(source_team, member): x for member, x in enumerate(member_grads)}
        own_size = sizes[self.member]
        receive = {teams.key_target(self.team_index, member): own_size for member in range(teams.team_size)}
        return [torch.stack(x).sum(0) for x in zip(*self._exchange(send, receive), strict=True)]

    def _exchange(self, send: Mapping[int, Tensors], receive: Mapping[int, int]) -> list[Tensors]:
        """Sends and receives tensors, and waits. A rank may send to itself, which copies nothing.

        Args:
            send: for each receiving rank, the tensors [B, t, ...] to send.
            receive: for each sending rank, the number of tokens t that it sends. Other dims are as in `send`.

        Returns:
            The tensors from each rank of `receive`, in its order.
        """
        own_rank, like = self.axis.rank, next(iter(send.values()))
        # Keyed by `id`: tensors that are sent to several ranks are packed into one buffer.
        buffers = {id(tensors): FlatBuffer.of(tensors) for rank, tensors in send.items() if rank != own_rank}
        send_buffers = {rank: buffers[id(tensors)] for rank, tensors in send.items() if rank != own_rank}
        receive_buffers = {rank: FlatBuffer.like(like, tokens) for rank, tokens in receive.items() if rank != own_rank}
        start_exchange(self.axis, send_buffers, receive_buffers).wait()
        return [send[rank] if rank == own_rank else receive_buffers[rank].tensors for rank in receive]


class TeamRing(Ring):
    """Ring Attention among the same member of each team of a group (step 3). A shard is the tokens of a team."""

    def __init__(self, axis: Axis, teams: Teams, backward: Backward) -> None:
        super().__init__(axis, backward)
        team, self.member = teams.team_and_member(axis.rank)
        self.teams, self.group = teams, team // teams.ring_size

    def topology(self, side: RotatingSide, spec: AttentionSpec) -> tuple[RingTopology, Grid]:
        return self.teams.ring_of(self.group, self.member, side), spec.grid


# -- the arrangement of ranks, without communication -------------------------------------------------------------------


def fitting_teams(ranks: int) -> list[int]:
    """Returns each team size C whose square divides the number of ranks."""
    return [c for c in range(1, isqrt(ranks) + 1) if ranks % c**2 == 0]


@dataclass(frozen=True)
class Teams:
    """Teams of the ranks of one axis.

    Args:
        ranks: P.
        team_size: C, the number of members of a team (d_a in the paper).
        placement: "collect_intra" makes the members of a team neighbours on the axis, so that the collectives of a team
            stay within a node; "p2p_intra" makes the ranks of a ring neighbours, so that its sends do.

    Raises:
        ValueError: a team size that is not an integer of at least 1, or whose square does not divide P; an unknown
            placement.
    """

    ranks: int
    team_size: int
    placement: Placement

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, get_args(Placement))
        object.__setattr__(self, "team_size", integer("team", self.team_size))
        if self.team_size < 1 or self.ranks % self.team_size**2:
            raise ValueError(
                f"team={self.team_size}: its square must divide the {self.ranks} ranks; "
                f"possible: {fitting_teams(self.ranks)}"
            )

    @property
    def ring_size(self) -> int:
        """R = P / C^2: the number of ranks of a ring, and of teams of a group (the paper's team group size)."""
        return self.ranks // self.team_size**2

    def rank(self, team: int, member: int) -> int:
        """Returns the rank on the axis of member `member` (r_a in the paper) of team `team` (r_t)."""
        if self.placement == "collect_intra":
            return team * self.team_size + member
        group, index = divmod(team, self.ring_size)
        return (group * self.team_size + member) * self.ring_size + index

    def team_and_member(self, rank: int) -> tuple[int, int]:
        """Returns (team, member) of a rank: the inverse of `rank`."""
        if self.placement == "collect_intra":
            return divmod(rank, self.team_size)
        # Rings are consecutive runs of R ranks: first the rings of group 0, by member, then those of group 1, ...
        ring, index = divmod(rank, self.ring_size)
        group, member = divmod(ring, self.team_size)
        return group * self.ring_size + index, member

    def team_ranks(self, team: int) -> tuple[int, ...]:
        """Returns the ranks of a team, in member order."""
        return tuple(self.rank(team, member) for member in range(self.team_size))

    # -- algorithms 2 and 3 of the paper ------------------------------------------------------------------------------

    def key_target(self, team: int, member: int) -> int:
        """Returns the rank to which a member sends its team's keys before the ring (get_init_send, algorithm 2)."""
        # Member a of team t sends to member t % C of team a R + t // C. So the C members send the keys to a different
        # group each, and the ranks of a ring receive the keys of different teams.
        return self.rank(member * self.ring_size + team // self.team_size, team % self.team_size)

    def key_source(self, team: int, member: int) -> tuple[int, int]:
        """Returns the (team, member) from which a member receives keys before the ring: the inverse of `key_target`."""
        group, index = divmod(team, self.ring_size)
        return index * self.team_size + member, group

    def ring_of(self, group: int, member: int, rotating_side: RotatingSide) -> RingTopology:
        """Returns the ring of the same member of each team of a group (algorithm 3). A shard is a team (`by_teams`)."""
        teams = tuple(group * self.ring_size + index for index in range(self.ring_size))
        key_teams = tuple(self.key_source(team, member)[0] for team in teams)
        stationary_teams, rotating_teams = (teams, key_teams) if rotating_side == "keys" else (key_teams, teams)
        return RingTopology(
            tuple(self.rank(team, member) for team in teams), stationary_teams, rotating_teams, rotating_side
        )

    def rings(self, rotating_side: RotatingSide) -> list[RingTopology]:
        """Returns all C^2 rings: one for each member of each of the C groups."""
        members = range(self.team_size)
        return [self.ring_of(group, member, rotating_side) for group in range(self.team_size) for member in members]

    # -- layouts ------------------------------------------------------------------------------------------------------

    def layout(
        self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        """Returns the layout over P ranks in which the tokens of each team together are a shard of layout `kind`.

        Raises:
            ValueError: an unknown kind, or fewer tokens than ranks.
        """
        if kind == "balanced" and not states:
            # Balanced by pairs alone (`balanced_by=None`): teams gather all their queries and keys anyway, so that
            # keeping documents uncut would save almost no bytes.
            teams = self.deal(layout_of(kind, length, self.ring_size, mask, balanced_by=None))
        else:
            # Teams share no documents token by token if a state runs along the tokens: each has runs of neighbours.
            teams = layout_of(kind, length, self.ranks // self.team_size, mask, balanced_by=None, states=states)
        return self.in_rank_order(teams.refine(self.team_size))

    def by_teams(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns the layout over P / C teams: shard t has the tokens of all members of team t, in member order."""
        teams = map(self.team_ranks, range(self.ranks // self.team_size))
        return SequenceLayout([[span for rank in ranks for span in layout.spans(rank)] for ranks in teams])

    def in_rank_order(self, members: SequenceLayout) -> SequenceLayout:
        """Returns the layout over ranks.

        Args:
            members: layout with one shard per rank, ordered by team and then by member.
        """
        team_members = map(self.team_and_member, range(self.ranks))
        return SequenceLayout([members.spans(team * self.team_size + member) for team, member in team_members])

    def deal(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns a layout over P / C teams: the tokens of each shard are dealt, one by one, to C teams.

        Ranks are then as balanced as the R shards are, under any mask.

        Args:
            layout: a layout over R shards.

        Raises:
            ValueError: fewer tokens than ranks.
        """
        # If keys rotate, member a of team t computes the queries of team t against the keys of teams a, a + C, a + 2 C,
        # ... If queries rotate, it computes the queries of all teams of its group against one of these teams' keys.
        # The C teams that share a shard are in different groups and have different t % C (`dealt_team`). So each member
        # number gets an equal part of the shard's keys, within one token, and each group an equal part of its queries.
        if layout.length < self.ranks:
            raise ValueError(f"a sequence of {layout.length} tokens is shorter than its {self.ranks} shards")
        team_spans = dict[int, list[range]]()
        for shard in range(self.ring_size):
            # Group 0 gets tokens 0, n, 2 n, ... of the shard. `starts` are the first tokens of its spans.
            spans, n = layout.spans(shard), self.team_size
            starts = list(accumulate(map(len, spans), initial=0))
            for group in range(n):
                group_spans = [span[(group - start) % n :: n] for span, start in zip(spans, starts, strict=False)]
                team_spans[self.dealt_team(shard, group)] = group_spans
        return SequenceLayout([team_spans[team] for team in range(self.ranks // self.team_size)])

    def dealt_team(self, shard: int, group: int) -> int:
        """Returns the team t of group `group` that takes tokens of `shard`, one of R.

        The C teams that share a shard have different t % C.
        """
        # Team t = g R + offset, because group g starts at team g R. As g counts the C groups, g R modulo C runs d times
        # through the C / d multiples of d = gcd(R, C). So the offset grows by 1, modulo d, after each run, and t % C
        # takes each value once.
        divisor = gcd(self.ring_size, self.team_size)
        first = shard - shard % divisor
        return group * self.ring_size + first + (shard + group * divisor // self.team_size) % divisor
