"""Rows: the same global batches for every mesh, each rank with its own part of them."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import ByteTokenizer, Document, PackedSequences

N = 37  # prime: no number of shards divides it
TEXTS = [bytes((i * j) % 251 for j in range(50 * i)) for i in range(12)]  # the first one is empty
DOCUMENTS = [Document(str(i), text) for i, text in enumerate(TEXTS)]
END = ByteTokenizer().end_of_document

LAYOUTS = {
    "contiguous": SequenceLayout.contiguous(N, 3),
    "zigzag": SequenceLayout.zigzag(N, 3),
    "striped": SequenceLayout.striped(N, 3),
    "striped, wide": SequenceLayout.striped(N, 3, stripe=4),
    "one shard": SequenceLayout.contiguous(N, 1),
}
LAYOUTS |= {f"{name}, refined": layout.refine(2) for name, layout in LAYOUTS.items()}


def whole(documents=DOCUMENTS, length=N, **kwargs):
    """Rows that one rank holds alone."""
    layout = SequenceLayout.contiguous(length, 1)
    return PackedSequences(documents, **{"layout": layout, "shard": 0, "rows_per_batch": 1} | kwargs)


def global_batch(layout, step, replicas, rows=8):
    """Tokens and labels [rows, N] of a step, put together from what all ranks of a mesh hold."""

    def held(replica, shard):
        share = {"rows_per_batch": rows // replicas, "replica": replica, "replicas": replicas}
        return PackedSequences(DOCUMENTS, layout=layout, shard=shard, seed=3, **share).batch(step)

    batches = [[held(replica, shard) for shard in range(layout.shards)] for replica in range(replicas)]
    tokens = torch.cat([layout.join([batch.tokens for batch in shards]) for shards in batches])
    labels = torch.cat([layout.join([batch.labels for batch in shards]) for shards in batches])
    return tokens, labels


def epoch(rows, number):
    """All rows of an epoch, in the order in which they are read, as tuples of tokens."""
    first = number * rows.rows_per_epoch
    return [tuple(rows.batch(first + i).tokens[0].tolist()) for i in range(rows.rows_per_epoch)]


# -- what a row holds -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8), st.integers(0, 5))
def test_the_stream_holds_every_document_once_each_followed_by_its_end(texts, seed):
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    length = sum(map(len, texts)) + len(texts) - 1
    if length == 0:
        return
    batch = whole(documents, length, seed=seed).batch(0)
    stream = [*batch.tokens[0].tolist(), batch.labels[0, -1].item()]
    ends = [-1] + [i for i, token in enumerate(stream) if token == END]
    found = [bytes(stream[a + 1 : b]) for a, b in pairwise(ends)]
    assert stream[-1] == END
    assert sorted(found) == sorted(texts)


@settings(deadline=None)
@given(st.binary(min_size=5, max_size=200), st.integers(1, 5))
def test_an_epoch_holds_every_whole_row_of_the_stream_once(text, length):
    rows = whole([Document("only", text)], length)
    stream = [*text, END]
    expected = [tuple(stream[i : i + length]) for i in range(0, len(text) - length + 1, length)]
    assert rows.rows_per_epoch == len(expected) == len(text) // length
    assert sorted(epoch(rows, 0)) == sorted(expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_joined_shards_are_the_whole_row_and_labels_its_next_tokens(name):
    layout, stream = LAYOUTS[name], [*TEXTS[11], END]
    ranks = [PackedSequences(DOCUMENTS[11:], layout=layout, shard=s, rows_per_batch=3) for s in range(layout.shards)]
    batches = [rank.batch(2) for rank in ranks]
    tokens, labels = layout.join([b.tokens for b in batches]), layout.join([b.labels for b in batches])
    starts = [next(i for i in range(0, 550, N) if stream[i : i + N] == row.tolist()) for row in tokens]
    assert labels.tolist() == [stream[start + 1 : start + 1 + N] for start in starts]
    assert [b.positions.tolist() for b in batches] == [layout.positions(s).tolist() for s in range(layout.shards)]


def test_a_batch_is_int64_and_has_the_shapes_of_its_shard():
    layout = SequenceLayout.zigzag(N, 4)
    batch = PackedSequences(DOCUMENTS, layout=layout, shard=3, rows_per_batch=2).batch(0)
    assert batch.tokens.shape == batch.labels.shape == (2, layout.sizes[3])
    assert batch.positions.shape == (layout.sizes[3],)
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}


def test_other_tokenizers_may_have_larger_vocabularies():
    class Wide:
        end_of_document = 100_000

        def encode(self, text):
            return torch.tensor([99_000 + byte for byte in text], dtype=torch.int32)

    batch = whole([Document("only", b"ab")], 2, tokenizer=Wide()).batch(0)
    assert batch.tokens.tolist() == [[99_097, 99_098]]
    assert batch.labels.tolist() == [[99_098, 100_000]]


# -- the order of rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_global_batches_do_not_depend_on_the_mesh(name, replicas):
    for step in (0, 5, 17):
        got, expected = global_batch(LAYOUTS[name], step, replicas), global_batch(LAYOUTS["one shard"], step, 1)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_batches_of_any_size_read_the_same_rows_in_the_same_order():
    singles, triples = whole(), whole(rows_per_batch=3)
    steps = singles.rows_per_epoch  # three epochs of rows, so batches lie across the seams
    assert steps % 3
    rows = torch.cat([singles.batch(step).tokens for step in range(3 * steps)])
    assert torch.equal(torch.cat([triples.batch(step).tokens for step in range(steps)]), rows)


def test_epochs_read_the_same_rows_in_another_order():
    rows = whole()
    first, second, later = (epoch(rows, number) for number in (0, 1, 40))
    assert sorted(first) == sorted(second) == sorted(later)
    assert len({tuple(order) for order in (first, second, later)}) == 3


def test_the_seed_decides_the_order_and_nothing_else_does():
    state = torch.get_rng_state()
    orders = [epoch(whole(seed=seed), 0) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_any_step_can_be_read_at_any_time():
    rows = whole(rows_per_batch=5)
    in_order = [batch.tokens for batch, _ in zip(rows, range(40), strict=False)]
    for step in (39, 0, 17, 3):
        assert torch.equal(rows.batch(step).tokens, in_order[step])
        assert torch.equal(whole(rows_per_batch=5).batch(step).tokens, in_order[step])


def test_changing_a_batch_in_place_does_not_change_what_is_read_next():
    rows = whole()
    batch, again = rows.batch(0), whole().batch(0)
    for tensor in (batch.tokens, batch.labels, batch.positions):
        tensor.add_(1)
    assert torch.equal(rows.batch(0).tokens, again.tokens)
    assert torch.equal(rows.batch(0).labels, again.labels)
    assert torch.equal(rows.batch(0).positions, again.positions)


def test_a_batch_may_hold_more_rows_than_an_epoch():
    rows = whole([Document("only", b"abcd")], 2, rows_per_batch=5)
    assert rows.rows_per_epoch == 2
    assert (
        sorted(rows.batch(0).tokens.tolist()[:2]) == sorted(rows.batch(0).tokens.tolist()[2:4]) == [[97, 98], [99, 100]]
    )


def test_rows_and_tokens_are_counted_over_all_ranks():
    rows = PackedSequences(DOCUMENTS, layout=LAYOUTS["zigzag"], shard=2, rows_per_batch=3, replica=1, replicas=4)
    assert rows.rows_per_epoch == (sum(map(len, TEXTS)) + len(TEXTS) - 1) // N
    assert rows.tokens_per_batch == 3 * 4 * N


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts, tokens", [([], 0), ([b""], 1), ([b"abc", b""], 5)])
def test_too_few_tokens_for_one_row_are_refused_with_both_numbers(texts, tokens):
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    message = f"the documents make {tokens} tokens, but one row of 5 takes 6 .*; give more text or a shorter sequence"
    with pytest.raises(ValueError, match=message):
        whole(documents, 5)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"shard": 1}, "shard 1 is not one of the 1 shards 0..0"),
        ({"replica": 2, "replicas": 2}, "replica 2 is not one of the 2 replicas 0..1"),
        ({"replica": -1}, "replica -1 is not one of the 1 replicas 0..0"),
        ({"replicas": 0}, "replicas must be at least 1; got 0"),
        ({"rows_per_batch": 0}, "rows_per_batch must be at least 1; got 0"),
    ],
)
def test_wrong_places_are_refused_with_what_is_accepted(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        whole(**wrong)


def test_steps_before_the_first_are_refused():
    with pytest.raises(ValueError, match="steps count from 0; got -1"):
        whole().batch(-1)
