"""Reads tensors from safetensors files. Each rank reads its own parts, without communication.

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

from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub.folder import CONFIG, INDEX, WEIGHTS, weight_map
from armillary.models.hub.tensors import DTYPES, FileSlice, Names, file_slices, names_of, parameter_shapes
from armillary.models.parameter_shards import Box, local_part

MAX_FAULTS = 8
"""Faults that an error names; it counts further ones."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of an open file, as its header describes it."""

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
    """Reads full tensors of these names and shapes, on the CPU, in `dtype` or the file's dtype.

    Raises:
        ValueError: a file is missing or broken, or a tensor missing, unexpected or of another shape; names it.
    """
    tensors: dict[str, Tensor] = {}
    expected_slices = file_slices(config, shapes)
    with open_entries(Path(folder), names_of(config)) as entries:
        check_entries(Path(folder), entries, expected_slices)
        for name, file_slice in expected_slices.items():
            values = part_of(entries, file_slice, tuple(slice(0, size) for size in shapes[name]))
            # A copy: a view would map the file, and saving to the same folder would change the tensor.
            tensors[name] = torch.empty(shapes[name], dtype=dtype or values.dtype).copy_(values)
    return tensors


@torch.no_grad()
def fill(folder: str | PathLike[str], config: LlamaConfig | GPTConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills each parameter, or this rank's part of a `DTensor`.

    Raises:
        ValueError: as `read_tensors`; or a parameter has no data, or its local part is not a box of the full tensor.
    """
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before load_pretrained")
    # All refusals come before the first copy: parts that are no box, then names, shapes and dtypes.
    local_parts = {name: local_part(parameter) for name, parameter in parameters.items()}
    expected_slices = file_slices(config, {name: parameter.shape for name, parameter in parameters.items()})
    with open_entries(Path(folder), names_of(config)) as entries:
        check_entries(Path(folder), entries, expected_slices)
        for name, (local, box) in local_parts.items():
            if local.numel():
                local.copy_(part_of(entries, expected_slices[name], box))


def part_of(entries: Mapping[str, TensorEntry], file_slice: FileSlice, box: Box) -> Tensor:
    """Returns a box of one of our tensors, possibly as a view of the file."""
    return file_slice.transpose(read_box(entries[file_slice.name], file_slice.index(box)))


def read_box(entry: TensorEntry, index: Box) -> Tensor:
    """Reads a box of a tensor. The only function that reads tensor data."""
    return cast(Tensor, entry.file.get_slice(entry.key)[index])


@contextmanager
def open_entries(folder: Path, names: Names) -> Generator[dict[str, TensorEntry]]:
    """Context manager that opens a folder's files and returns its tensors, by their names in a causal LM."""
    with ExitStack() as stack:
        index = weight_map(folder)
        files = [WEIGHTS] if index is None else sorted(set(index.values()))
        entries: dict[str, TensorEntry] = {}
        for file in files:
            file_entries = headers(folder / file, stack)
            if index is not None:
                # The index decides: a tensor that it places in another file is skipped, one that is absent is an error.
                expected_names = [name for name, index_file in index.items() if index_file == file]
                if missing_names := [name for name in expected_names if name not in file_entries]:
                    raise ValueError(f"{folder / INDEX} lists {join_faults(missing_names)} in {file}, which lacks it")
                file_entries = {name: entry for name, entry in file_entries.items() if index.get(name, file) == file}
            entries |= file_entries
        entries = {key: entry for key, entry in entries.items() if not names.ignored.fullmatch(key)}
        # A folder of a base model, without a head, has names without the prefix ("model.").
        if not any(key.startswith(names.prefix) for key in entries):
            entries = {key if key.startswith("lm_head.") else names.prefix + key: entries[key] for key in entries}
        yield entries


def check_entries(folder: Path, entries: Mapping[str, TensorEntry], expected_slices: Mapping[str, FileSlice]) -> None:
    """Raises ValueError unless names, shapes and dtypes of the entries match `expected_slices`."""
    if faults := list(
        differences(entries, {file_slice.name: file_slice.shape for file_slice in expected_slices.values()})
    ):
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {join_faults(faults, '; ')}")


def check_weights(folder: Path, config: LlamaConfig | GPTConfig, build: Callable[[Any], nn.Module]) -> None:
    """Raises ValueError unless the folder's weights have the shapes of the config's model. Reads headers only.

    A config may state any sizes, so nothing is built for more layers than there are tensors.

    Args:
        build: builds a model from a config.
    """
    with open_entries(folder, names_of(config)) as entries:
        if config.layers > len(entries):
            raise ValueError(
                f"the weights in {folder} do not fit its {CONFIG}: {len(entries)} tensors, and {config.layers} layers"
            )
        check_entries(folder, entries, file_slices(config, parameter_shapes(build, config)))


def headers(path: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    """Opens a file, which `stack` closes, and returns its tensors."""
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        entries: dict[str, TensorEntry] = {}
        for key in cast(Iterable[str], file.keys()):
            header = file.get_slice(key)
            entries[key] = TensorEntry(file, key, tuple(header.get_shape()), header.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return entries


def differences(entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Yields a message for each unexpected name, shape or dtype."""
    yield from (f"{name} is missing" for name in shapes if name not in entries)
    for name, entry in entries.items():
        if name not in shapes:
            yield f"{name} is not part of the model"
        elif entry.shape != shapes[name]:
            yield f"{name} is {entry.shape}, not {shapes[name]}"
        elif entry.dtype not in DTYPES:
            yield f"{name} is {entry.dtype}, not one of {', '.join(DTYPES)}"


def join_faults(faults: list[str], separator: str = ", ") -> str:
    suffix = f"{separator}and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return separator.join(faults[:MAX_FAULTS]) + suffix
