"""Maps each parameter to a slice of a file's tensor. In GPT-2's files, weights are transposed and q, k and v fused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from armillary.models.config import GPTConfig, LlamaConfig, one_block
from armillary.models.parameter_shards import Box
from armillary.models.state_config import Mixer

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Data types by their names in safetensors."""

FUSED = re.compile(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)")
"""Names of GPT parameters that are parts of one tensor in files, `c_attn`."""
TRANSPOSED = re.compile(r".*\.(q_proj|k_proj|v_proj|c_proj|c_fc)\.weight")
"""Names of GPT parameters that are transposed in files."""


@dataclass(frozen=True)
class FileSlice:
    """The slice of a tensor in a file that contains one parameter of the model.

    Args:
        name: name of the tensor in the file.
        shape: shape of the tensor in the file.
        start: first index of the parameter along the file tensor's last dim.
        transposed: True if the file has the parameter's two dims exchanged.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False

    def index(self, box: Box) -> Box:
        """Converts a box of the parameter to a box of the file's tensor."""
        *leading_dims, last = reversed(box) if self.transposed else box
        return (*leading_dims, slice(last.start + self.start, last.stop + self.start))

    def transpose(self, x: Tensor) -> Tensor:
        """Converts between the order of dims in the file and in the parameter."""
        return x.T if self.transposed else x


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors in files.

    Args:
        prefix: prefix of all names except the head's. In folders of models without a head, names do not have it.
        ignored: tensors that are not read, because the config determines their values.
    """

    prefix: str
    ignored: re.Pattern[str]


LLAMA = Names("model.", re.compile(r".*rotary_emb\.inv_freq"))
GPT2 = Names("transformer.", re.compile(r".*\.attn\.(bias|masked_bias)"))


def names_of(config: LlamaConfig | GPTConfig) -> Names:
    return GPT2 if isinstance(config, GPTConfig) else LLAMA


def parameter_shapes(build: Callable[[Any], nn.Module], config: LlamaConfig | GPTConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the config's model, by name.

    Builds a model of one block for each mixer, on "meta", and repeats the block's shapes for all layers with the mixer.

    Args:
        build: builds a model from a config.
    """
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
