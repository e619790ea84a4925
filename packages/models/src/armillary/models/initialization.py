"""Models on "meta", the sizes of a Hugging Face folder's model, and initial weights that do not depend on sharding."""

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
from armillary.models.parameter_shards import local_part, plain_name

# Standard deviation of initial linear and embedding weights.
STD = 0.02
# Names of the weights whose outputs are added to the residual stream, two in each layer.
RESIDUAL = ("o_proj.weight", "down_proj.weight", "c_proj.weight")


def meta_model(config: LlamaConfig | GPTConfig, attention: AttentionFunction | None = None) -> Llama | GPT:
    """Returns the model on "meta", so that it can be sharded before its weights take any memory."""
    with torch.device("meta"):
        return Llama(config, attention) if isinstance(config, LlamaConfig) else GPT(config, attention)


def pretrained_config(folder: str | PathLike[str]) -> LlamaConfig | GPTConfig:
    """Returns the config of the model in a Hugging Face folder. If the folder has weights, compares their shapes.

    A path to `config.json` is accepted too; then weights are not looked for.

    Raises:
        ValueError: `config.json` is missing, needs a feature that `Llama` and `GPT` lack, or does not match the
            weights. The error names the file, the field or the tensor.
    """
    config = hub.read_any_config(folder)
    if hub.has_weights(Path(folder)):
        hub.check_weights(Path(folder), config, meta_model)
    return config


def initialize(model: Llama | GPT, seed: int) -> None:
    """Fills the model's parameters. The random numbers of each depend only on its name, its full shape and the seed.

    So every mesh starts from the same weights, without communication. Linear and embedding weights are normal with
    standard deviation 0.02, or 0.02 / sqrt(2 * layers) if their outputs are added to the residual stream (GPT-2's
    rule). Norms are 1 and biases 0. Layers with a state start as in Mamba-2: convolution weights of width W are uniform
    within 1 / sqrt(W) of 0, rates -A are uniform in [1, 16], D is 1, and the logarithms of step sizes are uniform
    between those of 0.001 and 0.1. Numbers are drawn in float32 on the parameter's device, and rounded to its dtype.
    CPU and CUDA draw different numbers.

    Args:
        model: a model with plain parameters or `DTensor`s (FSDP2, TP), after `to_empty` if it was built on "meta". On
            each rank, one full parameter at a time is in memory beside the shards.

    Raises:
        ValueError: a parameter is on "meta".
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no data; call model.to_empty(device=...) before initialize")
        values = draw(plain_name(name), parameter, model.config.layers, seed)
        local, box = local_part(parameter)
        with torch.no_grad():
            local.copy_(values[box])  # this rank's part


def draw(name: str, parameter: Tensor, layers: int, seed: int) -> Tensor:
    # Seeded by a hash of the name, and not drawn from one generator in the order of parameters: sharding, wrapping and
    # tying then do not change the values.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8]))
    values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    if name.endswith("A_log"):
        return values.uniform_(1, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        dt = values.uniform_(log(0.001), log(0.1), generator=generator).exp()
        return dt + (-torch.expm1(-dt)).log()  # the inverse of softplus, which `StateMixer` applies
    if name.endswith("conv1d.weight"):
        bound = parameter.shape[-1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)
    if parameter.ndim == 1:  # a bias, the weight of a norm, or Mamba-2's D
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    std = STD / sqrt(2 * layers) if name.endswith(RESIDUAL) else STD
    return values.normal_(0, std, generator=generator)
