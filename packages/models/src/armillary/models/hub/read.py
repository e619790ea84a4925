"""Reads parameters from the safetensors files of a Hugging Face folder.

Each rank reads the bytes of its own shards, without communication. Every rank checks the headers of all files first, so
that all ranks refuse a bad folder before any parameter changes. In GPT-2's files, weights are transposed and q, k and v
fused: each parameter is a slice of a file's tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from armillary.core.internal import is_file_name, read_json
from armillary.models.config import GPTConfig, LlamaConfig, Mixer, one_block
from armillary.models.hub.configs import CONFIG
from armillary.models.hub.safetensors import FLOATS, TensorEntry, open_tensors
from armillary.models.parameter_shards import Box, local_part

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# Suffixes of weights that are pickles, which are never read.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Largest number of faults that an error lists. Of further faults it gives only the number.
MAX_FAULTS = 8

LLAMA_NAMES = "model.", re.compile(r".*rotary_emb\.inv_freq")
# Prefix of the names in files; and names of tensors that are not read, because the config determines their values.
GPT_NAMES = "transformer.", re.compile(r".*\.attn\.(bias|masked_bias)")

# Names of GPT parameters that are parts of one tensor in files, `c_attn`.
FUSED = re.compile(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)")
# Names of GPT parameters that are transposed in files.
TRANSPOSED = re.compile(r".*\.(q_proj|k_proj|v_proj|c_proj|c_fc)\.weight")


# -- files -------------------------------------------------------------------------------------------------------------


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor, as the index lists it. None if there is one file with all weights.

    With both, the index is ignored, as by `transformers`.

    Raises:
        ValueError: file and index are missing, or the index does not map names to files of this folder.
    """
    if not has_weights(folder):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES) if folder.is_dir() else []
        hint = f"; {pickles[0]} is a pickle, and only safetensors are read" if pickles else ""
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
    if (folder / WEIGHTS).is_file():
        return None
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{folder / INDEX} lacks weight_map")
    for name, file in cast("dict[str, object]", files).items():
        if not is_file_name(file):
            raise ValueError(f"{folder / INDEX} has {name} in {file!r}, which is no file's name")
        if not os.path.isfile(folder / file):
            raise ValueError(f"{folder / INDEX} has {name} in {file}, and there is no such file")
    return cast("dict[str, str]", files)


# -- slices of files' tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSlice:
    """The slice of a tensor in a file that contains one parameter of the model."""

    name: str  # of the file's tensor, as is `shape`
    shape: tuple[int, ...]
    start: int = 0  # first index of the parameter along the file tensor's last dim
    transposed: bool = False  # the file has the parameter's two dims exchanged

    def index(self, box: Box) -> Box:
        """Converts a box of the parameter to a box of the file's tensor."""
        *leading_dims, last = reversed(box) if self.transposed else box
        return (*leading_dims, slice(last.start + self.start, last.stop + self.start))

    def transpose(self, x: Tensor) -> Tensor:
        """Converts between the order of dims in the file and in the parameter."""
        return x.T if self.transposed else x


def parameter_shapes(build: Callable[[Any], nn.Module], config: LlamaConfig | GPTConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the config's model, by name."""
    # Builds a model of one block for each mixer, on "meta", and repeats its shapes for all layers with the mixer.
    layers_by_mixer: dict[Mixer | None, list[int]] = {}
    for layer in range(config.layers):
        mixer = config.mixer_of(layer) if isinstance(config, LlamaConfig) else None
        layers_by_mixer.setdefault(mixer, []).append(layer)
    shapes: dict[str, tuple[int, ...]] = {}
    for mixer, layers in layers_by_mixer.items():
        with torch.device("meta"):
            model = build(one_block(config, mixer))
        for name, tensor in model.state_dict().items():
            before, index, after = name.partition(".0.")  # only names of parameters in blocks have a number
            for layer in layers if index else layers[:1]:
                shapes[f"{before}.{layer}.{after}" if index else name] = tuple(tensor.shape)
    return shapes


def file_slices(config: LlamaConfig | GPTConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, FileSlice]:
    """Returns the slice of a file's tensor that each parameter is, from the parameters' names and shapes."""
    slice_of = gpt_file_slice if isinstance(config, GPTConfig) else FileSlice
    return {name: slice_of(name, tuple(shape)) for name, shape in shapes.items()}


def gpt_file_slice(name: str, shape: tuple[int, ...]) -> FileSlice:
    """Returns the slice of one GPT parameter. In files, linear weights are [inputs, outputs], and q, k, v one layer."""
    transposed = TRANSPOSED.fullmatch(name) is not None
    *leading_dims, width = reversed(shape) if transposed else shape
    if match := FUSED.fullmatch(name):
        before, projection, kind = match.groups()
        return FileSlice(
            f"{before}c_attn.{kind}", (*leading_dims, 3 * width), "qkv".index(projection) * width, transposed
        )
    return FileSlice(name, (*leading_dims, width), 0, transposed)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_tensors(
    folder: Path, config: LlamaConfig | GPTConfig, build: Callable[[Any], nn.Module], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Reads full parameters to the CPU, in `dtype` or by default the file's dtype. Errors as in `open_parameters`."""
    tensors: dict[str, Tensor] = {}
    shapes = partial(parameter_shapes, build, config)
    with open_parameters(folder, config, shapes) as read:
        for name, shape in shapes().items():
            values = read(name, tuple(slice(0, size) for size in shape))
            # Copied, because `values` may be a view of the mapped file, and saving to the same folder would change it.
            tensors[name] = torch.empty(shape, dtype=dtype or values.dtype).copy_(values)
    return tensors


@torch.no_grad()
def fill(folder: Path, config: LlamaConfig | GPTConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills each parameter from a folder; of a `DTensor`, this rank's shard."""
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before load_pretrained")
    # Everything is checked before the first copy: here the shards, then names, shapes and dtypes in the files.
    local_parts = {name: local_part(parameter) for name, parameter in parameters.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    with open_parameters(folder, config, lambda: shapes) as read:
        for name, (local, box) in local_parts.items():
            if local.numel():
                local.copy_(read(name, box))


def check_weights(folder: Path, config: LlamaConfig | GPTConfig, build: Callable[[Any], nn.Module]) -> None:
    """Raises ValueError unless the folder's weights have the shapes of the config's model. Reads headers only."""
    with open_parameters(folder, config, partial(parameter_shapes, build, config)):
        pass


@contextmanager
def open_parameters(
    folder: Path, config: LlamaConfig | GPTConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
) -> Generator[Callable[[str, Box], Tensor]]:
    """Context manager that opens a folder's files, and returns a function that reads a box of a parameter, by name.

    The box that is read may be a view of the mapped file.

    Raises:
        ValueError: a file is missing or broken, or the files have tensors of other names, shapes or dtypes.
    """
    with ExitStack() as stack:
        # 1. Read the headers of all files.
        index = weight_map(folder)
        entries: dict[str, TensorEntry] = {}
        for file in [WEIGHTS] if index is None else sorted(set(index.values())):
            try:
                file_entries, _ = open_tensors(folder / file, stack)
            except (OSError, SafetensorError, MemoryError) as error:
                raise ValueError(f"cannot read {folder / file}: {getattr(error, 'strerror', None) or error}") from error
            if index is not None:
                # The index decides where a tensor is. If it lists another file for a tensor, the tensor is skipped
                # here. If it lists this file and the tensor is not there, that is an error.
                expected_names = [name for name, index_file in index.items() if index_file == file]
                if missing_names := [name for name in expected_names if name not in file_entries]:
                    raise ValueError(f"{folder / INDEX} lists {join_faults(missing_names)} in {file}, which lacks it")
                file_entries = {name: entry for name, entry in file_entries.items() if index.get(name, file) == file}
            entries |= file_entries
        # 2. The folder of a base model has names without the prefix. A head's name has no prefix in any folder.
        prefix, ignored = GPT_NAMES if isinstance(config, GPTConfig) else LLAMA_NAMES
        entries = {key: entry for key, entry in entries.items() if not ignored.fullmatch(key)}
        if not any(key.startswith(prefix) for key in entries):
            entries = {key if key.startswith("lm_head.") else prefix + key: entries[key] for key in entries}
        # 3. Compare them with the model. A config file may state any number of layers, and `shapes` lists them all, so
        # the number is checked first.
        misfit = f"the weights in {folder} do not fit its {CONFIG}"
        if config.layers > len(entries):
            raise ValueError(f"{misfit}: {len(entries)} tensors, and {config.layers} layers")
        slices = file_slices(config, shapes())
        if faults := list(differences(entries, {file_slice.name: file_slice.shape for file_slice in slices.values()})):
            raise ValueError(f"{misfit}: {join_faults(faults, '; ')}")

        def read(name: str, box: Box) -> Tensor:
            file_slice = slices[name]
            return file_slice.transpose(entries[file_slice.name].read(file_slice.index(box)))

        yield read


def differences(entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Yields a message for each missing or unexpected name, and each unexpected shape or dtype."""
    yield from (f"{name} is missing" for name in shapes if name not in entries)
    for name, entry in entries.items():
        if name not in shapes:
            yield f"{name} is not part of the model"
        elif entry.shape != shapes[name]:
            yield f"{name} is {entry.shape}, not {shapes[name]}"
        elif entry.dtype not in FLOATS:
            yield f"{name} is {entry.dtype}, not one of {', '.join(FLOATS)}"


def join_faults(faults: list[str], separator: str = ", ") -> str:
    """Returns the first `MAX_FAULTS` messages, and the number of the others."""
    suffix = f"{separator}and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return separator.join(faults[:MAX_FAULTS]) + suffix
