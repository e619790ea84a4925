"""The places of our tensors in the tensors of files: GPT-2 files have transposed weights, and q, k and v fused."""

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
TRANSPOSED = re.compile(r".*\.(q_proj|k_proj|v_proj|c_proj|c_fc)\.weight")


@dataclass(frozen=True)
class Place:
    """The place of one of our tensors in a tensor of a file.

    Args:
        name: name of the tensor in the file.
        shape: shape of the tensor in the file.
        start: offset of our tensor along the last dim.
        transposed: the file has our tensor's two dims exchanged.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False

    def index(self, box: Box) -> Box:
        """Returns the box in the file's tensor of a box in ours."""
        *leading_dims, last = reversed(box) if self.transposed else box
        return (*leading_dims, slice(last.start + self.start, last.stop + self.start))

    def transpose(self, x: Tensor) -> Tensor:
        """Converts the file's order of dims to ours, or back."""
        return x.T if self.transposed else x


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors in files.

    Args:
        prefix: prefix of all names except the head's; folders of models without a head do not have it.
        ignored: tensors that the config determines.
    """

    prefix: str
    ignored: re.Pattern[str]


LLAMA = Names("model.", re.compile(r".*rotary_emb\.inv_freq"))
GPT2 = Names("transformer.", re.compile(r".*\.attn\.(bias|masked_bias)"))


def names_of(config: LlamaConfig | GPTConfig) -> Names:
    return GPT2 if isinstance(config, GPTConfig) else LLAMA


def parameter_shapes(build: Callable[[Any], nn.Module], config: LlamaConfig | GPTConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the config's model, by name. Builds one block of each kind, on "meta"."""
    layers: dict[Mixer | None, list[int]] = {}
    for layer in range(config.layers):
        layers.setdefault(config.mixer_of(layer) if isinstance(config, LlamaConfig) else None, []).append(layer)
    shapes: dict[str, tuple[int, ...]] = {}
    for mixer, indices in layers.items():
        with torch.device("meta"):
            model = build(one_block(config, mixer))
        for name, tensor in model.state_dict().items():
            before, index, after = name.partition(".0.")  # only blocks have a number in their names
            for layer in indices if index else indices[:1]:
                shapes[f"{before}.{layer}.{after}" if index else name] = tuple(tensor.shape)
    return shapes


def places(config: LlamaConfig | GPTConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Place]:
    """Returns the place of each of our tensors, from names and shapes."""
    place = gpt_place if isinstance(config, GPTConfig) else Place
    return {name: place(name, tuple(shape)) for name, shape in shapes.items()}


def gpt_place(name: str, shape: tuple[int, ...]) -> Place:
    """Returns a place in GPT-2's files, where linear weights are [inputs, outputs] and q, k and v are one layer."""
    transposed = TRANSPOSED.fullmatch(name) is not None
    *leading_dims, width = reversed(shape) if transposed else shape
    if match := FUSED.fullmatch(name):
        before, projection, kind = match.groups()
        return Place(f"{before}c_attn.{kind}", (*leading_dims, 3 * width), "qkv".index(projection) * width, transposed)
    return Place(name, (*leading_dims, width), 0, transposed)
