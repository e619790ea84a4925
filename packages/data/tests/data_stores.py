"""Stores with known tokens, on disk and in memory, and layouts for rows packed from them."""

import json
import struct
from bisect import bisect_right
from itertools import accumulate
from zlib import crc32

import numpy as np
import torch
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import IGNORE, PackedSequences, TokenStore, Vocabulary
from armillary.data.formats.store_folder import BLOCK

PADDING = 10**9
"""The end of document of numbered stores, which differs from every token, so that tests recognize padding."""

shapes = st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(any)
"""Lengths of documents, some of them empty."""


class Recording(TokenStore):
    """A store that records the ranges of tokens read from each document."""

    def read(self, document, start, stop, step=1):
        self.__dict__.setdefault("ranges", []).append((document, range(start, stop, step)))
        return super().read(document, start, stop, step)


def numbered(lengths, dtype="int64", kind=TokenStore, name="numbered"):
    """A store of documents of these lengths, whose token t has the value t."""
    ends = np.array([0, *accumulate(lengths)])
    tokens = np.arange(ends[-1]).astype(dtype)
    return kind(name, [tokens], ends[:-1], ends[1:], Vocabulary("numbers", None, PADDING), f"{name} {lengths}")


def expected_row(tokens, lengths):
    """Expected labels, document boundaries and positions within documents of a row of numbered tokens."""
    ends = list(accumulate(lengths, initial=0))
    labels = [IGNORE if token == PADDING or token + 1 in ends else token + 1 for token in tokens]
    documents = [bisect_right(ends, token) for token in tokens]
    changes = [i for i in range(1, len(tokens)) if documents[i] != documents[i - 1]]
    bounds = [0, *changes, len(tokens)]
    return labels, tuple(bounds), [i - bounds[bisect_right(bounds, i) - 1] for i in range(len(tokens))]


def single_rank_rows(stores, length, **settings):
    """Rows on one rank, one per batch."""
    layout = SequenceLayout.contiguous(length, 1)
    return PackedSequences(stores, **{"layout": layout, "shard": 0, "rows_per_batch": 1, "ahead": 0} | settings)


def read_rows(rows, first, stop):
    """The tokens of rows `first` to `stop`, as lists."""
    return [rows.batch(number).tokens[0].tolist() for number in range(first, stop)]


def joined(batches):
    """Tokens, labels and positions [B, N] of the batches of all shards, in shard order."""
    layout = batches[0].layout
    return tuple(layout.join([getattr(b, name) for b in batches]) for name in ("tokens", "labels", "positions"))


def every_shard(stores, layout, **settings):
    settings = {"rows_per_batch": 1, "ahead": 0} | settings
    return [PackedSequences(stores, layout=layout, shard=shard, **settings) for shard in range(layout.shards)]


def global_batch(ranks):
    """Tokens [B, N] of the next batch of ranks `ranks[replica][shard]`."""
    return torch.cat([joined([next(rank) for rank in shards])[0] for shards in ranks])


@st.composite
def layouts(draw, length):
    """Random layouts of `length` tokens, also irregular ones."""
    shards = draw(st.integers(1, min(length, 6)))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "wide", "refined", "balanced", "scattered"]))
    if kind == "wide":
        widest = (length - 1) // max(shards - 1, 1)
        return SequenceLayout.striped(length, shards, stripe=draw(st.integers(1, max(widest, 1))))
    if kind == "refined":
        return SequenceLayout.contiguous(length, shards).refine(draw(st.integers(1, length // shards)))
    if kind == "balanced":
        inner = draw(st.sets(st.integers(1, length - 1))) if length > 1 else ()
        return SequenceLayout.balanced(length, shards, documents=(0, *sorted(inner), length))
    if kind == "scattered":
        order = draw(st.permutations(range(length)))
        return SequenceLayout([[range(p, p + 1) for p in order[shard::shards]] for shard in range(shards)])
    return getattr(SequenceLayout, kind)(length, shards)


def write_folder(path, documents, dtype="uint16", vocabulary=None, hashes=None):
    """Writes a folder in the published format of `armillary-data prepare`, without its code."""
    path.mkdir(parents=True)
    tokens = np.concatenate([np.asarray(document, np.dtype(dtype).newbyteorder("<")) for document in documents])
    ends = np.array([0, *accumulate(map(len, documents))], "<i8")
    hashes = np.array(range(len(documents)) if hashes is None else hashes, "<u8")
    files = {"tokens.bin": tokens, "documents.bin": ends, "hashes.bin": hashes}
    for name, values in files.items():
        values.tofile(path / name)
    blocks = {name: memoryview(values).cast("B") for name, values in files.items()}
    header = {
        "format": "armillary token store",
        "version": 1,
        "dtype": dtype,
        "tokens": len(tokens),
        "documents": len(documents),
        "vocabulary": vocabulary or {"tokenizer": "numbers", "size": 2**16, "end_of_document": 0},
        "checksums": {
            name: [crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)] for name, data in blocks.items()
        },
        "summary": {},
    }
    (path / "store.json").write_text(json.dumps(header))
    return path


def write_files(root, **files):
    """Writes files with these bytes into a folder; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return root


def write_jsonl(path, texts):
    """Writes a line for each text and returns the path."""
    path.write_bytes("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return path


def files_of(folder):
    """The bytes of each file of a folder by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents_of(store):
    """The tokens of all documents, as lists."""
    return [store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.lengths)]


MEGATRON_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron-LM's codes of integer dtypes."""


def megatron_index(lengths, boundaries, code=8, pointers=None, magic=b"MMIDIDX\x00\x00", version=1):
    """The bytes of an index of Megatron-LM: magic, version, dtype, counts, then lengths, pointers and documents."""
    size = np.dtype(MEGATRON_CODES.get(code, "int64")).itemsize
    pointers = [size * end for end in accumulate(lengths, initial=0)][:-1] if pointers is None else pointers
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(boundaries))
    parts = [struct.pack(f"<{len(values)}{kind}", *values) for values, kind in ((lengths, "i"), (pointers, "q"))]
    return head + b"".join(parts) + struct.pack(f"<{len(boundaries)}q", *boundaries)
