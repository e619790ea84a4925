"""Models without weights, and initial weights that do not depend on sharding."""

from __future__ import annotations

import hashlib
from math import log, sqrt
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from armillary.models import hub
from armillary.models.block import AttentionFunction
from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.gpt import GPT
from armillary.models.llama import Llama
from armillary.models.parameter_names import plain_name
from armillary.models.parameter_shards import local_part

STD = 0.02
RESIDUAL = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
"""The projections that add to the residual stream, twice a layer."""


def meta_model(config: LlamaConfig | GPTConfig, attention: AttentionFunction | None = None) -> Llama | GPT:
    """Returns the model on "meta", to be sharded before its weights take any memory."""
    with torch.device("meta"):
        return Llama(config, attention) if isinstance(config, LlamaConfig) else GPT(config, attention)


def pretrained_config(folder: str | PathLike[str]) -> LlamaConfig | GPTConfig:
    """Returns the sizes in a Hugging Face folder's `config.json`, after comparing them with its weights, if it has any.

    Raises:
        ValueError: the file is missing, asks for a feature that `Llama` and `GPT` lack, or does not match the weights;
            the message names it.
    """
    config = hub.read_any_config(folder)
    if hub.has_weights(Path(folder)):
        hub.check_weights(Path(folder), config, meta_model)
    return config


def initialize(model: Llama | GPT, seed: int) -> None:
    """Fills the model's parameters, each from its name, its full shape and the seed alone.

    So every mesh starts from the same weights, without communication. Linear and embedding weights are normal
    with standard deviation 0.02, or 0.02 / sqrt(2 * layers) if they write to the residual stream (GPT-2's rule); norms
    are 1 and biases 0. Layers with a state begin as Mamba-2: uniform convolutions, rates -A in [1, 16], and time steps
    from 0.001 to 0.1, uniform in their logarithms. Numbers are drawn in float32 on the parameter's device and rounded
    to its dtype: CPU and CUDA draw different ones.

    Args:
        model: a model with plain parameters or `DTensor`s (FSDP2, TP), after `to_empty` if it was built on "meta". One
            full parameter at a time is alive next to the shards.

    Raises:
        ValueError: a parameter on "meta".
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before initialize")
        values = draw(plain_name(name), parameter, model.config.layers, seed)
        with torch.no_grad():
            write(values, parameter)


def draw(name: str, parameter: Tensor, layers: int, seed: int) -> Tensor:
    """Returns the full initial value of a parameter, in float32."""
    # A hash of the name, not an order of parameters: sharding, wrapping and tying do not change the draw.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8]))
    values = torch.empty(parameter.shape, device=parameter.device)
    if name.endswith("A_log"):
        return values.uniform_(1, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        dt = values.uniform_(log(0.001), log(0.1), generator=generator).exp()
        return dt + (-torch.expm1(-dt)).log()  # the inverse of softplus
    if name.endswith("conv1d.weight"):
        bound = parameter.shape[-1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)
    if parameter.ndim == 1:
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    std = STD / sqrt(2 * layers) if name.endswith(RESIDUAL) else STD
    return values.normal_(0, std, generator=generator)


def write(values: Tensor, parameter: Tensor) -> None:
    """Copies this rank's part of the full `values` into `parameter`. No communication."""
    local, box = local_part(parameter)
    local.copy_(values[box])
