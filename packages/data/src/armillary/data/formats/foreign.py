"""Token files of other libraries, opened as `TokenStore`: folders of Hugging Face `datasets`, pairs of Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.internal import file_size, is_file_name, read_json
from armillary.data.errors import optional
from armillary.data.formats.store_folder import check_size, map_file
from armillary.data.store import Index, Integers, TokenStore, Vocabulary

# -- folders of `datasets`: a list of tokens in each row, and if wanted one of labels ---------------------------------

LABELS = "labels"
"""Column of labels, as transformers' models take them: not shifted, -100 for tokens without a label."""


def is_arrow(path: Path) -> bool:
    """Returns True for a folder written by `save_to_disk` of a `Dataset`, or of a `DatasetDict` with several splits."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def is_single_dataset(folder: Path) -> bool:
    """Returns True for a folder written by `Dataset.save_to_disk`. Raises ValueError for that of a `DatasetDict`."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        try:
            choices = ", ".join(str(folder / name) for name in read_json(splits)["splits"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{splits} does not name the splits of a saved dataset ({error})") from error
        raise ValueError(f"{folder} holds several splits; give one: {choices}")
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def open_arrow(path: Path, column: str = "input_ids") -> TokenStore:
    """Maps the Arrow files of a folder written by `Dataset.save_to_disk`; each row is a document."""
    dataset = load_dataset(path)
    table = dataset.data.table
    arrays, starts, stops = _read_lists(path, table, column)
    content, labels = f"datasets-{dataset._fingerprint}-{column}-{len(starts)}", None
    if LABELS in table.column_names and _is_list(table.column(LABELS).type):  # one label per row is another thing
        labels, label_starts, label_stops = _read_lists(path, table, LABELS)
        if not (np.array_equal(starts, label_starts) and np.array_equal(stops, label_stops)):
            raise ValueError(f"{path}: the lists of {LABELS!r} must be as long as those of {column!r}, row by row")
        content += f"-{LABELS}"
    return TokenStore(str(path), arrays, starts, stops, Vocabulary(), content, labels=labels)


def _read_lists(path: Path, table: Any, column: str) -> tuple[list[Integers], Index, Index]:
    """Returns (arrays of the values of a column, start of each row's list in their concatenation, its end)."""
    if column not in table.column_names:
        raise ValueError(f"{path} has no column {column!r}; its columns are {', '.join(table.column_names)}")
    lists = table.column(column)
    if not _is_list(lists.type) or not optional("pyarrow", "datasets").types.is_integer(lists.type.value_type):
        raise ValueError(f"{path}: column {column!r} is {lists.type}; give one with lists of integers, the tokens")
    if lists.null_count or any(chunk.values.null_count for chunk in lists.chunks):
        raise ValueError(f"{path}: column {column!r} has missing values; drop those rows first")
    if not lists.chunks:
        raise ValueError(f"{path} has no rows; give a dataset with at least one")
    # An Arrow array of lists is one array of values, and the offset at which each list begins, then the last one's end.
    arrays: list[Integers] = [chunk.values.to_numpy(zero_copy_only=True) for chunk in lists.chunks]
    array_starts = np.cumsum([0, *map(len, arrays)])[:-1]
    boundaries = [
        start + np.asarray(chunk.offsets, np.int64) for start, chunk in zip(array_starts, lists.chunks, strict=True)
    ]
    starts = np.concatenate([documents[:-1] for documents in boundaries])
    return arrays, starts, np.concatenate([documents[1:] for documents in boundaries])


def _is_list(kind: Any) -> bool:
    types = optional("pyarrow", "datasets").types
    return types.is_list(kind) or types.is_large_list(kind)


def load_dataset(path: Path) -> Any:
    """Loads the dataset in a folder, with its files mapped into memory. Raises ValueError if it cannot be read."""
    datasets = optional("datasets", "datasets")
    is_single_dataset(path)
    try:
        # `datasets` opens the files that state.json names by their paths, so they must be regular files in the folder.
        read_json(path / "dataset_info.json")
        for file in read_json(path / "state.json")["_data_files"]:
            name = file["filename"]
            if not is_file_name(name):
                raise ValueError(f"state.json names the file {name!r}")
            file_size(path / name)
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # datasets does not validate its files: other JSON, or a dataset without rows, fails in any of these ways.
        raise ValueError(f"{path} cannot be read as a saved dataset ({error}); save it again, with rows") from error


# -- indexed datasets of Megatron-LM: tokens in a .bin, sequences and documents in a .idx -----------------------------

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
    """Maps the documents of `prefix.bin` and `prefix.idx` into memory; the files do not record a vocabulary."""
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
