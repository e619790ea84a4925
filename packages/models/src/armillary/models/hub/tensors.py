"""Shapes of our tensors, and their places in the tensors of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from armillary.core.shards import Box
from armillary.models.config import GPTConfig, LlamaConfig, one_block

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By safetensors' names."""

FUSED = re.compile(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)")
TRANSPOSED = re.compile(r".*\.(q_proj|k_proj|v_proj|c_proj|c_fc)\.weight")


@dataclass(frozen=True)
class Place:
    """A part of a tensor in a file.

    Args:
        name: of the whole tensor.
        shape: of the whole tensor.
        start: where the part begins, along the last dim of the whole.
        transposed: the part is ours with its two dims exchanged.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False

    def index(self, box: Box) -> Box:
        """Where a box of our tensor lies in the whole."""
        *rest, last = reversed(box) if self.transposed else box
        return (*rest, slice(last.start + self.start, last.stop + self.start))

    def turn(self, x: Tensor) -> Tensor:
        """From their order of dims to ours, and back."""
        return x.T if self.transposed else x


@dataclass(frozen=True)
class Names:
    """How a family's tensors are called in files.

    Args:
        prefix: what a folder of the model without its head leaves out of names.
        ignored: tensors that follow from the config.
    """

    prefix: str
    ignored: re.Pattern[str]


LLAMA = Names("model.", re.compile(r".*rotary_emb\.inv_freq"))
GPT2 = Names("transformer.", re.compile(r".*\.attn\.(bias|masked_bias)"))


def names_of(config: LlamaConfig | GPTConfig) -> Names:
    return GPT2 if isinstance(config, GPTConfig) else LLAMA


def parameter_shapes(build: Callable[[Any], nn.Module], config: LlamaConfig | GPTConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the config's model, by name. Builds one block, on the meta device."""
    with torch.device("meta"):
        model = build(one_block(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        before, index, after = name.partition(".0.")  # blocks alone have a number
        for layer in range(config.layers if index else 1):
            shapes[f"{before}.{layer}.{after}" if index else name] = tuple(tensor.shape)
    return shapes


def places(config: LlamaConfig | GPTConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Place]:
    """Where each of our tensors lies, of these names and shapes."""
    place = gpt_place if isinstance(config, GPTConfig) else Place
    return {name: place(name, tuple(shape)) for name, shape in shapes.items()}


def gpt_place(name: str, shape: tuple[int, ...]) -> Place:
    """GPT-2's linear layers are [inputs, outputs], and queries, keys and values one layer."""
    transposed = TRANSPOSED.fullmatch(name) is not None
    *rest, width = reversed(shape) if transposed else shape
    if fused := FUSED.fullmatch(name):
        before, part, kind = fused.groups()
        return Place(f"{before}c_attn.{kind}", (*rest, 3 * width), "qkv".index(part) * width, transposed)
    return Place(name, (*rest, width), 0, transposed)
