"""Each method sends the bytes of its communication plan, counted on every rank by the ledger and by torch's dispatcher.

`test_attention_comm_plan.py` compares plans with closed forms, without processes.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

import pytest
import torch
from fake_ranks import differences, on_fake_ranks
from split_states import Split

from armillary.attention import AttentionMask, AttentionShape, CommPlan, Ring, UPipe, WallFacer
from armillary.attention.plans import RingPlan, UPipePlan, WallFacerPlan
from armillary.attention.rings.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import Dispatched, mesh
from conformance import METHODS, Case, Composition, cases, compositions
from conformance.case import CAUSAL

FULL = AttentionMask(causal=False)


def work_of(case: Case, layout: SequenceLayout, key_layout: SequenceLayout, projected: bool) -> AttentionShape:
    sizes = {name: getattr(case, name) for name in ("heads", "kv_heads", "head_dim", "value_dim", "batch", "dtype")}
    return AttentionShape.of(layout, case.mask, **sizes, key_layout=key_layout, projected=projected)


def attend(method, work: AttentionShape, by_dispatcher: bool = False) -> CommLedger:
    """Runs forward and backward on this rank, from hidden states or from q, k and v.

    Args:
        by_dispatcher: True asserts that torch's dispatcher sees the ledger's bytes.
    """
    within = method.shards // method.sequence_shards
    tokens, keys = (layout.refine(within).sizes[method.shard] for layout in (work.layout, work.key_layout))
    with Dispatched() if by_dispatcher else nullcontext() as dispatched, CommLedger() as ledger:
        if work.projected:
            columns = Split(len(work.key_heads), work.kv_heads, work.head_dim, work.value_dim)
            x = torch.randn(work.batch, tokens, columns.width, dtype=work.dtype, requires_grad=True)
            method.projected(x, columns, mask=work.mask, layout=work.layout).sum().backward()
        else:
            shapes = (tokens, work.q), (keys, work.k), (keys, work.v)
            heads = (len(work.key_heads), work.kv_heads, work.kv_heads)
            q, k, v = (
                torch.randn(work.batch, n, h, size // work.batch // h, dtype=work.dtype, requires_grad=True)
                for (n, size), h in zip(shapes, heads, strict=True)
            )
            method(q, k, v, mask=work.mask, layout=work.layout, key_layout=work.key_layout).sum().backward()
    assert dispatched is None or dispatched.sent == Dispatched.of(ledger)
    return ledger


def wrong(composition: Composition, chosen: Sequence[Case]) -> list[str]:
    """Returns this rank's differences in the cases that the method supports."""
    method, actual = composition.build(), list[str]()
    sizes = dict(composition.axes)
    for case in chosen:
        if case.heads < sizes.get("ulysses", 1):
            continue
        layout = method.sequence_method.layout(case.length, case.kind)
        key_layout = method.sequence_method.layout(case.keys, case.key_kind or case.kind)
        # Projections are of one sequence, so cross-attention is only tested without them.
        self_attention = not case.is_cross_attention
        for projected in (True, False) if method.projects_in_stages and self_attention else (self_attention,):
            work = work_of(case, layout, key_layout, projected)
            by_dispatcher = case in EVEN and method.shard % 2 == 0  # it takes as long as three calls
            lines = differences(attend(method, work, by_dispatcher), plan_of(composition, work), method.shard)
            actual += [f"{composition}: {case}: {line}" for line in lines]
    return actual


@lru_cache(maxsize=512)  # fake ranks in one process compare with the same plans
def plan_of(composition: Composition, work: AttentionShape) -> CommPlan:
    return composition.comm_plan(work)


def all_wrong(chosen: Sequence[tuple[Composition, Sequence[Case]]]) -> list[str]:
    return [line for composition, some in chosen for line in wrong(composition, some)]


SMALL = Case(batch=1, length=64, head_dim=8, value_dim=8, dtype=torch.float32)
EVEN = [replace(SMALL, mask=FULL, kv_heads=key_heads, dtype=torch.bfloat16) for key_heads in (2, 1)]
"""A full mask with even shards and heads, for which plans are closed forms; ranks of a head axis share key heads."""


def sample(seed: int, some: int) -> list[Case]:
    """Returns an even case, and one in `some` of a brief sample; another seed gives others."""
    varied = cases(brief=seed, sinks=(False,), softcaps=(None,), head_dims=(8, 16), large_head_dims=())
    varied = [replace(case, needs="qkvs", shift=0.0, memory="plain") for case in varied]
    return [EVEN[seed % 2], *varied[seed % some :: some]]


def every_composition(ranks: int, some: int) -> list[tuple[Composition, list[Case]]]:
    every = compositions(list(METHODS), [ranks])
    return [(composition, sample(i, some)) for i, composition in enumerate(every)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_composition_sends_the_bytes_of_its_plan(ranks):
    """Bytes are counted when they are sent, so no rank needs to receive them; conformance tests do."""
    assert on_fake_ranks(ranks, all_wrong, every_composition(ranks, some=8)) == [[]] * ranks


# -- unnamed layouts --------------------------------------------------------------------------------------------------


def uneven(shards: int) -> SequenceLayout:
    """Runs of 4, 9, 14, ... tokens, dealt in turns and backwards: shards of very unequal size."""
    ends = [0]
    for i in range(2 * shards):
        ends.append(ends[-1] + 4 + 5 * (i % shards))
    runs = [range(a, b) for a, b in pairwise(ends)]
    return SequenceLayout([[runs[shards + r], runs[r]] for r in range(shards)])


def wrong_when_uneven(names: Sequence[str]) -> list[str]:
    actual: list[str] = []
    for composition in compositions(names, [4]):
        method = composition.build()
        layout = uneven(method.sequence_shards)
        documents = AttentionMask(documents=(0, 5, layout.length - 2, layout.length))
        for mask, heads in ((FULL, (8, 2)), (CAUSAL, (9, 3)), (documents, (9, 3))):
            case = replace(SMALL, mask=mask, heads=heads[0], kv_heads=heads[1], dtype=torch.bfloat16)
            work = work_of(case, layout, layout, True)
            lines = differences(attend(method, work), composition.comm_plan(work), method.shard)
            actual += [f"{composition}: {case}: {line}" for line in lines]
    return actual


def test_shards_of_unequal_size(worlds):
    names = ["ring-keys", "token_ring", "wallfacer-2-keys", "all_gather", "upipe+wallfacer"]
    assert worlds(4).run(wrong_when_uneven, names) == [[]] * 4


# -- options without a composition ------------------------------------------------------------------------------------


def wrong_in_stages(heads: int, key_heads: int, heads_per_stage: int | None, prefetch: bool) -> list[str]:
    axes = mesh(ring=2, ulysses=2)
    method = UPipe(axes["ulysses"], Ring(axes["ring"]), heads_per_stage, prefetch)
    case = replace(SMALL, heads=heads, kv_heads=key_heads)
    work = work_of(case, *[SequenceLayout.zigzag(64, 2)] * 2, projected=True)
    plan = UPipePlan(heads_per_stage, prefetch).comm_plan(work, 2, RingPlan().comm_plan)
    return differences(attend(method, work), plan, method.shard)


def wrong_in_any_stages() -> list[list[str]]:
    every = product(((9, 3), (12, 1)), (2, 6, None), (False, True))
    return [actual for heads, *options in every if (actual := wrong_in_stages(*heads, *options))]


def test_upipe_with_all_heads_per_stage():
    assert on_fake_ranks(4, wrong_in_any_stages) == [[]] * 4


def wrong_in_teams(placement: str, gather_keys: bool) -> list[str]:
    method = WallFacer(mesh(ring=8)["ring"], 2, placement, "queries", gather_keys)
    layout = SequenceLayout.contiguous(61, 8)  # not WallFacer's layout
    work = work_of(replace(SMALL, mask=AttentionMask(window=(9, None))), layout, layout, projected=True)
    plan = WallFacerPlan(2, placement, "queries", gather_keys).comm_plan(work)
    return differences(attend(method, work), plan, method.shard)


def wrong_in_any_teams() -> list[list[str]]:
    every = product(("collect_intra", "p2p_intra"), (True, False))
    return [actual for options in every if (actual := wrong_in_teams(*options))]


def test_wall_facer_with_another_layout():
    assert on_fake_ranks(8, wrong_in_any_teams) == [[]] * 8


# -- sparse masks -----------------------------------------------------------------------------------------------------

HOLES = {
    "ends of a shard": (AttentionMask(False, documents=(0, 12, 52, 64)), "zigzag"),
    "edges of chunks": (AttentionMask(False, window=(3, 3)), "zigzag"),
    "many documents": (AttentionMask(documents=(0, 3, 9, 10, 24, 37, 41, 42, 58, 64)), "striped"),
    "rows": (AttentionMask(False, documents=((0, 12, 52, 64), (0, 11, 53, 64))), "zigzag"),
    "a prompt and its answers": (AttentionMask.tree((0, 9, 22, 30, 47, 64), (-1, 0, 0, 2, 2)), "striped"),
}
"""A later rank sees some tokens of a shard, but none between them."""


def moves(mask: AttentionMask, layout: SequenceLayout, of_keys: bool) -> tuple[int, int]:
    """Sums over tokens: hops to the last rank that sees it, in the shorter direction; other ranks that see it."""
    positions = torch.arange(layout.length)
    pairs = torch.stack([mask.visible(positions, positions, row) for row in range(2)]).any(0)
    ranks = range(layout.shards)
    sees = [(pairs if of_keys else pairs.T)[layout.positions(rank)].any(0).tolist() for rank in ranks]
    owners = [(rank, token) for rank in ranks for token in layout.positions(rank).tolist()]

    def hops(way: int) -> int:
        return sum(max(n for n in ranks if n == 0 or sees[(rank + way * n) % len(ranks)][i]) for rank, i in owners)

    return min(hops(1), hops(-1)), sum(sees[other][i] for rank, i in owners for other in ranks if other != rank)


def tokens_by_hand(method: str, work: AttentionShape) -> tuple[int, int]:
    """Bytes that all ranks send in forward and backward, from counts of tokens."""
    (keys, _), (queries, visits) = (moves(work.mask, work.layout, of_keys) for of_keys in (True, False))
    kv, lse, onward = work.k + work.v, work.lse * work.a, (work.q + 2 * work.out) * work.e + work.lse * work.a
    if method == "token_ring":
        forward = queries * work.q * work.e + visits * (work.out * work.e + lse)
        return forward, queries * onward + visits * work.q * work.a
    back = queries * (onward + work.q * work.a) if method == "ring-queries" else keys * kv * (work.e + work.a)
    return keys * kv * work.e, back


RINGS = ("ring-keys", "ring-queries", "token_ring")


@pytest.mark.parametrize("name", HOLES)
def test_every_token_travels_the_minimum_number_of_hops(name):
    mask, kind = HOLES[name]
    layout = getattr(SequenceLayout, kind)(64, 4)
    shards = RingTopology.of_all(4, "keys").reach(Grid(layout, layout, mask))
    assert any(len(shard.tokens_at(step).runs) > 1 for shard in shards for step in (1, 2, 3))
    for method in RINGS:
        work = work_of(replace(SMALL, mask=mask, batch=2, value_dim=16, dtype=torch.bfloat16), layout, layout, False)
        plan = Composition.of(method, ring=4).comm_plan(work)
        phases = ("forward", "backward")
        sent_bytes = tuple(sum(plan.bytes(rank, "p2p", phase) for rank in range(4)) for phase in phases)
        assert sent_bytes == tokens_by_hand(method, work)


def wrong_with_holes() -> list[str]:
    chosen = [replace(SMALL, mask=mask, kind=kind, batch=2, length=64) for mask, kind in HOLES.values()]
    names = (*RINGS, "wallfacer-1", "wallfacer-2")
    return [line for name in names for line in wrong(Composition.of(name, ring=4), chosen)]


def test_every_method_sends_the_bytes_of_its_plan_under_sparse_masks(worlds):
    assert worlds(4).run(wrong_with_holes) == [[]] * 4


# -- unneeded hops ----------------------------------------------------------------------------------------------------

WHOLE_AND_CUT = AttentionMask(documents=(0, 16, 32, 64))
"""Two documents of one shard of 16 tokens each, and one on two shards."""


def messages_of_documents() -> dict[str, tuple[int, int]]:
    """Counts the messages of this rank in forward and backward, by method."""
    layout = SequenceLayout.contiguous(64, 4)
    work = work_of(replace(SMALL, mask=WHOLE_AND_CUT, length=64), layout, layout, False)
    counts = dict[str, tuple[int, int]]()
    for name in (*RINGS, "wallfacer-1"):
        ledger = attend(Composition.of(name, ring=4).build(), work)
        counts[name] = ledger.messages(phase="forward"), ledger.messages(phase="backward")
    return counts


def test_ranks_with_unsplit_documents_send_no_message(worlds):
    first, second, third, last = worlds(4).run(messages_of_documents)
    for name in first:
        assert first[name] == second[name] == (0, 0), name
        # One hop of keys or queries to the neighbour, and one message back if results or gradients return.
        assert third[name][0] + last[name][0] <= 2 and third[name][1] + last[name][1] <= 2, name
