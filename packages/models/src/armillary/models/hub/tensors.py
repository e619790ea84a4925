"""Maps each parameter to a slice of a file's tensor: GPT-2 files have transposed weights, and q, k and v fused."""

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


def file_slices(config: LlamaConfig | GPTConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, FileSlice]:
    """Returns the slice of each parameter, from names and shapes."""
    slice_of = gpt_file_slice if isinstance(config, GPTConfig) else FileSlice
    return {name: slice_of(name, tuple(shape)) for name, shape in shapes.items()}


def gpt_file_slice(name: str, shape: tuple[int, ...]) -> FileSlice:
    """Returns a slice of GPT-2's files, where linear weights are [inputs, outputs] and q, k and v are one layer."""
    transposed = TRANSPOSED.fullmatch(name) is not None
    *leading_dims, width = reversed(shape) if transposed else shape
    if match := FUSED.fullmatch(name):
        before, projection, kind = match.groups()
        return FileSlice(
            f"{before}c_attn.{kind}", (*leading_dims, 3 * width), "qkv".index(projection) * width, transposed
        )
    return FileSlice(name, (*leading_dims, width), 0, transposed)
