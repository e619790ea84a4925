"""Balanced layouts of methods: for all masks, no rank computes more than 1.05 times the mean."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import MethodOptions, named_method
from armillary.attention.mask.attention_mask import layout_of
from armillary.attention.methods.wallfacer import Teams
from armillary.attention.plans import TokenRingPlan
from armillary.attention.rings.topology import RingTopology, RotatingSide
from armillary.attention.tiling.grid import Grid
from armillary.core import SequenceLayout, attention_balance, attention_traffic, build_mesh

N = 2**16


def boundaries(draw, length: int = N) -> list[int]:
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + 1 + int(draw())))
    return ends


def web(seed: int) -> list[int]:
    rng = random.Random(seed)
    return boundaries(lambda: rng.lognormvariate(7, 1.5))


def prompt_with_answers(prompt: int) -> AttentionMask:
    rng = random.Random(0)
    answers = boundaries(lambda: rng.lognormvariate(7, 0.7), N - prompt)
    ends = [0, *(prompt + end for end in answers)]
    return AttentionMask.tree(ends, [-1] + [0] * (len(ends) - 2))


def forest(answers: int, window: tuple[int, int] | None = None) -> AttentionMask:
    """Prompts with answers, and answers to each answer."""
    rng = random.Random(1)
    ends, parents = boundaries(lambda: rng.lognormvariate(6.5, 0.7)), list[int]()
    for segment in range(len(ends) - 1):
        at = segment % (2 * answers + 1)
        parents.append(-1 if at == 0 else segment - at if at % 2 else segment - 1)
    return AttentionMask.tree(ends, parents, window)


def images() -> AttentionMask:
    rng = random.Random(3)
    starts = boundaries(lambda: 1500 + rng.lognormvariate(6, 1), N)[1:-2]
    return AttentionMask.image_spans([range(at, at + rng.choice([256, 576, 1024])) for at in starts])


def some_blocks() -> AttentionMask:
    """A tenth of the blocks below the diagonal, and the first column, which all rows see."""
    rng = np.random.default_rng(0)
    visible = np.tril(rng.random((128, 128)) < 0.1) | np.eye(128, dtype=bool)
    visible[:, :2] = True
    return AttentionMask.blocks(visible.tolist(), N // 128, causal=True)


MASKS = {
    "causal": AttentionMask(),
    "window": AttentionMask(window=(2047, 0)),
    "both ways": AttentionMask(causal=False, window=(1000, 1000)),
    "documents, rows": AttentionMask(documents=[web(0), web(1)]),
    "documents, window": AttentionMask(documents=web(0), window=(1023, 0)),
    "prompt of 1k": prompt_with_answers(1000),
    "forest": forest(4),
    "forest, window": forest(4, (1023, 0)),
    "prefixes": AttentionMask.prefix(web(2), [size // 3 for size in np.diff(web(2)).tolist()]),
    "chunked": AttentionMask.chunked(8192),
    "images": images(),
    "blocks": some_blocks(),
}


@pytest.mark.parametrize("name", MASKS)
def test_shards_are_even_by_queries_and_by_keys(name):
    mask, shards = MASKS[name], 32 if name in ("causal", "forest", "blocks") else 8
    layout = layout_of("balanced", N, shards, mask, balanced_by=None)
    assert attention_balance(layout, mask=mask) < 1.05
    assert attention_balance(layout, mask=mask, of_keys=True) < 1.05
    assert max(len(layout.spans(shard)) for shard in range(shards)) <= 20
    # Ranks of a head axis compute on their joined shards: the shards before the split.
    assert layout.refine(4).coarsen(4) == layout
    # Layouts with the least traffic are even by queries, and their traffic is that of a ring.
    layout, ring = layout_of("balanced", N, 8, mask), RingTopology.of_all(8, "keys")
    assert attention_balance(layout, mask=mask) <= 1.10 and max(layout.sizes) * 8 <= 1.10 * N
    grid = Grid(layout, layout, mask)
    assert attention_traffic(layout, mask=mask) == ring.cheaper_direction(grid).tokens_sent(grid)


def ranks_of(teams: Teams, layout: SequenceLayout, mask: AttentionMask, side: RotatingSide) -> list[int]:
    """Counts each rank's pairs, over all pairs of teams that meet in a ring."""
    by_teams = teams.by_teams(layout)
    grid, loads = Grid(by_teams, by_teams, mask), [0] * teams.ranks
    for ring in teams.rings(side):
        for place, rank in enumerate(ring.ranks):
            blocks = (ring.query_key_shards(place, origin) for origin in range(len(ring.ranks)))
            loads[rank] += sum(grid.pairs(*block, batch=1) for block in blocks)
    return loads


@pytest.mark.parametrize("name", MASKS)
def test_ranks_of_teams_are_even_for_either_rotating_side(name):
    ranks, team = (32, 4) if name == "forest" else (8, 2)
    mask, teams = MASKS[name], Teams(ranks, team, "p2p_intra")
    layout = teams.layout(N, "balanced", mask)
    for side in ("keys", "queries"):
        loads = ranks_of(teams, layout, mask, side)
        assert sum(loads) == sum(mask.pairs(N, row) for row in range(mask.batch or 1))
        assert max(loads) * ranks < 1.05 * sum(loads), side


def test_teams_share_documents_shorter_than_a_shard():
    """Each contiguous team would have entire documents, and all their pairs one member."""
    teams, mask = Teams(8, 2, "collect_intra"), MASKS["chunked"]
    contiguous = teams.in_rank_order(SequenceLayout.contiguous(N, 8))
    assert max(ranks_of(teams, contiguous, mask, "keys")) * 8 == 2 * mask.pairs(N)
    layout = teams.by_teams(teams.layout(N, "balanced", mask))
    assert [layout.spans(team) for team in (0, 3)] == [(range(0, N // 2, 2),), (range(1, N // 2, 2),)]


@pytest.mark.parametrize(("shards", "seed"), [(4, 0), (8, 1), (8, 2)])
def test_token_ring_is_even_by_keys_and_sends_fewer_bytes_than_an_even_layout(shards, seed):
    mask, plan = AttentionMask(documents=web(seed)), TokenRingPlan()
    layout = plan.layout(N, shards, "balanced", mask)
    assert attention_balance(layout, mask=mask, of_keys=True) <= 1.10
    assert max(layout.sizes) * shards <= 1.10 * N
    sent_bytes = dict[str, int]()
    for name, each in (("balanced", layout), ("even", layout_of("balanced", N, shards, mask, balanced_by=None))):
        options = {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16}
        comm_plan = plan.comm_plan(AttentionShape.of(each, mask, **options))
        sent_bytes[name] = sum(comm_plan.bytes(rank) for rank in range(shards))
    assert sent_bytes["balanced"] < sent_bytes["even"]


@pytest.mark.parametrize("name", ["ring", "token_ring", "wallfacer", "all_gather", "usp", "upipe+wallfacer"])
def test_layouts_for_states_have_runs_of_neighbouring_tokens(name):
    """A state runs along neighbouring tokens, and layers with one refuse stripes."""
    method, mask = named_method(name, MethodOptions()), AttentionMask(documents=[0, 13, 62, 65, 88, 128])
    layout = method.layout(128, 4, "balanced", mask, states=True)
    assert all(span.step == 1 for shard in range(4) for span in layout.spans(shard))


NAMED = [
    *((name, MethodOptions(), None) for name in ("ring", "token_ring", "wallfacer", "all_gather")),
    ("ring", MethodOptions(backward="queries"), "both"),
    ("ring+token_ring", MethodOptions(nodes=2), None),
    ("upipe+wallfacer", MethodOptions(), None),
    ("upipe+token_ring", MethodOptions(), "keys"),
]


@pytest.mark.parametrize(("name", "options", "side"), NAMED)
def test_plans_have_the_layouts_of_their_methods(name, options, side):
    method, mask = named_method(name, options), AttentionMask(documents=[0, 13, 62, 65, 88, 128])
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    attend = method.build(build_mesh("cpu", **method.mesh_axes({"ring": 4, "ulysses": 1})))
    assert attend.layout(128, "balanced", mask) == method.layout(128, 4, "balanced", mask)
    assert attend.balanced_by == method.sequence_plan(4).balanced_by
    assert side is None or attend.balanced_by == side
