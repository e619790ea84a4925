"""Small models sharded with FSDP2 and tensor parallelism, for tests on several ranks."""

from dataclasses import replace

import torch

from armillary.core.testing import mesh
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, initialize, parallelize

# Odd numbers of rows leave uneven shards, and empty ones, on 4 ranks.
LLAMA = LlamaConfig(vocab_size=11, dim=6, layers=2, heads=3, kv_heads=3, hidden_dim=10, qkv_bias=True)
TIED = replace(LLAMA, tied_embeddings=True)
# Over tp 2 and then shard 2, the vocabulary has 1, 1, 1, 0 rows.
FEW = replace(LLAMA, vocab_size=3, heads=2, kv_heads=2)
GPT2 = GPTConfig(vocab_size=13, dim=8, layers=2, heads=4, max_positions=9)


def model_of(config: LlamaConfig | GPTConfig, dtype: torch.dtype = torch.float32) -> Llama | GPT:
    return (Llama(config) if isinstance(config, LlamaConfig) else GPT(config)).to(dtype)


def plain(config: LlamaConfig | GPTConfig) -> Llama | GPT:
    """The unsharded model, all parameters random."""
    model = model_of(config)
    initialize(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def empty(config: LlamaConfig | GPTConfig, axes: dict[str, int], dtype: torch.dtype = torch.float32) -> Llama | GPT:
    """The sharded model with zero weights."""
    with torch.device("meta"):
        model = model_of(config, dtype)
    parallelize(model, mesh(**axes))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def full(
    config: LlamaConfig | GPTConfig, axes: dict[str, int], precision: torch.dtype | None = torch.float32
) -> Llama | GPT:
    """The sharded model with the weights of `plain`, sharded by torch."""
    model = plain(config)
    parallelize(model, mesh(**axes), precision=precision)
    return model
