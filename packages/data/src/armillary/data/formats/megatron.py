"""Megatron-LM's indexed datasets: tokens in a `.bin`, an index of sequences and documents in a `.idx`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.data.shuffle import Index
from armillary.data.store import TokenStore, Vocabulary

SAMPLED = 2**12
"""Tokens of the beginning, and of all over the file, by which it is told from others."""
MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of integer dtypes; 6 and 7 are floating-point."""


@dataclass(frozen=True)
class MegatronIndex:
    """A `.idx` file.

    Args:
        dtype: of the tokens.
        lengths: int32 [S], tokens of each sequence.
        pointers: int64 [S], the byte of the `.bin` at which it starts.
        documents: int64 [D + 1], the sequences before each document, and before the end.
    """

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: Index
    documents: Index

    @classmethod
    def read(cls, path: Path) -> MegatronIndex:
        """Maps the file; raises ValueError where it is not such an index, or is cut short."""
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        at = len(MAGIC) + HEADER.itemsize
        if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < at:
            raise ValueError(f"{path} is not a Megatron index: its first bytes are {bytes(data[: len(MAGIC)])!r}")
        header = data[len(MAGIC) : at].view(HEADER)[0]
        if header["version"] != 1 or int(header["dtype"]) not in DTYPES:
            raise ValueError(
                f"{path} has version {header['version']} and dtype code {header['dtype']}; version 1 with integers "
                f"(codes {', '.join(map(str, DTYPES))}) can be read"
            )
        sequences, documents = int(header["sequences"]), int(header["documents"])
        ends = list(accumulate([at, 4 * sequences, 8 * sequences, 8 * documents]))
        if len(data) < ends[-1]:
            raise ValueError(f"{path} is cut off at byte {len(data)}; its header says {ends[-1]} bytes")
        modes = sequences  # a byte for each sequence, that indexes of several modalities have at their end
        if len(data) not in (ends[-1], ends[-1] + modes):
            raise ValueError(f"{path} holds something else from byte {ends[-1]} on, to byte {len(data)}")
        parts = [data[a:b] for a, b in pairwise(ends)]
        dtype = np.dtype(DTYPES[int(header["dtype"])])
        return cls(dtype, parts[0].view("<i4"), parts[1].view("<i8"), parts[2].view("<i8"))

    def bounds(self, path: Path) -> tuple[Index, Index]:
        """First token of each document, and the token after its last: int64 [D] both."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        if np.any(self.lengths < 0) or np.any(self.pointers != ends[:-1] * self.dtype.itemsize):
            raise ValueError(f"{path}: sequences do not follow one another without gaps; write the dataset again")
        first_and_last = (*self.documents[:1].tolist(), *self.documents[-1:].tolist())
        if first_and_last != (0, len(self.lengths)) or np.any(np.diff(self.documents) < 0):
            raise ValueError(
                f"{path}: documents do not hold its {len(self.lengths)} sequences one after the other; write the "
                "dataset again"
            )
        return ends[self.documents[:-1]], ends[self.documents[1:]]


def megatron_prefix(path: Path) -> Path | None:
    """The path without suffix, if a `.bin` and a `.idx` are there."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if all(file.is_file() for file in _files(prefix)) else None


def _files(prefix: Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def open_megatron(prefix: Path) -> TokenStore:
    """The documents of `prefix.bin` and `prefix.idx`. Whether an end of document is among the tokens is not recorded.

    Raises:
        ValueError: files that are cut short or too long, or not of this format.
    """
    tokens_path, index_path = _files(prefix)
    index = MegatronIndex.read(index_path)
    starts, stops = index.bounds(index_path)
    size, needed = tokens_path.stat().st_size, int(stops.max(initial=0)) * index.dtype.itemsize
    if size < needed:
        raise ValueError(f"{tokens_path} is cut off at byte {size}; its index says {needed} bytes")
    if size > needed:
        raise ValueError(
            f"{tokens_path} holds something else from byte {needed} on, to byte {size}; its index ends there"
        )
    tokens = np.memmap(tokens_path, index.dtype, "r") if size else np.empty(0, index.dtype)
    # Of tokens a sample: reading all of them would take as long as an epoch.
    parts = index.lengths, index.documents, tokens[:SAMPLED], tokens[:: max(1, len(tokens) // SAMPLED)]
    sums = (crc32(np.ascontiguousarray(part).data) for part in parts)
    content = f"megatron-{size}-{len(starts)}-{'-'.join(f'{part:08x}' for part in sums)}"
    return TokenStore(str(prefix), [tokens], starts, stops, Vocabulary(), content)
