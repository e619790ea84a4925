"""Small models sharded with FSDP2 and tensor parallelism, for tests on several ranks."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from armillary.core.testing import mesh
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, initialize

# Odd numbers of rows leave uneven shards, and empty ones, on 4 ranks.
LLAMA = LlamaConfig(vocab_size=11, dim=6, layers=2, heads=3, kv_heads=3, hidden_dim=10, qkv_bias=True)
TIED = replace(LLAMA, tied_embeddings=True)
GPT2 = GPTConfig(vocab_size=13, dim=6, layers=2, heads=3, max_positions=9)

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "embed_tokens", "wte", "lm_head")
COLUMNS = ("o_proj", "down_proj", "c_proj")
"""Linear layers that tensor parallelism shards by outputs, and those that it shards by inputs."""


def plain(config: LlamaConfig | GPTConfig) -> Llama | GPT:
    """The unsharded model, all parameters random."""
    model = Llama(config) if isinstance(config, LlamaConfig) else GPT(config)
    initialize(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def empty(config: LlamaConfig | GPTConfig, axes: dict[str, int], dtype: torch.dtype = torch.float32) -> Llama | GPT:
    """The sharded model with zero weights."""
    with torch.device("meta"):
        model = Llama(config) if isinstance(config, LlamaConfig) else GPT(config)
    model = sharded(model.to(dtype), axes)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def full(
    config: LlamaConfig | GPTConfig, axes: dict[str, int], policy: MixedPrecisionPolicy | None = None
) -> Llama | GPT:
    """The sharded model with the weights of `plain`, sharded by torch."""
    return sharded(plain(config), axes, policy)


def sharded(model: Llama | GPT, axes: dict[str, int], policy: MixedPrecisionPolicy | None = None) -> Llama | GPT:
    over = mesh(**axes)
    if axes.get("tp", 1) > 1:
        shard_for_tp(model, over["tp"])
    if axes.get("shard", 1) > 1:
        fsdp = over[("replicate", "shard")] if "replicate" in axes else over["shard"]
        blocks = model.model.layers if isinstance(model, Llama) else model.transformer.h
        for module in (*blocks, model):
            fully_shard(module, mesh=fsdp, mp_policy=policy or MixedPrecisionPolicy())
    return model


def shard_for_tp(model: nn.Module, over) -> None:
    for name, module in model.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dim = 0 if name.endswith(ROWS) else 1 if name.endswith(COLUMNS) and kind == "weight" else None
            if dim is not None:
                cut = distribute_tensor(parameter.detach(), over, [Shard(dim)], src_data_rank=None)
                module.register_parameter(kind, nn.Parameter(cut))
