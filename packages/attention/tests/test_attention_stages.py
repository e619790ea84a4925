"""The heads in each stage of UPipe, for all head counts, without processes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.attention.call.qkv_sources import write_heads
from armillary.attention.call.spec import key_heads_of
from armillary.attention.methods.head_shards import RankHeads, Stage, stages_of
from armillary.attention.parts import head_slices, select_heads


def plan(heads: int, key_heads: int, ranks: int, at_once: int) -> tuple[Stage, ...]:
    return stages_of(key_heads_of(heads, key_heads), ranks, ranks * at_once)


@st.composite
def counts(draw) -> tuple[int, int, int, int]:
    key_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    ranks = draw(st.integers(1, min(8, key_heads * group)))
    return key_heads * group, key_heads, ranks, draw(st.integers(1, 6))


@given(counts())
@settings(max_examples=300)
def test_every_query_head_attends_once_with_its_key_head(chosen):
    heads, key_heads, _, at_once = chosen
    actual = plan(*chosen)
    mapping = key_heads_of(heads, key_heads)
    assert sorted(head for stage in actual for head in stage.queries) == list(range(heads))
    assert all(len(rank_heads.queries) <= at_once for stage in actual for rank_heads in stage.by_rank)
    for rank_heads in (rank_heads for stage in actual for rank_heads in stage.by_rank):
        keys = [mapping[head] for head in rank_heads.queries]
        assert set(keys) <= set(rank_heads.keys) and keys == sorted(keys)  # grouped by key head, as kernels require


@given(counts())
@settings(max_examples=300)
def test_keys_arrive_once_per_round_and_are_freed_after_it(chosen):
    for rank in range(chosen[2]):
        on_hand: tuple[int, ...] = ()
        for rank_heads in (stage.by_rank[rank] for stage in plan(*chosen) if stage.by_rank[rank] != RankHeads()):
            assert rank_heads.starts_round == (on_hand == ())
            on_hand = () if rank_heads.ends_round else rank_heads.keys
            assert rank_heads.starts_round or rank_heads.ends_round or on_hand == rank_heads.keys
        assert on_hand == ()


@given(counts())
@settings(max_examples=300)
def test_sent_keys_are_the_keys_of_each_rank(chosen):
    for stage in plan(*chosen):
        for keys, flag in ((stage.received_keys, "starts_round"), (stage.returned_keys, "ends_round")):
            for rank_heads, part in zip(stage.by_rank, keys.ranges, strict=True):
                assert keys.heads[part.start : part.stop] == (rank_heads.keys if getattr(rank_heads, flag) else ())


def test_llama_3_8b_on_eight_ranks():
    """One round: all 8 key heads arrive with query head 4 k of each group, then follow 4 k + 1, 4 k + 2, 4 k + 3."""
    actual = plan(32, 8, 8, 1)
    assert [stage.queries for stage in actual] == [tuple(range(turn, 32, 4)) for turn in range(4)]
    assert [stage.received_keys.heads for stage in actual] == [tuple(range(8)), (), (), ()]
    assert [stage.returned_keys.heads for stage in actual] == [(), (), (), tuple(range(8))]


def test_few_key_heads_have_the_fewest_replicas_per_stage():
    actual = plan(8, 2, 4, 1)  # a stage has 4 query heads, one for each rank, and there are 2 key heads
    assert [stage.queries for stage in actual] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [[rank_heads.keys for rank_heads in stage.by_rank] for stage in actual] == [[(0,), (0,), (1,), (1,)]] * 2
    assert [stage.received_keys.has_shared_heads for stage in actual] == [True, False]


@given(st.lists(st.integers(0, 12), unique=True, max_size=9))
def test_heads_are_slices_in_their_order(heads):
    x = torch.arange(13.0).view(1, 1, 13, 1)
    assert [int(head) for head in select_heads(x, heads).flatten()] == heads
    parts = torch.rand(1, 1, len(heads), 1).split(2, 2)
    write_heads(x, heads, parts)
    assert torch.equal(select_heads(x, heads), torch.cat(parts, 2))
    assert len(head_slices(tuple(range(3, 13, 2)))) == 1
    assert head_slices((0, 1, 8, 9)) == (slice(0, 2, 1), slice(8, 10, 1))
