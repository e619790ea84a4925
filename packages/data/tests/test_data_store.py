"""Stores of documents: reading and splitting."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from data_stores import Recording, numbered, read_rows, single_rank_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import ByteTokenizer, Document, TokenStore, Vocabulary

END = ByteTokenizer().end_of_document
quick = settings(deadline=None, max_examples=25)
corpora = st.lists(st.binary(min_size=1, max_size=8), min_size=2, max_size=30)


def stored(texts):
    return TokenStore.of([Document(str(i), text) for i, text in enumerate(texts)], ByteTokenizer())


def texts(store):
    """Returns the documents' text, without the ends of documents."""
    return [bytes(store.read(i, 0, int(size) - 1).tolist()) for i, size in enumerate(store.lengths)]


# -- reading ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=9), min_size=1).filter(any))
def test_a_store_holds_each_document_with_its_end(given_texts):
    store = stored(given_texts)
    nonempty = [text for text in given_texts if text]
    assert texts(store) == nonempty
    assert [store.read(i, len(text), len(text) + 1).tolist() for i, text in enumerate(nonempty)] == [[END]] * len(
        nonempty
    )
    assert (len(store), store.tokens) == (len(nonempty), sum(map(len, nonempty)) + len(nonempty))
    assert store.vocabulary == Vocabulary("bytes", 257, END)


@quick
@given(st.data(), st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_of_documents_are_read_across_segments(data, shape):
    lengths = [length for segment in shape for length in segment]
    full = numbered(lengths)
    ends = np.cumsum([0, *map(sum, shape)])
    arrays = [full.arrays[0][a:b] for a, b in pairwise(ends)]
    store = replace(full, arrays=arrays)
    document = data.draw(st.integers(0, len(lengths) - 1))
    start = data.draw(st.integers(0, lengths[document]))
    stop, step = data.draw(st.integers(start, lengths[document])), data.draw(st.integers(1, 5))
    first = sum(lengths[:document])
    assert store.read(document, start, stop, step).tolist() == list(range(first + start, first + stop, step))
    assert store.bytes_read == 8 * len(range(start, stop, step))


@pytest.mark.parametrize("start, stop", [(0, 6), (-1, 2), (3, 2), (6, 6)])
def test_ranges_outside_of_a_document_are_refused(start, stop):
    store = numbered([4, 5, 9], name="some/store")
    with pytest.raises(IndexError, match=rf"some/store: document 1 .* 5 tokens.* {start}:{stop} "):
        store.read(1, start, stop)
    assert store.bytes_read == 0


def test_read_returns_a_copy():
    store = numbered([5])
    store.read(0, 0, 5)[:] = 7
    assert store.read(0, 0, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "vocabulary, dtype", [(256, "uint8"), (257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")]
)
def test_tokens_are_kept_in_the_smallest_type(vocabulary, dtype):
    class Wide:
        identity, vocab_size, end_of_document = "wide", vocabulary, 0

        def encode(self, text):
            return torch.full((len(text),), vocabulary - 1)

    store = TokenStore.of([Document("only", b"ab")], Wide())
    assert store.arrays[0].dtype == dtype
    assert store.read(0, 0, 3).tolist() == [vocabulary - 1, vocabulary - 1, 0]


# -- content ----------------------------------------------------------------------------------------------------------


def test_content_depends_on_tokens_and_boundaries():
    stores = [stored(t) for t in ([b"ab", b"c"], [b"ab", b"d"], [b"c", b"ab"], [b"abc"], [b"ab", b"c", b"c"])]
    assert len({store.content for store in stores}) == len(stores)
    assert stored([b"ab", b"c"]).content == stores[0].content


def test_parts_have_different_contents():
    store = stored([b"a", b"b", b"c"])
    keeps = [[True, False, True], [True, True, False], [False, True, True]]
    parts = [store.select(np.array(keep)) for keep in keeps]
    assert [texts(part) for part in parts] == [[b"a", b"c"], [b"a", b"b"], [b"b", b"c"]]
    assert len({store.content, *(part.content for part in parts)}) == 4
    assert store.select(np.array(keeps[0])).content == parts[0].content


def test_a_part_is_of_the_same_class_and_vocabulary():
    store = numbered([3, 4, 5], kind=Recording)
    part = store.select(np.array([False, True, False]))
    assert part.read(0, 0, 4).tolist() == [3, 4, 5, 6]
    assert part.ranges == [(0, range(4))]
    assert part.vocabulary == store.vocabulary


# -- the split --------------------------------------------------------------------------------------------------------


@quick
@given(corpora, st.sampled_from([1, 2]), st.floats(0.01, 0.99))
def test_no_side_is_empty_and_copies_of_one_text_are_on_the_same_side(given_texts, copies, fraction):
    train, validation = stored(given_texts * copies).split(fraction)
    assert len(train) and len(validation)
    assert sorted(texts(train) + texts(validation)) == sorted(given_texts * copies)
    on_both_sides = set(texts(train)) & set(texts(validation))
    assert not on_both_sides or len(set(given_texts)) == 1


@quick
@given(corpora, st.randoms())
def test_the_split_does_not_depend_on_the_order_of_documents(given_texts, random):
    sides = [stored(order).split() for order in (given_texts, random.sample(given_texts, len(given_texts)))]
    if len(set(given_texts)) > 1:
        assert [sorted(texts(side)) for side in sides[0]] == [sorted(texts(side)) for side in sides[1]]
    assert sorted(map(len, sides[0])) == sorted(map(len, sides[1]))


def test_split_is_stable_when_documents_are_added():
    names = [b"text %d" % i for i in range(1000)]
    few, many = stored(names[300:800]), stored(names)
    for before, after in zip(few.split(), many.split(), strict=True):
        assert set(texts(before)) < set(texts(after))


@pytest.mark.parametrize("hashed", [True, False])
def test_the_split_has_about_the_chosen_fraction(hashed):
    store = stored([b"text %d" % i for i in range(4000)])
    _, validation = replace(store, hashes=store.hashes if hashed else None).split(0.1)
    assert 320 < len(validation) < 480


def test_larger_fraction_includes_the_documents_of_a_smaller_one():
    store = stored([b"text %d" % i for i in range(500)])
    sides = [set(texts(store.split(fraction)[1])) for fraction in (0.01, 0.05, 0.3, 0.9)]
    assert sides[0] < sides[1] < sides[2] < sides[3]


def test_a_store_without_hashes_is_split_by_numbers():
    few, many = numbered([5] * 400), numbered([9] * 500)
    sides = [[set((side.starts // size).tolist()) for side in s.split(0.2)] for s, size in ((few, 5), (many, 9))]
    assert sides[0][0] < sides[1][0] and sides[0][1] < sides[1][1]
    assert sides[0][0] | sides[0][1] == set(range(400))


def test_a_part_is_split_as_its_documents_were():
    store = stored([b"text %d" % i for i in range(400)])
    keep = np.arange(400) % 3 == 0
    for part, side in zip(store.select(keep).split(0.3), store.split(0.3), strict=True):
        assert set(texts(part)) < set(texts(side))


def test_a_single_document_gives_its_tail():
    train, validation = numbered([100]).split()
    assert train.read(0, 0, 95).tolist() == list(range(95))
    assert validation.read(0, 0, 5).tolist() == list(range(95, 100))
    assert (train.tokens, validation.tokens) == (95, 5)
    assert train.content != validation.content


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_parts_of_a_short_document_are_nonempty(fraction):
    train, validation = numbered([2]).split(fraction)
    assert (train.read(0, 0, 1).tolist(), validation.read(0, 0, 1).tolist()) == ([0], [1])


@pytest.mark.parametrize("lengths", [[0, 6], [6, 0, 0], [0, 9, 4, 0]])
def test_both_sides_have_tokens_despite_empty_documents(lengths):
    sides = numbered(lengths).split()
    actual = [token for side in sides for row in read_rows(single_rank_rows(side, 1), 0, side.tokens) for token in row]
    assert sorted(actual) == list(range(sum(lengths)))
    assert min(side.tokens for side in sides) > 0


def test_a_store_is_printed_in_one_line():
    tokens, starts, stops = np.arange(800, dtype=np.uint16), np.array([0, 300]), np.array([300, 800])
    store = TokenStore("some/store", [tokens], starts, stops, Vocabulary(), "content")
    assert repr(store) == "TokenStore('some/store', tokens=800, documents=2, dtype=uint16)"
    assert str(store.with_vocabulary(1000)) == repr(store).removesuffix(")") + ", vocabulary=1000)"
