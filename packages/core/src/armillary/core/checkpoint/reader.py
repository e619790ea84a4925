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

from armillary.core.checkpoint.metadata import read_metadata
from armillary.core.checkpoint.planner import LoadPlanner
from armillary.core.health.ranks import errors_as_ours


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


def saved_shapes(place: Path, *parts: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a checkpoint whose names begin with one of these."""
    found = read_metadata(place).state_dict_metadata
    tensors = {name: tuple(data.size) for name, data in found.items() if isinstance(data, TensorStorageMetadata)}
    return {name: shape for name, shape in tensors.items() if name.startswith(parts)}


def read_tensors(place: Path, prefix: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors below `prefix`, such as "model", by name: whole, on the CPU, in `dtype` or as they were saved.

    Raises:
        Damaged, ValueError: something else is there than was saved.
        OSError: it cannot be read.
    """
    found = read_metadata(place).state_dict_metadata
    saved = {n.removeprefix(f"{prefix}."): data for n, data in found.items() if n.startswith(f"{prefix}.")}
    tensors = {name: data for name, data in saved.items() if isinstance(data, TensorStorageMetadata)}
    try:
        whole = {name: torch.empty(data.size, dtype=dtype or data.properties.dtype) for name, data in tensors.items()}
    except RuntimeError as error:  # of sizes that nobody has memory for, or that no tensor can have
        raise ValueError(f"no memory for its tensors ({str(error).splitlines()[0]})") from error
    if other := [name for name in saved if name not in whole]:
        raise ValueError(f"{other[0]} is no tensor")
    if not whole:
        raise ValueError(f"it holds no {prefix}")
    with errors_as_ours():
        load({prefix: whole}, place, no_dist=True)
    return whole
