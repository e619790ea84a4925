"""Writes a model as a Hugging Face folder of safetensors files, in parallel on all ranks of a sharded model.

Rank i % ranks writes file i. All ranks gather each sharded tensor, and only the rank that writes its file keeps it.
So a rank holds at most the tensors of one file and one further tensor. New files are written under temporary names
beside the old ones, which they replace once all are complete.
"""

from __future__ import annotations

import os
import re
import shutil
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

from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub import folder as files
from armillary.models.hub.configs import describe
from armillary.models.hub.folder import CONFIG, INDEX, TOKENIZER, WEIGHTS
from armillary.models.hub.tensors import DTYPES, FileSlice, file_slices

MAX_FILE_BYTES = 5 * 10**9
"""The default of `save_pretrained` in `transformers`."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and the model's tensors that are joined into it, in order."""

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
    """Writes `config`, `tensors` and copies of the tokenizer's files in `source`. See `Pretrained.save_pretrained`."""
    # 1. Divide the tensors into files. Every rank computes the same names.
    ranks = SavingRanks.of(tensors.values())
    ranks.agree(lambda: check(tensors, source, dtype, max_file_bytes))
    file_tensors = tensors_of_files(config, tensors, dtype)
    config_fields = describe(config, next(iter(file_tensors)).dtype)
    files_by_name = name_files(split(file_tensors, max_file_bytes))
    target = Path(folder)
    try:
        # 2. Write them under temporary names, one file per rank at a time.
        ranks.agree(lambda: target.mkdir(parents=True, exist_ok=True))
        for first in range(0, len(files_by_name), ranks.size):
            write_round(target, dict(list(files_by_name.items())[first : first + ranks.size]), ranks)
        # 3. Rank 0 replaces the old files.
        ranks.agree(lambda: ranks.rank or commit(target, files_by_name, config, config_fields, source))
    finally:
        # After an error, temporary files remain; after the commit there are none.
        for path in list(files_by_name)[ranks.rank :: ranks.size]:
            files.discard(target / path)


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
    """Splits tensors into files as `transformers` does: in order; a tensor above the limit gets a file of its own."""
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
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": file_tensors for i, file_tensors in enumerate(groups, 1)}


def write_round(target: Path, files_by_name: Mapping[str, list[FileTensor]], ranks: SavingRanks) -> None:
    """Gathers tensors for at most one file per rank, then writes the files concurrently. Collective."""
    own_tensors: dict[str, Tensor] = {}
    # Every rank gathers every tensor, in the same order, also those that it does not keep.
    for writer, file_tensors in enumerate(files_by_name.values()):
        for tensor in file_tensors:
            values = assemble(tensor, is_kept=writer == ranks.rank)
            if values is not None:
                own_tensors[tensor.name] = values
            del values  # frees it before the next one is gathered
    path = target / list(files_by_name)[ranks.rank] if ranks.rank < len(files_by_name) else None
    ranks.agree(lambda: path and write_weights(path, own_tensors))


def assemble(file_tensor: FileTensor, is_kept: bool) -> Tensor | None:
    """Returns a tensor of a file on the CPU; None unless this rank keeps it. Collective if it is sharded."""
    values: Tensor | None = None
    for file_slice, tensor in file_tensor.sources:
        our_values = full_values(tensor, file_tensor.dtype)
        if not is_kept:
            continue
        if len(file_tensor.sources) == 1:
            return file_slice.transpose(our_values.cpu()).contiguous()
        # Several of our tensors are columns of one tensor in the file, as q, k and v of GPT-2's `c_attn`.
        values = torch.empty(file_tensor.shape, dtype=file_tensor.dtype) if values is None else values
        values_in_file = file_slice.transpose(our_values)
        values.narrow(-1, file_slice.start, values_in_file.shape[-1]).copy_(values_in_file)
    return values


@torch.no_grad()
def full_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the full tensor, in `dtype`. Collective if it is sharded."""
    tensor = tensor.detach().to(dtype)  # cast before the all-gather: a narrow dtype sends fewer bytes
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    def save(partial: Path) -> None:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            # safetensors raises a full disk as an error of its own, with the system's error number in the message.
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

    Meanwhile a folder of several files has no index, so that readers refuse it instead of mixing old and new files.
    """
    writers = other_writers(target, files_by_name, config, config_fields, source)
    old_weights = files.earlier_weights(target)
    try:
        for name, save in writers.items():
            files.write_partial(target / name, save)
        (target / INDEX).unlink(missing_ok=True)
        if len(files_by_name) > 1:
            (target / WEIGHTS).unlink(missing_ok=True)
        for name in (*files_by_name, *writers):
            files.replace_by_partial(target / name)
    finally:
        for name in writers:
            files.discard(target / name)
    for name in old_weights - files_by_name.keys():
        (target / name).unlink(missing_ok=True)
    for path in target.glob(f"*{files.PARTIAL}"):  # left by a killed save
        if files.WEIGHT_NAME.fullmatch(path.name.removesuffix(files.PARTIAL)):
            path.unlink(missing_ok=True)


def other_writers(
    target: Path,
    files_by_name: Mapping[str, list[FileTensor]],
    config: LlamaConfig | GPTConfig,
    config_fields: dict[str, Any],
    source: str | PathLike[str] | None,
) -> dict[str, Callable[[Path], object]]:
    """Returns functions that write the files besides weights (config, index, tokenizer), by file name."""
    writers: dict[str, Callable[[Path], object]] = {}
    if source is not None:
        origin = Path(source)
        dtype = getattr(torch, config_fields["torch_dtype"])
        fields = files.read_json(origin / CONFIG) if (origin / CONFIG).exists() else None
        config_fields = describe(config, dtype, fields)
        for name in TOKENIZER:
            if (origin / name).exists() and origin.resolve() != target.resolve():
                writers[name] = lambda path, file=origin / name: shutil.copyfile(file, path)
    writers[CONFIG] = lambda path: path.write_text(files.as_json(config_fields))
    if len(files_by_name) > 1:
        writers[INDEX] = lambda path: path.write_text(files.as_json(index(files_by_name)))
    return writers


def index(files_by_name: Mapping[str, list[FileTensor]]) -> dict[str, Any]:
    """Returns the contents of `model.safetensors.index.json`."""
    file_names = {tensor.name: file for file, file_tensors in files_by_name.items() for tensor in file_tensors}
    total = sum(tensor.nbytes for file_tensors in files_by_name.values() for tensor in file_tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}


@dataclass(frozen=True)
class SavingRanks:
    """The ranks that save together: all ranks if a tensor is sharded, otherwise only the calling rank."""

    rank: int
    size: int

    @classmethod
    def of(cls, tensors: Any) -> SavingRanks:
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        return cls(dist.get_rank(), dist.get_world_size()) if sharded else cls(0, 1)

    def agree(self, action: Callable[[], object]) -> None:
        """Calls `action`. If it fails on one rank, raises on every rank."""
        # A failed rank takes part in the exchange too: otherwise the others would wait for it.
        own_error: Exception | None = None
        try:
            action()
        except Exception as error:
            own_error = error
        if self.size > 1:
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, own_error and f"{type(own_error).__name__}: {own_error}")
            errors = {rank: cast(str, answer) for rank, answer in enumerate(answers) if answer}
            if errors and own_error is None:
                raise OSError(f"nothing was saved: {'; '.join(f'rank {r} had {text}' for r, text in errors.items())}")
        if own_error is not None:
            raise own_error
