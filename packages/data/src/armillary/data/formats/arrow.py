"""Folders saved by Hugging Face `datasets`, with a list of tokens in each row, and if wanted one of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from armillary.core.parts import file_size, is_file_name, read_json
from armillary.data.optional import optional
from armillary.data.shuffle import Index
from armillary.data.store import Integers, TokenStore, Vocabulary

LABELS = "labels"
"""Column of labels, as transformers' models take them: not shifted, -100 for tokens without a label."""


def is_arrow(path: Path) -> bool:
    """Returns True for a folder written by `save_to_disk` of a `Dataset`, or of a `DatasetDict` with several splits."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def is_single_dataset(folder: Path) -> bool:
    """Returns True for a folder written by `Dataset.save_to_disk`.

    Raises:
        ValueError: the folder of a `DatasetDict`, which has several splits.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        try:
            choices = ", ".join(str(folder / name) for name in read_json(splits)["splits"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{splits} does not name the splits of a saved dataset ({error})") from error
        raise ValueError(f"{folder} holds several splits; give one: {choices}")
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def open_arrow(path: Path, column: str = "input_ids") -> TokenStore:
    """Maps the Arrow files of a folder written by `Dataset.save_to_disk`; each row is a document.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: `load_dataset` refuses the folder; no such column, or one that is not lists of integers; no rows;
            lists of labels that are not as long as those of tokens.
    """
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
    chunks = _list_arrays(path, table, column)
    # An Arrow array of lists is one array of values, and the offset at which each list begins, then the last one's end.
    arrays: list[Integers] = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
    array_starts = np.cumsum([0, *map(len, arrays)])[:-1]
    boundaries = [
        start + np.asarray(chunk.offsets, np.int64) for start, chunk in zip(array_starts, chunks, strict=True)
    ]
    starts = np.concatenate([documents[:-1] for documents in boundaries])
    return arrays, starts, np.concatenate([documents[1:] for documents in boundaries])


def _is_list(kind: Any) -> bool:
    types = optional("pyarrow", "datasets").types
    return types.is_list(kind) or types.is_large_list(kind)


def _list_arrays(path: Path, table: Any, column: str) -> list[Any]:
    """Returns the chunks of a column: Arrow arrays of lists of integers, without missing values."""
    types = optional("pyarrow", "datasets").types
    if column not in table.column_names:
        raise ValueError(f"{path} has no column {column!r}; its columns are {', '.join(table.column_names)}")
    lists = table.column(column)
    if not _is_list(lists.type) or not types.is_integer(lists.type.value_type):
        raise ValueError(f"{path}: column {column!r} is {lists.type}; give one with lists of integers, the tokens")
    if lists.null_count or any(chunk.values.null_count for chunk in lists.chunks):
        raise ValueError(f"{path}: column {column!r} has missing values; drop those rows first")
    if not lists.chunks:
        raise ValueError(f"{path} has no rows; give a dataset with at least one")
    return lists.chunks


def load_dataset(path: Path) -> Any:
    """Loads the dataset in a folder, with its files mapped into memory.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: a folder with several splits, or one that cannot be read.
    """
    datasets = optional("datasets", "datasets")
    is_single_dataset(path)
    try:
        check_files(path)
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # datasets does not validate its files: other JSON, or a dataset without rows, fails in any of these ways.
        raise ValueError(f"{path} cannot be read as a saved dataset ({error}); save it again, with rows") from error


def check_files(path: Path) -> None:
    """Raises ValueError or OSError unless the files that `datasets` reads are regular files in the folder."""
    read_json(path / "dataset_info.json")
    for file in read_json(path / "state.json")["_data_files"]:
        name = file["filename"]
        if not is_file_name(name):
            raise ValueError(f"state.json names the file {name!r}")
        file_size(path / name)
