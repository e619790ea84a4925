"""Communication plans equal closed forms for even shards under a full mask, and leave out tokens that no rank sees.

`test_attention_bytes.py` compares plans with the bytes that methods send.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from armillary.attention import AttentionMask, AttentionShape, CommPlan, build_comm_plan
from armillary.attention.internal import names
from armillary.attention.methods.head_shards import split_heads
from armillary.attention.methods.ring import Backward
from armillary.attention.methods.wallfacer import Teams
from armillary.attention.plans import Block, Kind, RingPlan, Send, Step, UPipePlan, WallFacerPlan
from armillary.core import SequenceLayout

B, T, H, D, P = 2, 8, 8, 16, 4  # T tokens on each of P ranks
FULL, CAUSAL = AttentionMask(causal=False), AttentionMask()
DTYPES = ((torch.float32, 4, 4), (torch.bfloat16, 2, 4), (torch.float64, 8, 8))  # with e and a
KINDS: tuple[Kind, ...] = ("p2p", "all_to_all", "all_gather", "reduce_scatter")
PHASES = ("forward", "backward")


def work_of(
    key_heads: int,
    dtype: torch.dtype = torch.float32,
    mask: AttentionMask = FULL,
    kind: str = "zigzag",
    heads: int = H,
    shards: int = P,
    length: int | None = None,
    value_dim: int = D,
) -> AttentionShape:
    layout = getattr(SequenceLayout, kind)(shards * T if length is None else length, shards)
    shape = {"heads": heads, "kv_heads": key_heads, "head_dim": D, "value_dim": value_dim}
    return AttentionShape.of(layout, mask, **shape, dtype=dtype, batch=B)


def sent_bytes(plan: CommPlan, ranks: int = P, kind: Kind | None = None) -> list[tuple[int, int]]:
    """Returns (forward, backward) bytes of each rank; asserts that the plan has no others."""
    both = [(plan.bytes(r, kind, "forward"), plan.bytes(r, kind, "backward")) for r in range(ranks)]
    assert [sum(pair) for pair in both] == [plan.bytes(r, kind) for r in range(ranks)]
    return both


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "e", "a"), DTYPES)
@pytest.mark.parametrize(("key_heads", "kind"), [(1, "zigzag"), (2, "contiguous"), (8, "striped")])
def test_ring(key_heads, dtype, e, a, kind):
    work, keys, queries = work_of(key_heads, dtype, kind=kind), 2 * B * T * key_heads * D, B * T * H
    forward = (P - 1) * keys * e
    rotating_keys = (P - 1) * keys * e + (P - 1) * keys * a
    # lse has a bytes per element
    rotating_queries = (P - 1) * (3 * queries * D * e + queries * a) + (P - 1) * queries * D * a
    assert sent_bytes(RingPlan("keys").comm_plan(work)) == [(forward, rotating_keys)] * P
    assert sent_bytes(RingPlan("queries").comm_plan(work)) == [(forward, rotating_queries)] * P
    assert sent_bytes(RingPlan().comm_plan(work)) == [(forward, min(rotating_keys, rotating_queries))] * P


@pytest.mark.parametrize(("dtype", "e", "a"), DTYPES)
@pytest.mark.parametrize("key_heads", [2, 8])
def test_token_ring(key_heads, dtype, e, a):
    queries = B * T * H
    forward = (P - 1) * queries * D * e + (P - 1) * (queries * D * e + queries * a)
    backward = (P - 1) * (3 * queries * D * e + queries * a) + (P - 1) * queries * D * a
    assert sent_bytes(build_comm_plan("token_ring", work_of(key_heads, dtype), P)) == [(forward, backward)] * P


@pytest.mark.parametrize(("dtype", "e", "a"), DTYPES)
@pytest.mark.parametrize("key_heads", [1, 8])
def test_all_gather(key_heads, dtype, e, a):
    keys = 2 * B * T * key_heads * D
    plan = build_comm_plan("all_gather", work_of(key_heads, dtype), P)
    # backward gathers keys and values again
    assert sent_bytes(plan, kind="all_gather") == [((P - 1) * keys * e, (P - 1) * keys * e)] * P
    assert sent_bytes(plan, kind="reduce_scatter") == [(0, (P - 1) * keys * a)] * P
    assert sent_bytes(plan) == [((P - 1) * keys * e, (P - 1) * keys * (e + a))] * P


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (9, 3), (6, 3), (12, 4), (7, 7), (5, 1)])
@pytest.mark.parametrize("length", [32, 37])
def test_ulysses_of_any_heads_and_tokens(heads, key_heads, length):
    """B D e [T_u sum (h_w + 2 k_w) + h_u sum T_w] over the other ranks w; and its transpose."""
    ranks, e, a = 4, 2, 4
    work = work_of(key_heads, torch.bfloat16, heads=heads, shards=1, length=length)
    tokens = work.layout.refine(ranks).sizes
    query_heads = split_heads(work.key_heads, ranks).queries
    h, k = [len(heads) for heads in query_heads], [len({work.key_heads[q] for q in heads}) for heads in query_heads]
    c = a if sum(k) > key_heads else e
    for u, actual in enumerate(sent_bytes(build_comm_plan("ulysses", work, 1, ranks), ranks)):
        peers = [w for w in range(ranks) if w != u]
        forward = tokens[u] * sum(h[w] + 2 * k[w] for w in peers) * e + h[u] * sum(tokens[w] for w in peers) * e
        dout = tokens[u] * sum(h[w] for w in peers) * e
        home = (h[u] * e + 2 * k[u] * c) * sum(tokens[w] for w in peers)
        assert actual == (B * D * forward, B * D * (dout + home))


@pytest.mark.parametrize(("dtype", "e", "a"), DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("heads_per_stage", [P, 2 * P])
def test_upipe_sends_as_much_as_ulysses_and_recomputed_tensors_in_backward(key_heads, heads_per_stage, dtype, e, a):
    work = work_of(key_heads, dtype, shards=1, length=P * T)
    queries, keys = (n * (P - 1) * B * T * D // P for n in (H, 2 * max(key_heads, P)))
    forward = (2 * queries + keys) * e
    received_bytes = (3 * queries + keys) * e  # q, out and dout, k and v come in
    home = queries * e + keys * (a if key_heads < P else e)
    plan = build_comm_plan("upipe", work, 1, P, heads_per_stage)
    assert sent_bytes(plan) == [(forward, received_bytes + home)] * P
    lse = (P - 1) * B * T * H // P * a
    finished = build_comm_plan("upipe", replace(work, projected=False), 1, P, heads_per_stage)
    assert sent_bytes(finished) == [(forward + lse, received_bytes + home + lse)] * P


@pytest.mark.parametrize("gather_keys", [True, False])
@pytest.mark.parametrize("placement", ["collect_intra", "p2p_intra"])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("team", [1, 2, 4])
def test_wall_facer(team, key_heads, placement, gather_keys):
    """Teams of 2 in rings of 4, teams of 4 without a ring; a team of 1 is Ring."""
    ranks, e, a = 16, 2, 4
    work, teams = work_of(key_heads, torch.bfloat16, shards=ranks), Teams(ranks, team, placement)
    steps, queries, keys = ranks // team**2 - 1, B * T * H, 2 * B * T * key_heads * D
    back: dict[Backward, int] = {"keys": keys * (e + a), "queries": queries * (3 * D * e + a + D * a)}
    for backward, step in back.items():
        plan = WallFacerPlan(team, placement, backward, gather_keys).comm_plan(work)
        for rank in range(ranks):
            t, member = teams.team_and_member(rank)
            if gather_keys:  # the team's keys to one target, and gradients back; none if the target is the rank
                out = home = 0 if teams.key_target(t, member) == rank else team
            else:  # its own keys to the targets of its mates; gradients to all members of its source team
                out = sum(teams.key_target(t, mate) != rank for mate in range(team))
                home = sum(teams.rank(teams.key_source(t, member)[0], mate) != rank for mate in range(team))
            k_gather, k_scatter = ((team - 1) * keys * n * gather_keys for n in (e, a))
            assert {(kind, phase): plan.bytes(rank, kind, phase) for kind in KINDS for phase in PHASES} == {
                ("all_gather", "forward"): (team - 1) * queries * D * e + k_gather,
                ("p2p", "forward"): (out + steps * team) * keys * e,
                ("reduce_scatter", "forward"): (team - 1) * queries * (D * e + a),
                ("all_gather", "backward"): (team - 1) * queries * (3 * D * e + a) + k_gather,
                ("p2p", "backward"): out * keys * e + home * keys * a + steps * team * step,
                ("reduce_scatter", "backward"): (team - 1) * queries * D * a + k_scatter,
                ("all_to_all", "forward"): 0,
                ("all_to_all", "backward"): 0,
            }


def test_model_m_of_the_wall_facer_paper():
    """N 65,536, E 6,656, 64 ranks, teams of 4, bf16, multi-head: GiB in a block's forward (arXiv 2407.00611)."""
    layout, gib = SequenceLayout.contiguous(65536, 64), 2**30
    work = AttentionShape.of(layout, FULL, heads=52, kv_heads=52, head_dim=128, dtype=torch.bfloat16)
    assert RingPlan().comm_plan(work).bytes(1, phase="forward") / gib == pytest.approx(1.5996, abs=5e-5)
    plan, teams = WallFacerPlan(4).comm_plan(work), Teams(64, 4, "collect_intra")
    lse = 3 * 1024 * 52 * 4
    for rank in range(64):
        collective = sum(plan.bytes(rank, kind, "forward") for kind in ("all_gather", "reduce_scatter"))
        assert (collective - lse) / gib == pytest.approx(0.1523, abs=5e-5)
        assert lse / gib == pytest.approx(0.0006, abs=5e-5)
        keeps_own_keys = teams.key_target(*teams.team_and_member(rank)) == rank
        expected = 0.3047 if keeps_own_keys else 0.40625
        assert plan.bytes(rank, "p2p", "forward") / gib == pytest.approx(expected, abs=5e-5)


# -- under a mask -----------------------------------------------------------------------------------------------------


def test_causal_contiguous_shards_travel_only_to_ranks_that_see_them():
    """Ranks >= r see the keys of shard r, and its queries see keys of ranks <= r: half of all cells."""
    shard, work = 2 * B * T * H * D * 4, work_of(H, mask=CAUSAL, kind="contiguous")
    keys = sent_bytes(RingPlan("keys").comm_plan(work))
    assert [forward for forward, _ in keys] == [shard * (r + 1) * (r < P - 1) for r in range(P)]  # shards 0..r
    queries = sent_bytes(RingPlan("queries").comm_plan(work))
    going, returning = (3 * D * 4 + 4) * B * T * H, D * 4 * B * T * H
    assert sum(b for _, b in queries) == (going + returning) * P * (P - 1) // 2
    assert sum(b for _, b in keys) == 2 * sum(f for f, _ in keys)


@pytest.mark.parametrize("method", [RingPlan("keys").comm_plan, partial(build_comm_plan, "token_ring", ring=P)])
def test_causal_zigzag_sends_three_quarters(method):
    """Half of the ranks see only the first half of a shard's keys. They come last, and get only that half."""
    for key_heads in (2, 8):
        full, part = (sent_bytes(method(work=work_of(key_heads, mask=mask))) for mask in (FULL, CAUSAL))
        for phase in (0, 1):
            assert 4 * sum(rank[phase] for rank in part) == 3 * sum(rank[phase] for rank in full)


# -- step by step -----------------------------------------------------------------------------------------------------

CALLS = [
    AttentionShape.of(
        layout, mask, heads=heads, kv_heads=key_heads, head_dim=D, dtype=torch.bfloat16, batch=2, key_layout=keys
    )
    for i, (layout, keys, mask) in enumerate(
        [
            (SequenceLayout.zigzag(53, 4), None, CAUSAL),
            (SequenceLayout.contiguous(53, 4), SequenceLayout.zigzag(40, 4), AttentionMask(False, (9, 4))),
            (SequenceLayout.striped(64, 4), None, AttentionMask(documents=[0, 1, 20, 33, 64])),
            (SequenceLayout.zigzag(64, 4), None, AttentionMask(False, documents=[[0, 9, 64], [0, 40, 64]])),
            (SequenceLayout.zigzag(64, 4), SequenceLayout.striped(64, 4), AttentionMask(window=(20, None))),
        ]
    )
    for heads, key_heads in [((8, 2), (9, 3))[i % 2]]
]


@pytest.mark.parametrize("name", [name for name in names() if name != "ulysses+ring"])
def test_steps_compute_every_visible_pair_once(name):
    alone = name in ("local", "ulysses", "upipe")
    ranks = 3 if any(part in name for part in ("ulysses", "upipe", "usp")) else 1
    for call in CALLS:
        if alone:
            call = replace(call, layout=call.layout.coarsen(4), key_layout=call.key_layout.coarsen(4))
        shards, heads = call.layout.shards, range(len(call.key_heads))
        plan = build_comm_plan(name, call, shards, ranks)
        for steps in (plan.forward, plan.backward):
            assert sum(sum(step.pairs) for step in steps) == visible(call) * len(call.key_heads)
            moves = [move for step in steps for move in (*step.moves, *step.later_moves)]
            assert all(move.tensors for move in moves)
            for send in (send for move in moves for send in move.sends):
                assert send.bytes > 0 and send.source != send.target
                assert {send.source, send.target} <= set(range(shards * ranks))
            computed = list[tuple[int, int, int]]()  # head, query shard, key shard
            for step in (step for step in steps if step.pairs):
                for rank, (pairs, block) in enumerate(zip(step.pairs, step.blocks, strict=True)):
                    block_heads = step.heads[rank % ranks] if step.heads else heads
                    cells = joined_shards(plan, block, shards) if block else []
                    assert pairs == len(block_heads) * sum(call.grid.pairs(*cell, call.batch) for cell in cells)
                    computed += [(head, *cell) for head in block_heads for cell in cells]
            assert sorted(computed) == sorted(product(heads, range(shards), range(shards)))


def joined_shards(plan: CommPlan, block: Block, shards: int) -> list[tuple[int, int]]:
    """Returns the (query, key) shards of the sequence axis in a block."""
    alone = [(shard,) for shard in range(shards)]
    queries, keys = (joined or alone for joined in (plan.query_shards, plan.key_shards))
    return list(product(queries[block[0]], keys[block[1]]))


def visible(call: AttentionShape) -> int:
    """Counts the visible pairs of all rows of the batch one by one."""
    rows = range(call.batch) if call.mask.per_row else [0] * call.batch
    queries, keys = (torch.arange(layout.length) for layout in (call.layout, call.key_layout))
    return sum(int(call.mask.visible(queries, keys, row).sum()) for row in rows)


def test_steps_of_ring():
    """Each step's exchange overlaps its computation; gradients are sent when they are complete."""
    plan = RingPlan("keys").comm_plan(work_of(H, mask=CAUSAL))
    assert [(len(step.moves), bool(step.pairs)) for step in plan.forward] == [(1, True)] * (P - 1) + [(0, True)]
    assert kinds(plan.backward) == ["p2p +", "p2p + p2p", "p2p + p2p", "+ p2p"]
    for step in plan.forward[1:]:
        assert len(set(step.pairs)) == 1, "zigzag shards compute equally much at every step"
    shard = 2 * B * T * H * D * 4
    halves = [1, 2, 2, 2]  # only rank 0, its owner, sees the last chunk
    down = {Send(r, (r - 1) % P, halves[r] * shard // 2) for r in range(P)}  # the cheaper direction
    assert set(plan.forward[0].moves[0].sends) == down


def kinds(steps: tuple[Step, ...]) -> list[str]:
    """Kinds of a step's exchanges before computation, "+" for computation, and kinds after it."""
    computed = (["+"] * bool(step.pairs) for step in steps)
    moving = ([[move.kind for move in moves] for moves in (step.moves, step.later_moves)] for step in steps)
    return [" ".join([*before, *plus, *after]) for (before, after), plus in zip(moving, computed, strict=True)]


def test_steps_of_upipe_with_and_without_prefetch():
    """8 query heads, 4 key heads, 2 ranks, 4 heads per stage: keys arrive once, dk and dv leave after stage 2."""
    work, local = work_of(4, shards=1), partial(build_comm_plan, "local")
    one = "all_to_all"
    plain = UPipePlan(4).comm_plan(work, 2, local)
    assert kinds(plain.forward) == [one, one, one, "+", one, one, "+", one]
    assert kinds(plain.backward) == [*[one] * 5, "+", one, *[one] * 3, "+", *[one] * 3]
    early = UPipePlan(4, prefetch=True).comm_plan(work, 2, local)
    assert kinds(early.forward) == [f"{one} {one} {one}", f"{one} +", one, "+", one]
    assert sent_bytes(early, 2) == sent_bytes(plain, 2)


def test_inner_plans_of_uneven_heads_run_concurrently():
    """5 heads on 2 ranks of the head axis: the rings rotate at the same steps, each with its own heads."""
    work = work_of(5, heads=5)
    plan = build_comm_plan("usp", work, P, 2, backward="keys")
    turning = [step for step in plan.forward if step.pairs]
    assert len(turning) == P
    assert all(len(step.moves) == 1 for step in turning[:-1])
    for step in turning:
        assert [pairs // 3 for pairs in step.pairs[::2]] == [pairs // 2 for pairs in step.pairs[1::2]]
