"""From tensors into files, one file after the other, so that no rank holds more than one file and one tensor.

Sharded tensors are gathered one at a time by all ranks; file i is kept and written by rank i modulo their number. What
is written lies beside the old files until all of it is there.
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
from armillary.models.hub.tensors import DTYPES, Place, places

MAX_FILE_BYTES = 5 * 10**9
"""As `transformers` has it."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and the tensors of ours that it is made of, in order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[Place, Tensor]]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save(
    folder: str | PathLike[str],
    config: LlamaConfig | GPTConfig,
    tensors: Mapping[str, Tensor],
    source: str | PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes `config` and `tensors`, and what belongs to the model in `source`. See `Pretrained.save_pretrained`."""
    ranks = SavingRanks.around(tensors.values())
    ranks.agree(lambda: check(tensors, source, dtype, max_file_bytes))
    stored = all_stored(config, tensors, dtype)
    described = describe(config, next(iter(stored)).dtype)
    named = name_files(split(stored, max_file_bytes))
    target = Path(folder)
    try:
        ranks.agree(lambda: target.mkdir(parents=True, exist_ok=True))
        for first in range(0, len(named), ranks.size):
            write_round(target, dict(list(named.items())[first : first + ranks.size]), ranks)
        ranks.agree(lambda: ranks.rank or commit(target, named, config, described, source))
    finally:
        for path in list(named)[ranks.rank :: ranks.size]:
            files.discard(target / path)


def check(
    tensors: Mapping[str, Tensor],
    source: str | PathLike[str] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Refuses what cannot be saved."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"cannot save {name}: it has no data")
        if (dtype or tensor.dtype) not in DTYPES.values():
            raise ValueError(f"cannot save {name} as {dtype or tensor.dtype}; one of {list(DTYPES.values())} is needed")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes}: at least 1 is needed")
    if source is not None and not Path(source).is_dir():
        raise ValueError(f"source={str(source)!r} is no folder")


def all_stored(
    config: LlamaConfig | GPTConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[Stored]:
    """The tensors that files will hold, in the model's order."""
    found = places(config, {name: tensor.shape for name, tensor in tensors.items()})
    stored: dict[str, Stored] = {}
    for name, place in found.items():
        chosen = tensors[name].dtype if dtype is None else dtype
        whole = stored.setdefault(place.name, Stored(place.name, place.shape, chosen, []))
        whole.parts.append((place, tensors[name]))
    return list(stored.values())


def split(stored: Sequence[Stored], max_file_bytes: int) -> list[list[Stored]]:
    """What goes into each file, as `transformers` has it: a tensor that is too large alone, the others in order."""
    parts: list[list[Stored]] = []
    filling: list[Stored] = []
    for tensor in stored:
        if tensor.bytes > max_file_bytes:
            parts.append([tensor])
            continue
        if sum(t.bytes for t in filling) + tensor.bytes > max_file_bytes:
            parts.append(filling)
            filling = []
        filling.append(tensor)
    return [*parts, filling] if filling else parts


def name_files(parts: Sequence[list[Stored]]) -> dict[str, list[Stored]]:
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def write_round(target: Path, named: Mapping[str, list[Stored]], ranks: SavingRanks) -> None:
    """Gathers the tensors of as many files as there are ranks, or fewer, and then writes all of them at once."""
    mine: dict[str, Tensor] = {}
    for holder, stored in enumerate(named.values()):
        for tensor in stored:
            whole = assembled(tensor, kept=holder == ranks.rank)
            if whole is not None:
                mine[tensor.name] = whole
            del whole
    path = target / list(named)[ranks.rank] if ranks.rank < len(named) else None
    ranks.agree(lambda: path and write_weights(path, mine))


def assembled(stored: Stored, kept: bool) -> Tensor | None:
    """A tensor of a file, on the CPU, for the rank that keeps it; all have to ask."""
    whole: Tensor | None = None
    for place, tensor in stored.parts:
        part = gathered(tensor, stored.dtype)
        if not kept:
            continue
        if len(stored.parts) == 1:
            return place.turn(part.cpu()).contiguous()
        whole = torch.empty(stored.shape, dtype=stored.dtype) if whole is None else whole
        turned = place.turn(part)
        whole.narrow(-1, place.start, turned.shape[-1]).copy_(turned)
    return whole


@torch.no_grad()
def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor, in `dtype`. Collective where it is sharded."""
    tensor = tensor.detach().to(dtype)  # before it is sent
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    def save(partial: Path) -> None:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk too, whose number its text alone has
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(*((int(number[1]), os.strerror(int(number[1]))) if number else (str(error),))) from error

    files.write_partial(path, save)


def commit(
    target: Path,
    named: Mapping[str, list[Stored]],
    config: LlamaConfig | GPTConfig,
    described: dict[str, Any],
    source: str | PathLike[str] | None,
) -> None:
    """Puts everything in its place; weights first, the index and `config.json` last.

    From the first to the last step a folder of several files has no index: it is refused, and never read as a mixture.
    """
    small = companions(target, named, config, described, source)
    old = files.earlier_weights(target)
    try:
        for name, save in small.items():
            files.write_partial(target / name, save)
        (target / INDEX).unlink(missing_ok=True)
        if len(named) > 1:
            (target / WEIGHTS).unlink(missing_ok=True)
        for name in (*named, *small):
            files.put(target / name)
    finally:
        for name in small:
            files.discard(target / name)
    for name in old - named.keys():
        (target / name).unlink(missing_ok=True)
    for path in target.glob(f"*{files.PARTIAL}"):  # of a save that was killed
        if files.WEIGHT_NAME.fullmatch(path.name.removesuffix(files.PARTIAL)):
            path.unlink(missing_ok=True)


def companions(
    target: Path,
    named: Mapping[str, list[Stored]],
    config: LlamaConfig | GPTConfig,
    described: dict[str, Any],
    source: str | PathLike[str] | None,
) -> dict[str, Callable[[Path], object]]:
    """How to write each file that goes with the weights."""
    writers: dict[str, Callable[[Path], object]] = {}
    if source is not None:
        origin = Path(source)
        dtype = getattr(torch, described["torch_dtype"])
        fields = files.read_json(origin / CONFIG) if (origin / CONFIG).exists() else None
        described = describe(config, dtype, fields)
        for name in TOKENIZER:
            if (origin / name).exists() and origin.resolve() != target.resolve():
                writers[name] = lambda path, file=origin / name: shutil.copyfile(file, path)
    writers[CONFIG] = lambda path: path.write_text(files.as_json(described))
    if len(named) > 1:
        writers[INDEX] = lambda path: path.write_text(files.as_json(index(named)))
    return writers


def index(named: Mapping[str, list[Stored]]) -> dict[str, Any]:
    """The contents of `model.safetensors.index.json`."""
    where = {tensor.name: file for file, stored in named.items() for tensor in stored}
    total = sum(tensor.bytes for stored in named.values() for tensor in stored)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


@dataclass(frozen=True)
class SavingRanks:
    """Who saves: all ranks together where something is sharded, otherwise whoever asks to, alone."""

    rank: int
    size: int

    @classmethod
    def around(cls, tensors: Any) -> SavingRanks:
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        return cls(dist.get_rank(), dist.get_world_size()) if sharded else cls(0, 1)

    def agree(self, action: Callable[[], object]) -> None:
        """Does it; if it fails on one rank, raises on every rank."""
        failed: Exception | None = None
        try:
            action()
        except Exception as error:
            failed = error
        if self.size > 1:
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, failed and f"{type(failed).__name__}: {failed}")
            others = {rank: cast(str, answer) for rank, answer in enumerate(answers) if answer}
            if others and failed is None:
                raise OSError(f"nothing was saved: {'; '.join(f'rank {r} had {text}' for r, text in others.items())}")
        if failed is not None:
            raise failed
