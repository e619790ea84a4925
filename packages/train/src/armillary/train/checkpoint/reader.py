"""Reads the tensors of a checkpoint with torch's reader of safetensors files, which contain no code to execute.

state = {"model": get_model_state_dict(model)}
load(state, folder, Manifest.read(folder).files)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.planner as planning
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.futures import Future

from armillary.core.parts import file_size
from armillary.data.console import one_line
from armillary.train.checkpoint.planner import LoadPlanner
from armillary.train.runtime.health.ranks import convert_dcp_errors

SUFFIX = ".safetensors"


class Damaged(Exception):
    """A checkpoint has changed since it was written; the message says how."""


class ListedFiles(FileSystem):
    """A file system whose `ls` returns only the files of the checkpoint.

    torch's reader reads every file that `ls` returns, and the folder may contain files that nobody saved there. An
    OSError is raised for a file that is not a regular one.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        for name in self.paths:
            file_size(name)
        return self.paths


class TensorReader(HuggingFaceStorageReader):
    """Reads the files of a checkpoint that `TensorWriter` wrote.

    Args:
        folder: folder of the checkpoint.
        files: names of its files; other files in the folder are not read.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        super().__init__(str(folder))
        self.fs = ListedFiles([str(folder / name) for name in sorted(files) if name.endswith(SUFFIX)])

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns shapes and dtypes from the headers of all files.

        Checks that the chunks of each tensor have its dtype, and as many elements as the tensor, so that no header can
        state a tensor larger than its data.

        Raises:
            Damaged: a header is invalid, or a tensor is incomplete.
            ValueError, OSError: a file cannot be read, for example for lack of memory.
        """
        try:
            metadata = super().read_metadata()
            for name, entry in metadata.state_dict_metadata.items():
                assert isinstance(entry, TensorStorageMetadata)
                check_chunks(name, entry)
            for index, chunk in metadata.storage_data.items():  # torch takes a tensor's dtype from its first chunk
                entry = metadata.state_dict_metadata[index.fqn]
                assert isinstance(entry, TensorStorageMetadata)
                if chunk.dtype != entry.properties.dtype:
                    raise ValueError(f"{index.fqn}: chunks of {entry.properties.dtype} and of {chunk.dtype}")
        except OSError:
            raise
        except Exception as error:  # a manipulated header can make torch fail with any exception
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            # torch raises a RuntimeError if memory is short; the file may be intact. RecursionError is a RuntimeError
            # too, but comes from JSON that is nested too deeply.
            if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
                raise ValueError(f"files of tensors cannot be read ({reason})") from error
            raise Damaged(f"headers of tensors are invalid ({reason})") from error
        return metadata

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        """Reads the tensors of a plan.

        Raises:
            ValueError: torch or safetensors raised an error other than the next two.
            OSError, torch.OutOfMemoryError: as raised by torch.
        """
        try:
            return super().read_data(plan, planner)
        except (OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(f"tensors cannot be read ({type(error).__name__}: {one_line(str(error))})") from error


def check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    """Raises ValueError unless a tensor's chunks have valid offsets and together as many elements as the tensor."""
    for chunk in entry.chunks:
        if len(chunk.offsets) != len(chunk.sizes) or any(offset < 0 for offset in chunk.offsets):
            raise ValueError(f"{name}: a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)}")
    elements = sum(prod(chunk.sizes) for chunk in entry.chunks)
    if elements != prod(entry.size):
        raise ValueError(f"{name}: {elements} elements of a tensor of {tuple(entry.size)}")


def load(state: dict[str, Any], folder: Path, files: Iterable[str], **options: Any) -> None:
    """Fills the tensors of `state` from a checkpoint. Collective, unless `no_dist=True` is among the options of DCP."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected with no_dist
        dcp.load(state, storage_reader=TensorReader(folder, files), planner=LoadPlanner(), **options)


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns shape and dtype as text, equal for tensors of which one may be loaded into the other.

    These have equal dtypes, or float32 and float64, the dtypes of parameters: a run may resume in the other one.
    """
    is_wide = dtype in (torch.float32, torch.float64)
    return f"{tuple(shape)} of {'float32 or float64' if is_wide else str(dtype).removeprefix('torch.')}"


def saved_tensors(folder: Path, files: Iterable[str], *prefixes: str) -> dict[str, str]:
    """Returns descriptions of the checkpoint's tensors whose names begin with one of the prefixes, by name.

    Raises:
        Damaged, ValueError, OSError: as `TensorReader.read_metadata`.
    """
    entries = TensorReader(folder, files).read_metadata().state_dict_metadata
    return {
        name: describe_tensor(entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefixes)
    }


def read_tensors(
    folder: Path, files: Iterable[str], prefix: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU: those whose names begin with `prefix` and a dot, by the remaining name.

    Args:
        prefix: "model" or "optimizer".
        dtype: dtype of the returned tensors; None: as saved.

    Raises:
        Damaged, ValueError: the checkpoint is damaged, has no tensors below `prefix`, or does not fit into memory.
        OSError: a file cannot be read.
    """
    names = list(files)
    entries = TensorReader(folder, names).read_metadata().state_dict_metadata
    saved_tensors = {name.removeprefix(f"{prefix}."): x for name, x in entries.items() if name.startswith(f"{prefix}.")}
    if not saved_tensors:
        raise ValueError(f"it holds no {prefix}")
    tensors: dict[str, Tensor] = {}
    for name, entry in saved_tensors.items():
        assert isinstance(entry, TensorStorageMetadata)
        try:
            tensors[name] = torch.empty(entry.size, dtype=dtype or entry.properties.dtype)
        except RuntimeError as error:
            raise ValueError(f"no memory for {name} {tuple(entry.size)} ({str(error).splitlines()[0]})") from error
    with convert_dcp_errors():
        load({prefix: tensors}, folder, names, no_dist=True)
    return tensors
