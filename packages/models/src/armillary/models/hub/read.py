"""Reads parameters from safetensors files. Each rank reads the bytes of its own shards, without communication.

Every rank checks the headers of all files first, so that all ranks refuse a bad folder before any parameter changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from armillary.core.parts import file_size
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub.folder import CONFIG, INDEX, WEIGHTS, weight_map
from armillary.models.hub.tensors import DTYPES, FileSlice, Names, file_slices, names_of, parameter_shapes
from armillary.models.parameter_shards import Box, local_part

MAX_FAULTS = 8
"""Largest number of faults that an error lists. Of further faults it gives only the number."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of an open file, as the file's header describes it: its name in the file, shape and dtype."""

    file: Any
    key: str
    shape: tuple[int, ...]
    dtype: str


def read_tensors(
    folder: str | PathLike[str],
    config: LlamaConfig | GPTConfig,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Reads full parameters to the CPU, in `dtype` or by default the file's dtype.

    Args:
        shapes: the shape of each parameter, by name.

    Raises:
        ValueError: a file is missing or broken, or a tensor is missing, unexpected, of another shape or of no dtype of
            `DTYPES`. The error names the file or tensor.
    """
    tensors: dict[str, Tensor] = {}
    expected_slices = file_slices(config, shapes)
    with open_entries(Path(folder), names_of(config)) as entries:
        check_entries(Path(folder), entries, expected_slices)
        for name, file_slice in expected_slices.items():
            values = part_of(entries, file_slice, tuple(slice(0, size) for size in shapes[name]))
            # Copied, because `values` may be a view of the mapped file, and saving to the same folder would change it.
            tensors[name] = torch.empty(shapes[name], dtype=dtype or values.dtype).copy_(values)
    return tensors


@torch.no_grad()
def fill(folder: str | PathLike[str], config: LlamaConfig | GPTConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills each parameter from a folder; of a `DTensor`, this rank's shard.

    Raises:
        ValueError: as `read_tensors`; or a parameter is on "meta", or its shard is not a box of the full tensor.
    """
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before load_pretrained")
    # Everything is checked before the first copy: here the shards, then names, shapes and dtypes in the files.
    local_parts = {name: local_part(parameter) for name, parameter in parameters.items()}
    expected_slices = file_slices(config, {name: parameter.shape for name, parameter in parameters.items()})
    with open_entries(Path(folder), names_of(config)) as entries:
        check_entries(Path(folder), entries, expected_slices)
        for name, (local, box) in local_parts.items():
            if local.numel():
                local.copy_(part_of(entries, expected_slices[name], box))


def part_of(entries: Mapping[str, TensorEntry], file_slice: FileSlice, box: Box) -> Tensor:
    """Reads a box of a parameter. The result may be a view of the mapped file.

    Args:
        file_slice: the slice of a file's tensor that the parameter is.
        box: a box of the parameter.
    """
    return file_slice.transpose(read_box(entries[file_slice.name], file_slice.index(box)))


def read_box(entry: TensorEntry, index: Box) -> Tensor:
    """Reads a box of a file's tensor. No other function reads tensor data."""
    return cast(Tensor, entry.file.get_slice(entry.key)[index])


@contextmanager
def open_entries(folder: Path, names: Names) -> Generator[dict[str, TensorEntry]]:
    """Context manager that opens a folder's files and returns their tensors by name, with the prefix of `names`."""
    with ExitStack() as stack:
        index = weight_map(folder)
        files = [WEIGHTS] if index is None else sorted(set(index.values()))
        entries: dict[str, TensorEntry] = {}
        for file in files:
            file_entries = open_file(folder / file, stack)
            if index is not None:
                # The index decides where a tensor is. If it lists another file for a tensor, the tensor is skipped
                # here. If it lists this file and the tensor is not there, that is an error.
                expected_names = [name for name, index_file in index.items() if index_file == file]
                if missing_names := [name for name in expected_names if name not in file_entries]:
                    raise ValueError(f"{folder / INDEX} lists {join_faults(missing_names)} in {file}, which lacks it")
                file_entries = {name: entry for name, entry in file_entries.items() if index.get(name, file) == file}
            entries |= file_entries
        entries = {key: entry for key, entry in entries.items() if not names.ignored.fullmatch(key)}
        # The folder of a base model has names without the prefix. A head's name has no prefix in any folder.
        if not any(key.startswith(names.prefix) for key in entries):
            entries = {key if key.startswith("lm_head.") else names.prefix + key: entries[key] for key in entries}
        yield entries


def check_entries(folder: Path, entries: Mapping[str, TensorEntry], expected_slices: Mapping[str, FileSlice]) -> None:
    """Raises ValueError unless entries have the names and shapes of `expected_slices`, and dtypes of `DTYPES`."""
    if faults := list(
        differences(entries, {file_slice.name: file_slice.shape for file_slice in expected_slices.values()})
    ):
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {join_faults(faults, '; ')}")


def check_weights(folder: Path, config: LlamaConfig | GPTConfig, build: Callable[[Any], nn.Module]) -> None:
    """Raises ValueError unless the folder's weights have the shapes of the config's model. Reads headers only.

    Args:
        build: builds a model from a config.
    """
    with open_entries(folder, names_of(config)) as entries:
        # Checked first, because a config file may state any number of layers, and `parameter_shapes` lists them all.
        if config.layers > len(entries):
            raise ValueError(
                f"the weights in {folder} do not fit its {CONFIG}: {len(entries)} tensors, and {config.layers} layers"
            )
        check_entries(folder, entries, file_slices(config, parameter_shapes(build, config)))


def open_file(path: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    """Opens a safetensors file and returns its tensors by name. `stack` closes the file."""
    try:
        file_size(path)  # raises for a FIFO or a device
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        entries: dict[str, TensorEntry] = {}
        for key in cast(Iterable[str], file.keys()):
            header = file.get_slice(key)
            entries[key] = TensorEntry(file, key, tuple(header.get_shape()), header.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return entries


def differences(entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Yields a message for each missing or unexpected name, and each unexpected shape or dtype."""
    yield from (f"{name} is missing" for name in shapes if name not in entries)
    for name, entry in entries.items():
        if name not in shapes:
            yield f"{name} is not part of the model"
        elif entry.shape != shapes[name]:
            yield f"{name} is {entry.shape}, not {shapes[name]}"
        elif entry.dtype not in DTYPES:
            yield f"{name} is {entry.dtype}, not one of {', '.join(DTYPES)}"


def join_faults(faults: list[str], separator: str = ", ") -> str:
    """Returns the first `MAX_FAULTS` messages, and the number of the others."""
    suffix = f"{separator}and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return separator.join(faults[:MAX_FAULTS]) + suffix
