"""Folders that Hugging Face `datasets` saved, with a list of tokens in each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from armillary.data.optional import optional
from armillary.data.store import Integers, TokenStore, Vocabulary


def is_arrow(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def open_arrow(path: Path, column: str = "input_ids") -> TokenStore:
    """The rows of a folder written by `Dataset.save_to_disk`, each one a document; its Arrow files are mapped.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: several splits, no such column, or one that does not hold lists of integers.
    """
    rows = load_rows(path)
    chunks = _lists(path, rows.data.table, column)
    segments: list[Integers] = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
    offsets = [np.asarray(chunk.offsets, np.int64) for chunk in chunks]
    bases = np.cumsum([0, *map(len, segments)])[:-1]
    starts = np.concatenate([base + ends[:-1] for base, ends in zip(bases, offsets, strict=True)])
    stops = np.concatenate([base + ends[1:] for base, ends in zip(bases, offsets, strict=True)])
    content = f"datasets-{rows._fingerprint}-{column}-{len(starts)}"
    return TokenStore(str(path), segments, starts, stops, Vocabulary(), content)


def _lists(path: Path, table: Any, column: str) -> list[Any]:
    """The column's chunks: Arrow arrays of lists of integers."""
    kinds = optional("pyarrow", "datasets").types
    if column not in table.column_names:
        raise ValueError(f"{path} has no column {column!r}; its columns are {', '.join(table.column_names)}")
    found = table.column(column)
    is_lists = kinds.is_list(found.type) or kinds.is_large_list(found.type)
    if not is_lists or not kinds.is_integer(found.type.value_type):
        raise ValueError(f"{path}: column {column!r} is {found.type}; give one with lists of integers, the tokens")
    if found.null_count or any(chunk.values.null_count for chunk in found.chunks):
        raise ValueError(f"{path}: column {column!r} has missing values; drop those rows first")
    if not found.chunks:
        raise ValueError(f"{path} has no rows; give a dataset with at least one")
    return found.chunks


def load_rows(path: Path) -> Any:
    """The dataset in a folder, its files mapped into memory.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the folder holds several splits, or cannot be read.
    """
    datasets = optional("datasets", "datasets")
    try:
        rows: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # datasets does not check what it finds: foreign JSON files, or no rows, fail in any of these ways.
        raise ValueError(f"{path} cannot be read as a saved dataset ({error}); save it again, with rows") from error
    if isinstance(rows, datasets.DatasetDict):
        raise ValueError(f"{path} holds several splits; give one: {', '.join(str(path / str(name)) for name in rows)}")
    return rows
