"""DCP's reader without pickle: a checkpoint is data, and reading it runs nothing that stands in it.

torch's own reader unpickles `.metadata` as it is, and its planner whatever is not a tensor. Here metadata is read
as `metadata.py` does it, and nothing but tensors is loaded.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.planner as planning
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.futures import Future

from armillary.train.runtime.checkpoint.metadata import check_files, read_metadata
from armillary.train.runtime.checkpoint.planner import LoadPlanner
from armillary.train.runtime.health.ranks import errors_as_ours


class TensorReader(FileSystemReader):
    """Reads what `CheckedWriter` has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.place = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self.place)

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except (OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # torch's tell how to load it all the same
            raise ValueError(f"a file of tensors holds something else ({type(error).__name__})") from error


class TensorPlanner(LoadPlanner):
    """Loads tensors, and refuses what is saved as anything else."""

    def load_bytes(self, read_item: planning.ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor, and nothing else is read")


def load(state: dict[str, Any], place: Path, **options: Any) -> None:
    """Fills the tensors of `state` from the checkpoint at `place`, and runs nothing that stands in it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # where one process is to load alone
        dcp.load(state, storage_reader=TensorReader(place), planner=TensorPlanner(), **options)


def saved_shapes(folder: Path, *prefixes: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the checkpoint's tensors whose names begin with one of the prefixes."""
    entries = read_metadata(folder).state_dict_metadata
    shapes = {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}


def read_tensors(folder: Path, prefix: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Returns the whole tensors below `prefix`, such as "model", by name, on the CPU, in `dtype` or as they were saved.

    Raises:
        Damaged, ValueError: the checkpoint is damaged, lacks the prefix, or is larger than memory.
        OSError: it cannot be read.
    """
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    entries = metadata.state_dict_metadata
    saved = {name.removeprefix(f"{prefix}."): x for name, x in entries.items() if name.startswith(f"{prefix}.")}
    if not saved:
        raise ValueError(f"it holds no {prefix}")
    tensors: dict[str, Tensor] = {}
    for name, entry in saved.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
        try:
            tensors[name] = torch.empty(entry.size, dtype=dtype or entry.properties.dtype)
        except RuntimeError as error:
            raise ValueError(f"no memory for {name} {tuple(entry.size)} ({str(error).splitlines()[0]})") from error
    with errors_as_ours():
        load({prefix: tensors}, folder, no_dist=True)
    return tensors
