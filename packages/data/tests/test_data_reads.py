"""A rank reads only the tokens of its shard, and one more per run for the last label."""

import os
import re

import numpy as np
import pytest
from data_stores import Recording, every_shard, layouts, numbered, shapes, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import IGNORE, PackedSequences, best_fit, greedy, one_per_row, open_store


def runs(layout, shard):
    """Counts the runs of consecutive positions of a shard."""
    positions = layout.positions(shard).tolist()
    return sum(i == 0 or positions[i] != positions[i - 1] + 1 for i in range(len(positions)))


@settings(deadline=None, max_examples=25)
@given(st.data(), shapes, st.integers(1, 60), st.sampled_from([greedy, best_fit, one_per_row]))
def test_only_tokens_of_the_shard_and_their_labels_are_read(data, lengths, length, packing):
    store = numbered(lengths, kind=Recording)
    layout = data.draw(layouts(length))
    for rank in every_shard(store, layout, packing=packing, rows_per_batch=2):
        store.ranges = []
        batch = rank.batch(1)
        labels = batch.labels[batch.labels != IGNORE]
        expected = {*batch.tokens.flatten().tolist(), *labels.tolist()} & set(range(sum(lengths)))
        assert {int(store.starts[document]) + t for document, tokens in store.ranges for t in tokens} == expected


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("shards", "dtype"), [(1, "int32"), (4, "uint16"), (16, "uint8")])
def test_a_rank_reads_the_bytes_of_its_shard(shards, kind, dtype):
    length, item = 1021, np.dtype(dtype).itemsize
    layout = getattr(SequenceLayout, kind)(length, shards)
    total = 0
    for shard in range(shards):
        store = numbered([250, 3, 900, 2500, 0, 41, 41, 77] * 3, dtype)
        rank = PackedSequences(store, layout=layout, shard=shard, rows_per_batch=1, ahead=0)
        documents = len(rank.batch(5).documents[0]) - 1
        assert store.bytes_read <= (layout.sizes[shard] + runs(layout, shard) + documents) * item
        total += store.bytes_read
    label_tokens = sum(runs(layout, shard) for shard in range(shards))
    assert (length - 1) * item <= total <= (length + label_tokens) * item


def test_no_bytes_are_read_for_parts_of_a_store_or_before_the_first_batch():
    store = numbered([100, 50])
    parts = [store.select(np.array([True, False])), *store.split(0.5), *numbered([9]).split()]
    assert [part.bytes_read for part in (store, *parts)] == [0] * 6
    rows = PackedSequences(store, layout=SequenceLayout.zigzag(32, 2), shard=0, rows_per_batch=1)
    assert (rows.rows_per_epoch, store.bytes_read) == (5, 0)
    rows.row(3)
    assert store.bytes_read == 0


# -- on disk ----------------------------------------------------------------------------------------------------------


def resident(path):
    """Resident bytes of a file's mappings in this process."""
    with open("/proc/self/smaps") as file:
        mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)
    actual = [mapping for mapping in mappings if mapping.split("\n")[0].endswith(str(path))]
    assert actual
    return sum(1024 * int(size) for mapping in actual for size in re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE))


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="no /proc/self/smaps to see mapped pages by")
def test_one_of_eight_shards_reads_an_eighth_of_the_file(tmp_path):
    length = 2**24  # 64 MiB of uint32
    vocabulary = {"tokenizer": "numbers", "size": length, "end_of_document": 0}
    folder = write_folder(tmp_path / "store", [np.arange(length, dtype="uint32")], "uint32", vocabulary)
    store = open_store(folder)
    before = resident(folder / "tokens.bin")
    layout = SequenceLayout.contiguous(length, 8)
    batch = PackedSequences(store, layout=layout, shard=5, rows_per_batch=1, ahead=0).batch(0)
    touched = resident(folder / "tokens.bin")
    assert before < 2**20
    assert 4 * length / 16 < touched < 4 * length / 6
    assert batch.tokens[0, :2].tolist() == [5 * length // 8, 5 * length // 8 + 1]
    assert store.bytes_read == 4 * (length // 8 + 1)
