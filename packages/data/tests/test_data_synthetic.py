"""Synthetic tasks: joined shards equal the full row, and the row has the answer to every query."""

import hashlib
import math
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE
from armillary.data.synthetic import AssociativeRecall, Copy, Needle

N = 61  # prime: no number of shards divides it

TASKS = {
    "recall": AssociativeRecall(N, pairs=6, keys=16, values=8),
    "recall, full": AssociativeRecall(N, pairs=15, keys=15, values=8, fillers=1),
    "recall, even": AssociativeRecall(N - 1, pairs=4, keys=16, values=8, seed=1),
    "recall, across": AssociativeRecall(N, 4, keys=16, values=8, across=SequenceLayout.zigzag(N, 3)),
    "needle": Needle(N, needle_tokens=3),
    "needle, first": Needle(N, depth=0, needle_tokens=1, keys=1),
    "needle, last": Needle(N, depth=1, needle_tokens=29),  # 1 token of filler
    "copy": Copy(N, symbols=9),
    "copy, even": Copy(N - 1, seed=1),
}


def row(task, number=0):
    """Tokens and labels of a full row, as lists."""
    every = torch.arange(task.length)
    return task.tokens(number, every).tolist(), task.labels(number, every).tolist()


def layouts(length):
    """Random layouts of few shards: single positions, or a named kind."""
    kinds = [SequenceLayout.contiguous, SequenceLayout.zigzag, SequenceLayout.striped]
    named = st.builds(lambda kind, shards: kind(length, shards), st.sampled_from(kinds), st.integers(1, 7))
    dealt = st.lists(st.integers(0, 3), min_size=length - 4, max_size=length - 4).map(
        lambda owners: [0, 1, 2, 3, *owners]
    )
    spans = dealt.map(
        lambda owners: [[range(p, p + 1) for p, s in enumerate(owners) if s == shard] for shard in range(4)]
    )
    return st.one_of(named, spans.map(SequenceLayout))


def answer(tokens, query):
    """The token after the last earlier occurrence of the token at position `query`, or None."""
    return next((tokens[i + 1] for i in reversed(range(query)) if tokens[i] == tokens[query]), None)


# -- shards and full rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
@settings(deadline=None, max_examples=8)
@given(data=st.data(), number=st.integers(0, 2**40))
def test_joined_shards_equal_the_whole_row(name, data, number):
    task = TASKS[name]
    layout = data.draw(layouts(task.length))
    tokens = [task.tokens(number, layout.positions(shard)) for shard in range(layout.shards)]
    labels = [task.labels(number, layout.positions(shard)) for shard in range(layout.shards)]
    assert {part.dtype for part in tokens + labels} == {torch.int64}
    assert (layout.join(tokens, 0).tolist(), layout.join(labels, 0).tolist()) == row(task, number)


@pytest.mark.parametrize("name", TASKS)
def test_positions_in_any_order_and_repeated(name):
    task, (tokens, labels) = TASKS[name], row(TASKS[name], 3)
    for some in ([5, 0, 5, task.length - 1, task.length - 2], []):
        at = torch.tensor(some, dtype=torch.int32)
        assert task.tokens(3, at).tolist() == [tokens[i] for i in some]
        assert task.labels(3, at).tolist() == [labels[i] for i in some]


def test_rows_are_the_same_in_every_process():
    text = str([row(task, 12) for task in TASKS.values()])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8011faf28073e1e2"


@pytest.mark.parametrize("name", TASKS)
def test_rows_and_seeds_differ_without_global_random_state(name):
    task, state = TASKS[name], torch.get_rng_state()
    other = type(task)(**{field: getattr(task, field) for field in task.__dataclass_fields__} | {"seed": 99})
    assert len({str(row(task, number)) for number in range(20)}) == 20
    assert row(task, 4) != row(other, 4)
    assert torch.equal(torch.get_rng_state(), state)


# -- contents of a row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_labels_are_next_tokens_within_the_vocabulary(name):
    task = TASKS[name]
    for number in range(20):
        tokens, labels = row(task, number)
        assert all(label in (IGNORE, token) for label, token in zip(labels, [*tokens[1:], IGNORE], strict=True))
        assert all(0 <= token < task.vocab_size for token in tokens)
        assert set(labels) != {IGNORE}


@pytest.mark.parametrize("name", [name for name in TASKS if "recall" in name])
def test_recall_asks_once_for_each_key(name):
    task = TASKS[name]
    for number in range(20):
        tokens, labels = row(task, number)
        queries = [i for i, label in enumerate(labels) if label != IGNORE]
        keys = [i for i, token in enumerate(tokens) if token < task.keys and i not in queries]
        assert {tokens[i] for i in queries} == {tokens[i] for i in keys}
        assert len(queries) == len(keys) == len({tokens[i] for i in keys}) == task.pairs
        assert [answer(tokens, i) for i in queries] == [labels[i] for i in queries]
        assert queries == list(range(task.length - 2 * task.pairs, task.length, 2))
        assert max(keys) + 2 <= min(queries)


@pytest.mark.parametrize("name", ["needle", "needle, first", "needle, last"])
def test_needle_is_repeated_at_the_end(name):
    task = TASKS[name]
    for number in range(20):
        tokens, labels = row(task, number)
        key, *value = question = tokens[-1 - task.needle_tokens :]
        starts = [i for i, token in enumerate(tokens) if token == key]
        assert labels == [IGNORE] * (N - len(question)) + value + [IGNORE]
        assert starts[1] == N - len(question) and len(starts) == 2
        assert tokens[starts[0] : starts[0] + len(question)] == question
        assert task.depth is None or starts[0] == task.depth * (N - 2 * len(question))


@pytest.mark.parametrize("length", [3, 4, 5, 60, 61])
def test_copy_follows_a_separator(length):
    task, half = Copy(length, symbols=5), length // 2
    tokens, labels = row(task)
    assert tokens[half] == 5 and 5 not in tokens[:half]
    assert tokens[half + 1 :] == tokens[: length - half - 1]
    assert labels == [IGNORE] * half + tokens[half + 1 :] + [IGNORE]


# -- chance -----------------------------------------------------------------------------------------------------------


def uneven(counts):
    """Standard deviations by which the chi-square of these counts exceeds that of a uniform distribution."""
    mean, free = sum(counts) / len(counts), len(counts) - 1
    return (sum((count - mean) ** 2 for count in counts) / mean - free) / math.sqrt(2 * free)


def test_keys_values_places_and_depths_are_uniform():
    recall, needle = TASKS["recall"], Needle(N, needle_tokens=2)
    rows = [row(recall, number) for number in range(2000)]
    last = [(tokens[-2], tokens[-1], tokens.index(tokens[-2])) for tokens, _ in rows]
    starts = [tokens.index(tokens[-3]) for tokens, _ in (row(needle, number) for number in range(2000))]
    for column, kinds in zip([*zip(*last, strict=True), starts], [16, 8, 24, 56], strict=True):
        counts = [column.count(kind) for kind in set(column)]
        assert len(counts) == kinds
        assert abs(uneven(counts)) < 4


def test_fillers_are_uniform():
    tokens, _ = row(Needle(100_000, fillers=50, keys=1, values=1))
    assert abs(uneven([tokens.count(2 + kind) for kind in range(50)])) < 4


# -- long rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_memory_of_a_shard_does_not_grow_with_the_row(kind):
    length, shards = 5_000_000, 64
    layout = getattr(SequenceLayout, kind)(length, shards)
    recall = AssociativeRecall(length, pairs=200, keys=512, values=64, across=layout)
    at = layout.positions(shards - 1)
    tracemalloc.start()
    for task in (recall, Needle(length), Copy(length)):
        assert task.tokens(1, at).shape == task.labels(1, at).shape == at.shape
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 8 * len(at)  # a few arrays of int64 [T]; one of [N] would be 64
