"""Indexed datasets of Megatron-LM: tokens in a `.bin`, an index of sequences and documents in a `.idx`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.parts import file_size
from armillary.data.formats.folder import check_size, map_file
from armillary.data.shuffle import Index
from armillary.data.store import TokenStore, Vocabulary

SAMPLE = 2**12
"""Tokens in a sample of the first tokens; a sample spread evenly over the file has up to twice as many."""
MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of an index; `HEADER` follows."""
HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of integer dtypes; 6 and 7 are floating-point."""


@dataclass(frozen=True)
class MegatronIndex:
    """A `.idx` file of S sequences. In Megatron a document consists of one or more sequences, such as sentences.

    Args:
        dtype: dtype of the tokens.
        lengths: int32 [S], number of tokens of each sequence.
        pointers: int64 [S], byte of the `.bin` at which each sequence starts.
        documents: int64 [D + 1], number of the first sequence of each document, then S.
    """

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: Index
    documents: Index

    @classmethod
    def read(cls, path: Path) -> MegatronIndex:
        """Maps an index into memory.

        Raises:
            ValueError: another format, or a file that is cut off or too long.
        """
        data = map_file(path, np.dtype(np.uint8))
        start = len(MAGIC) + HEADER.itemsize
        if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < start:
            raise ValueError(f"{path} is not a Megatron index: its first bytes are {bytes(data[: len(MAGIC)])!r}")
        header = data[len(MAGIC) : start].view(HEADER)[0]
        if header["version"] != 1 or int(header["dtype"]) not in DTYPES:
            raise ValueError(
                f"{path} has version {header['version']} and dtype code {header['dtype']}; version 1 with integers "
                f"(codes {', '.join(map(str, DTYPES))}) can be read"
            )
        sequences, documents = int(header["sequences"]), int(header["documents"])
        # Three arrays follow the header: int32 lengths, int64 pointers, int64 documents.
        ends = list(accumulate([start, 4 * sequences, 8 * sequences, 8 * documents]))
        # An index of several modalities has one more byte for each sequence at its end, which is not read.
        if len(data) != ends[-1] + sequences:
            check_size(path, len(data), ends[-1], "header")
        lengths, pointers, first_sequences = (data[a:b] for a, b in pairwise(ends))
        dtype = np.dtype(DTYPES[int(header["dtype"])])
        return cls(dtype, lengths.view("<i4"), pointers.view("<i8"), first_sequences.view("<i8"))

    def bounds(self, path: Path) -> tuple[Index, Index]:
        """Returns the first token of each document, and its last token + 1: int64 [D] each.

        Raises:
            ValueError: sequences do not follow one another in order, or documents do not contain all of them in order.
        """
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        if np.any(self.lengths < 0) or np.any(self.pointers != ends[:-1] * self.dtype.itemsize):
            raise ValueError(f"{path}: sequences do not directly follow one another; write the dataset again")
        first_and_last = (*self.documents[:1].tolist(), *self.documents[-1:].tolist())
        if first_and_last != (0, len(self.lengths)) or np.any(np.diff(self.documents) < 0):
            raise ValueError(
                f"{path}: documents do not hold its {len(self.lengths)} sequences one after the other; write the "
                "dataset again"
            )
        return ends[self.documents[:-1]], ends[self.documents[1:]]


def megatron_prefix(path: Path) -> Path | None:
    """Returns the path without `.bin` or `.idx` if both files exist, else None."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx")) else None


def open_megatron(prefix: Path) -> TokenStore:
    """Maps the documents of `prefix.bin` and `prefix.idx` into memory.

    The files do not record a vocabulary, nor if an end-of-document token follows each document.

    Raises:
        ValueError: a file that is cut off, too long or of another format, or an index that `bounds` refuses.
    """
    tokens_path, index_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    index = MegatronIndex.read(index_path)
    starts, stops = index.bounds(index_path)
    size = file_size(tokens_path)
    check_size(tokens_path, size, int(stops.max(initial=0)) * index.dtype.itemsize, "index")
    tokens = map_file(tokens_path, index.dtype)
    # Checksums of the index and of two samples of tokens identify the content; reading all tokens would take too long.
    samples = index.lengths, index.documents, tokens[:SAMPLE], tokens[:: max(1, len(tokens) // SAMPLE)]
    checksums = "-".join(f"{crc32(np.ascontiguousarray(sample).data):08x}" for sample in samples)
    content = f"megatron-{size}-{len(starts)}-{checksums}"
    return TokenStore(str(prefix), [tokens], starts, stops, Vocabulary(), content)
