"""Writes a model as a Hugging Face folder of safetensors files, in parallel on all ranks of a sharded model.

Rank i % ranks writes file i. All ranks gather each sharded tensor, and only the rank that writes the tensor's file
keeps it. So a rank has at most the tensors of one file and one more tensor in memory. New files are written under
temporary names beside the old ones. When all new files are complete, they replace the old ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.core.parts import read_file, read_json
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub import folder as files
from armillary.models.hub.configs import describe
from armillary.models.hub.folder import CONFIG, INDEX, TOKENIZER, WEIGHTS
from armillary.models.hub.tensors import DTYPES, FileSlice, file_slices

MAX_FILE_BYTES = 5 * 10**9
"""The default of `save_pretrained` in `transformers`."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written to a file.

    Args:
        sources: the model's parameters that are joined into it, in order, each with its slice of this tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
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
    """Writes `config`, `tensors` and copies of the tokenizer's files in `source`. See `Pretrained.save_pretrained`.

    Args:
        tensors: the model's parameters by name.
    """
    # 1. Divide the tensors into files. Every rank computes the same division and the same file names.
    ranks = SavingRanks.of(tensors.values())
    ranks.run(lambda: check(tensors, source, dtype, max_file_bytes))
    file_tensors = tensors_of_files(config, tensors, dtype)
    config_fields = describe(config, next(iter(file_tensors)).dtype)
    files_by_name = name_files(split(file_tensors, max_file_bytes))
    target = Path(folder)
    try:
        # 2. Write the files under temporary names, in rounds of one file per rank.
        ranks.run(lambda: target.mkdir(parents=True, exist_ok=True))
        for first in range(0, len(files_by_name), ranks.size):
            write_round(target, dict(list(files_by_name.items())[first : first + ranks.size]), ranks)
        # 3. Rank 0 replaces the old files.
        ranks.run(lambda: ranks.rank or commit(target, files_by_name, config, config_fields, source))
    finally:
        # After an error, this rank's temporary files are still there. After the commit there are none.
        for name in list(files_by_name)[ranks.rank :: ranks.size]:
            files.discard(target / name)


def check(
    tensors: Mapping[str, Tensor],
    source: str | PathLike[str] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Raises ValueError if a tensor or another argument cannot be saved."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"cannot save {name}: it has no data")
        if (dtype or tensor.dtype) not in DTYPES.values():
            raise ValueError(f"cannot save {name} as {dtype or tensor.dtype}; one of {list(DTYPES.values())} is needed")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes}: at least 1 is needed")
    if source is not None and not Path(source).is_dir():
        raise ValueError(f"source={str(source)!r} is not a folder")


def tensors_of_files(
    config: LlamaConfig | GPTConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[FileTensor]:
    """Returns the tensors of all files, in the model's order."""
    slices_by_name = file_slices(config, {name: tensor.shape for name, tensor in tensors.items()})
    file_tensors: dict[str, FileTensor] = {}
    for name, file_slice in slices_by_name.items():
        file_dtype = tensors[name].dtype if dtype is None else dtype
        file_tensor = file_tensors.setdefault(
            file_slice.name, FileTensor(file_slice.name, file_slice.shape, file_dtype, [])
        )
        file_tensor.sources.append((file_slice, tensors[name]))
    return list(file_tensors.values())


def split(file_tensors: Sequence[FileTensor], max_file_bytes: int) -> list[list[FileTensor]]:
    """Divides tensors into files as `transformers` does: in order, and a tensor above the limit has its own file."""
    groups: list[list[FileTensor]] = []
    current: list[FileTensor] = []
    for tensor in file_tensors:
        if tensor.nbytes > max_file_bytes:
            groups.append([tensor])
            continue
        if sum(t.nbytes for t in current) + tensor.nbytes > max_file_bytes:
            groups.append(current)
            current = []
        current.append(tensor)
    return [*groups, current] if current else groups


def name_files(groups: Sequence[list[FileTensor]]) -> dict[str, list[FileTensor]]:
    """Returns the tensors of each file by the file's name."""
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": file_tensors for i, file_tensors in enumerate(groups, 1)}


def write_round(target: Path, files_by_name: Mapping[str, list[FileTensor]], ranks: SavingRanks) -> None:
    """Gathers the tensors of at most one file per rank, then writes the files concurrently. Collective.

    Args:
        files_by_name: rank i writes the i-th of these files.
    """
    own_tensors: dict[str, Tensor] = {}
    # The gathers are collective: every rank takes part in all of them, in the same order.
    for writing_rank, file_tensors in enumerate(files_by_name.values()):
        for tensor in file_tensors:
            values = assemble(tensor, is_kept=writing_rank == ranks.rank)
            if values is not None:
                own_tensors[tensor.name] = values
            del values  # frees the values before the next tensor is gathered
    path = target / list(files_by_name)[ranks.rank] if ranks.rank < len(files_by_name) else None
    ranks.run(lambda: path and write_weights(path, own_tensors))


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


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file under the temporary name of `path`."""

    def save(partial: Path) -> None:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            # For a full disk, safetensors raises its own exception, with the system's error number in the message.
            match = re.search(r"os error (\d+)", str(error))
            if match is None:
                raise OSError(str(error)) from error
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error

    files.write_partial(path, save)


def commit(
    target: Path,
    files_by_name: Mapping[str, list[FileTensor]],
    config: LlamaConfig | GPTConfig,
    config_fields: dict[str, Any],
    source: str | PathLike[str] | None,
) -> None:
    """Renames the complete new files over the old ones: weights first, index and `config.json` last. Runs on one rank.

    During the renames a folder of several files has no index. So readers refuse it instead of mixing old and new files.
    """
    write_functions = writers_of_other_files(target, files_by_name, config, config_fields, source)
    old_weights = files.earlier_weights(target)
    try:
        # 1. The other files, under temporary names too.
        for name, write in write_functions.items():
            files.write_partial(target / name, write)
        # 2. Before the renames, remove the index and, if several files replace it, the single file: without both,
        # readers refuse the folder.
        (target / INDEX).unlink(missing_ok=True)
        if len(files_by_name) > 1:
            (target / WEIGHTS).unlink(missing_ok=True)
        for name in (*files_by_name, *write_functions):
            files.replace_by_partial(target / name)
    finally:
        for name in write_functions:
            files.discard(target / name)
    # 3. Remove weights of an earlier save that no new file has replaced.
    for name in old_weights - files_by_name.keys():
        (target / name).unlink(missing_ok=True)
    for path in target.glob(f"*{files.PARTIAL}"):  # temporary files of a save that was killed
        if files.WEIGHT_NAME.fullmatch(path.name.removesuffix(files.PARTIAL)):
            path.unlink(missing_ok=True)


def writers_of_other_files(
    target: Path,
    files_by_name: Mapping[str, list[FileTensor]],
    config: LlamaConfig | GPTConfig,
    config_fields: dict[str, Any],
    source: str | PathLike[str] | None,
) -> dict[str, Callable[[Path], object]]:
    """Returns a function for each file except weights (tokenizer, config, index), which writes it to a path."""
    write_functions: dict[str, Callable[[Path], object]] = {}
    if source is not None:
        origin = Path(source)
        dtype = getattr(torch, config_fields["torch_dtype"])
        fields = read_json(origin / CONFIG) if (origin / CONFIG).exists() else None
        config_fields = describe(config, dtype, fields)
        for name in TOKENIZER:
            if (origin / name).exists() and origin.resolve() != target.resolve():
                write_functions[name] = lambda path, file=origin / name: path.write_bytes(read_file(file))
    write_functions[CONFIG] = lambda path: path.write_text(files.as_json(config_fields))
    if len(files_by_name) > 1:
        write_functions[INDEX] = lambda path: path.write_text(files.as_json(index(files_by_name)))
    return write_functions


def index(files_by_name: Mapping[str, list[FileTensor]]) -> dict[str, Any]:
    """Returns the contents of `model.safetensors.index.json`."""
    file_names = {tensor.name: file for file, file_tensors in files_by_name.items() for tensor in file_tensors}
    total = sum(tensor.nbytes for file_tensors in files_by_name.values() for tensor in file_tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}


@dataclass(frozen=True)
class SavingRanks:
    """The ranks that save together: all ranks if a tensor is a DTensor, otherwise only the calling rank."""

    rank: int
    size: int

    @classmethod
    def of(cls, tensors: Any) -> SavingRanks:
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        return cls(dist.get_rank(), dist.get_world_size()) if sharded else cls(0, 1)

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
