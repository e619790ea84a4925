"""From files into tensors: each rank reads what it holds, and nothing is communicated.

The headers of all files are checked first. So whatever does not fit is refused on every rank before anything changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from armillary.core.shards import Box, local_part
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub.folder import CONFIG, INDEX, WEIGHTS, weight_map
from armillary.models.hub.tensors import DTYPES, Names, Place, names_of, places

SHOWN = 8
"""Faults that an error names; it counts the others."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in an open file, by its header."""

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
    """The whole tensors of these names and shapes, on the CPU, in `dtype` or that of the file.

    Raises:
        ValueError: a missing or broken file, or a missing, extra or misshapen tensor; names it.
    """
    found = places(config, shapes)
    tensors: dict[str, Tensor] = {}
    with entries(Path(folder), found, names_of(config)) as known:
        for name, place in found.items():
            part = part_of(known, place, tuple(slice(0, size) for size in shapes[name]))
            # A copy, or the tensor would be the file: its next save would change it.
            wanted = part.dtype if dtype is None else dtype
            tensors[name] = torch.empty(shapes[name], dtype=wanted).copy_(part)
    return tensors


@torch.no_grad()
def fill(folder: str | PathLike[str], config: LlamaConfig | GPTConfig, parameters: Mapping[str, Tensor]) -> None:
    """Copies into each parameter, which may be a `DTensor`, what this rank holds of it.

    Raises:
        ValueError: as `read_tensors`, and parameters that have no data or are sharded in parts that are no boxes.
    """
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before load_pretrained")
    held = {name: local_part(parameter) for name, parameter in parameters.items()}
    found = places(config, {name: parameter.shape for name, parameter in parameters.items()})
    with entries(Path(folder), found, names_of(config)) as known:
        for name, (local, box) in held.items():
            if local.numel():
                local.copy_(part_of(known, found[name], box))


def part_of(known: Mapping[str, TensorEntry], place: Place, box: Box) -> Tensor:
    """A box of one of our tensors. It may lie in the file still."""
    entry = known[place.name]
    return place.turn(cut(entry, place.index(box)))


def cut(entry: TensorEntry, index: Box) -> Tensor:
    """The one place where tensors are read: only what is asked for."""
    return cast(Tensor, entry.file.get_slice(entry.key)[index])


@contextmanager
def entries(folder: Path, found: Mapping[str, Place], names: Names) -> Generator[dict[str, TensorEntry]]:
    """The folder's tensors by the names that our places have, in files that are open meanwhile."""
    with ExitStack() as stack:
        indexed = weight_map(folder)
        files = [WEIGHTS] if indexed is None else sorted(set(indexed.values()))
        known: dict[str, TensorEntry] = {}
        for file in files:
            stored = headers(folder / file, stack)
            if lost := [name for name, holder in (indexed or {}).items() if holder == file and name not in stored]:
                raise ValueError(f"{folder / INDEX} has {listed(lost)} in {file}, and it is not there")
            known |= {key: entry for key, entry in stored.items() if (indexed or {}).get(key, file) == file}
        known = {key: entry for key, entry in known.items() if not names.ignored.fullmatch(key)}
        if not any(key.startswith(names.prefix) for key in known):
            known = {key if key.startswith("lm_head.") else names.prefix + key: known[key] for key in known}
        if faults := list(differences(known, {place.name: place.shape for place in found.values()})):
            raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {listed(faults, '; ')}")
        yield known


def headers(path: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    """The tensors in a file, which is closed with the stack."""
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        found: dict[str, TensorEntry] = {}
        for key in cast(Iterable[str], file.keys()):
            header = file.get_slice(key)
            found[key] = TensorEntry(file, key, tuple(header.get_shape()), header.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return found


def differences(known: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """What is wrong with names, shapes and dtypes."""
    yield from (f"{name} is missing" for name in shapes if name not in known)
    for name, entry in known.items():
        if name not in shapes:
            yield f"{name} is not part of the model"
        elif entry.shape != shapes[name]:
            yield f"{name} is {entry.shape}, not {shapes[name]}"
        elif entry.dtype not in DTYPES:
            yield f"{name} is {entry.dtype}, not one of {', '.join(DTYPES)}"


def listed(faults: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return between.join(faults[:SHOWN]) + more
