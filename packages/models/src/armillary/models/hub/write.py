"""Writes a model as a Hugging Face folder of safetensors files, in parallel on all ranks of a sharded model.

Rank i % ranks writes file i. All ranks gather each sharded tensor, and only the rank that writes the tensor's file
keeps it. So a rank has at most the tensors of one file and one more tensor in memory. A new folder is written under a
temporary name, and appears complete. In an existing one, new files are written under temporary names beside the old
ones. When all new files are complete, they replace the old ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from os.path import lexists
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.core.internal import read_file, read_json, write_synced, writing
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub.configs import CONFIG, GENERATION, describe
from armillary.models.hub.read import INDEX, WEIGHTS, FileSlice, file_slices
from armillary.models.hub.safetensors import FLOATS, SUFFIX, split, tensor_bytes

# The default of `save_pretrained` in `transformers`.
MAX_FILE_BYTES = 5 * 10**9

# The names that `save_pretrained` gives to files of weights.
WEIGHT_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

# Suffix of a file that is being written. The complete file is renamed to the name without it.
PARTIAL = ".partial"

# Files that `save_pretrained` copies from the folder of the model's original weights.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written to a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # The model's parameters that are joined into it, in order, each with its slice of this tensor.
    sources: list[tuple[FileSlice, Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save(
    folder: str | PathLike[str],
    config: LlamaConfig | GPTConfig,
    tensors: Mapping[str, Tensor],
    source: str | PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes `config`, `tensors` and copies of the tokenizer's files in `source`. See `Pretrained.save_pretrained`."""
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    ranks = SavingRanks(dist.get_rank(), dist.get_world_size()) if is_sharded else SavingRanks(0, 1)
    # 1. Check the arguments. `source` may be missing on some of the ranks only.
    ranks.run(lambda: check(tensors, source, dtype, max_file_bytes))
    # 2. Divide the tensors into files. Every rank computes the same division and the same file names.
    file_tensors = tensors_of_files(config, tensors, dtype)
    first_dtype = next(iter(file_tensors.values())).dtype
    describe(config, first_dtype)  # raises, before anything is written, if no family has this config
    groups = split(file_tensors, max_file_bytes)
    names = [f"model-{i:05d}-of-{len(groups):05d}{SUFFIX}" for i in range(1, len(groups) + 1)]
    names = [WEIGHTS] if len(groups) == 1 else names
    target = Path(folder)
    # A killed save leaves no folder that looks like a model's: a new one gets its name when it is complete. All ranks
    # decide alike, before the first exchange below.
    is_new = not lexists(target)
    written_folder = partial_path(target) if is_new else target
    files = {name: {key: file_tensors[key] for key in group} for name, group in zip(names, groups, strict=True)}
    try:
        # 3. Write the files under temporary names, in rounds of one file per rank.
        ranks.run(lambda: written_folder.mkdir(parents=True, exist_ok=True))
        for first in range(0, len(names), ranks.size):
            write_round(written_folder, dict(list(files.items())[first : first + ranks.size]), ranks)
        # 4. Rank 0 writes the other files, replaces the old ones, and renames a new folder.
        ranks.run(lambda: ranks.rank or commit(written_folder, files, other_files(config, first_dtype, source, target)))
        ranks.run(lambda: ranks.rank or written_folder == target or written_folder.rename(target))
    finally:
        # After an error, this rank's temporary files are still there. After the commit there are none.
        for name in names[ranks.rank :: ranks.size]:
            discard(written_folder / name)
        if is_new:
            with suppress(OSError):  # renamed, or other ranks still have files in it
                written_folder.rmdir()


def write_round(target: Path, files: Mapping[str, Mapping[str, FileTensor]], ranks: SavingRanks) -> None:
    """Gathers the tensors of at most one file per rank, then writes the files concurrently. Collective."""
    own_tensors: dict[str, Tensor] = {}
    # The gathers are collective: every rank takes part in all of them, in the same order.
    for writing_rank, file_tensors in enumerate(files.values()):
        for name, file_tensor in file_tensors.items():
            values = assemble(file_tensor, is_kept=writing_rank == ranks.rank)
            if values is not None:
                own_tensors[name] = values
            del values  # frees the values before the next tensor is gathered
    # Rank i writes the i-th of these files.
    path = target / list(files)[ranks.rank] if ranks.rank < len(files) else None
    ranks.run(lambda: path and write_partial(path, tensor_bytes(own_tensors, {"format": "pt"})))


def check(
    tensors: Mapping[str, Tensor],
    source: str | PathLike[str] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"cannot save {name}: it has no data")
        if (dtype or tensor.dtype) not in FLOATS.values():
            raise ValueError(f"cannot save {name} as {dtype or tensor.dtype}; one of {list(FLOATS.values())} is needed")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes}: at least 1 is needed")
    if source is not None and not Path(source).is_dir():
        raise ValueError(f"source={str(source)!r} is not a folder")


def tensors_of_files(
    config: LlamaConfig | GPTConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, FileTensor]:
    """Returns the tensors of all files by name, in the model's order."""
    slices_by_name = file_slices(config, {name: tensor.shape for name, tensor in tensors.items()})
    file_tensors: dict[str, FileTensor] = {}
    for name, file_slice in slices_by_name.items():
        file_dtype = tensors[name].dtype if dtype is None else dtype
        file_tensor = file_tensors.setdefault(file_slice.name, FileTensor(file_slice.shape, file_dtype, []))
        file_tensor.sources.append((file_slice, tensors[name]))
    return file_tensors


def assemble(file_tensor: FileTensor, is_kept: bool) -> Tensor | None:
    """Returns the values of a file's tensor on the CPU, or None if `is_kept` is False. Collective if it is sharded."""
    values: Tensor | None = None
    for file_slice, parameter in file_tensor.sources:
        full_parameter = full_values(parameter, file_tensor.dtype)
        if not is_kept:
            continue
        if len(file_tensor.sources) == 1:
            return file_slice.transpose(full_parameter.cpu()).contiguous()
        # Several parameters are columns of one tensor in the file, as q, k and v of GPT-2's `c_attn`.
        values = torch.empty(file_tensor.shape, dtype=file_tensor.dtype) if values is None else values
        columns = file_slice.transpose(full_parameter)
        values.narrow(-1, file_slice.start, columns.shape[-1]).copy_(columns)
    return values


@torch.no_grad()
def full_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the full tensor, in `dtype`. Collective if it is sharded."""
    tensor = tensor.detach().to(dtype)  # cast before the all-gather: a narrow dtype sends fewer bytes
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def other_files(
    config: LlamaConfig | GPTConfig, dtype: torch.dtype, source: str | PathLike[str] | None, target: Path
) -> dict[str, bytes]:
    """Returns the contents of `config.json` and of the tokenizer's files in `source`, by name."""
    contents: dict[str, bytes] = {}
    fields = None
    if source is not None:
        origin = Path(source)
        fields = read_json(origin / CONFIG) if (origin / CONFIG).exists() else None
        if origin.resolve() != target.resolve():
            contents = {name: read_file(origin / name) for name in TOKENIZER if (origin / name).exists()}
    return contents | {CONFIG: as_json(describe(config, dtype, fields))}


def as_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def commit(target: Path, files: Mapping[str, Mapping[str, FileTensor]], contents: dict[str, bytes]) -> None:
    """Writes index and other files (`contents`), and renames all new files over the old ones. Runs on one rank.

    The files of weights (`files`) are complete under their temporary names.
    """
    if len(files) > 1:
        files_by_tensor = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        fields = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files_by_tensor.items()))}
        contents = contents | {INDEX: as_json(fields)}
    # 1. Weights of an earlier save: `model.safetensors`, and the files that the index lists. Other files may not be
    # from a save of ours, and must not be removed.
    old_index: object = None
    if (target / INDEX).is_file():
        with suppress(ValueError):  # a broken index names no files
            old_index = read_json(target / INDEX).get("weight_map")
    indexed_files = map(str, cast(dict[str, Any], old_index).values()) if isinstance(old_index, dict) else ()
    old_names = {name for name in (WEIGHTS, *indexed_files) if WEIGHT_NAME.fullmatch(name)}
    try:
        # 2. The other files, under temporary names too.
        for name, content in contents.items():
            write_partial(target / name, [content])
        # 3. Before the renames, remove the index and, if several files replace it, the single file: without both,
        # readers refuse the folder instead of mixing old and new files. Weights come first, index and config.json last.
        (target / INDEX).unlink(missing_ok=True)
        if len(files) > 1:
            (target / WEIGHTS).unlink(missing_ok=True)
        for name in (*files, *contents):
            replace_by_partial(target / name)
    finally:
        for name in contents:
            discard(target / name)
    # 4. Remove weights of an earlier save that no new file has replaced, and temporary files of a save that was killed.
    for name in old_names.difference(files):
        (target / name).unlink(missing_ok=True)
    for path in target.glob(f"*{PARTIAL}"):
        if WEIGHT_NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            path.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def write_partial(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes the partial file of `path`, which `replace_by_partial` then renames to `path`."""
    with writing(path):
        write_synced(partial_path(path), pieces)


def replace_by_partial(path: Path) -> None:
    partial_path(path).replace(path)


def discard(path: Path) -> None:
    partial_path(path).unlink(missing_ok=True)


@dataclass(frozen=True)
class SavingRanks:
    """The ranks that save together: all ranks if a tensor is a DTensor, otherwise only the calling rank."""

    rank: int
    size: int

    def run(self, action: Callable[[], object]) -> None:
        """Calls `action`. If it fails on one rank, raises on every rank. Collective."""
        # A rank whose action failed takes part in the exchange too: otherwise the others would wait for it.
        own_error: Exception | None = None
        try:
            action()
        except Exception as error:
            own_error = error
        if self.size > 1:
            messages: list[Any] = [None] * self.size  # None for a rank without an error
            dist.all_gather_object(messages, own_error and f"{type(own_error).__name__}: {own_error}")
            errors = [f"rank {rank} had {cast(str, message)}" for rank, message in enumerate(messages) if message]
            if errors and own_error is None:
                raise OSError(f"nothing was saved: {'; '.join(errors)}")
        if own_error is not None:
            raise own_error
