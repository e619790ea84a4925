"""Tensor parallelism over one mesh axis of R ranks (Megatron-LM, arXiv 1909.08053 and, for norms, 2205.05198).

Attention is sharded by heads, the MLP by hidden units, embedding table and head by the vocabulary. Norms and the
residual stream are sharded by tokens: rank r has the tokens i R + r. In forward, a block all-gathers before attention
and before the MLP, and reduce-scatters after each: each rank sends 4 (R - 1) / R B T E e bytes. In backward too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from armillary.core import Axis
from armillary.core.parts import dtensor
from armillary.models.block import HeadFunction
from armillary.models.config import LlamaConfig
from armillary.models.gpt import GPT
from armillary.models.layers.interleaved import all_gather_interleaved
from armillary.models.llama import Llama
from armillary.models.parallel import sharded_modules
from armillary.models.parallel.sharded_modules import ShardedModule, shard_module
from armillary.models.sample import last_logits
from armillary.models.state_config import Mixer


def tensor_parallel(model: Llama | GPT, axis: DeviceMesh) -> None:
    """Shards the model over `axis`, in place. Parameters become `DTensor`s, without communication.

    The model is called as before: all ranks of the axis pass the same tokens, all of their sequence shard, and get the
    same results. Without a `head`, logits [B, T, V] are gathered. A `head` is called with the hidden states
    [B, ceil(T / R), E] of the rank's own tokens, the rank's rows [V_r, E] of the weight, and the keyword arguments
    `axis` and `vocabulary` (V), as `linear_token_loss` accepts them.

    Without FSDP, the gradient of a replicated parameter (norms, some biases) is `Partial`: this rank's share of a sum.
    Clipping, AdamW and `full_tensor()` sum the shares.

    Args:
        model: a model with plain parameters, equal on all ranks or on "meta". Apply FSDP, wrappers and adapters later.
        axis: a 1-D mesh, such as `mesh["tp"]`. With one rank the model is unchanged.

    Raises:
        ValueError: R does not divide heads, key/value heads (also of layers with a state) or the MLP's width; or a
            module was wrapped, replaced or sharded before. Raised before anything is changed.
    """
    if Axis.of(axis).size == 1:
        return
    styles = styles_for(model, Axis.of(axis))
    parallelize_module(model, axis, styles)
    model.prepare_head = partial(sharded_head, axis, model.config.vocab_size)


def styles_for(model: Llama | GPT, axis: Axis) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module, by name. Errors as in `tensor_parallel`."""
    config = model.config
    width = model.config.hidden_dim if isinstance(model, Llama) else 4 * config.dim
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "MLP width": width}
    if isinstance(config, LlamaConfig) and config.states is not None:
        sizes |= {"states.heads": config.states.heads, "states.key_heads": config.states.key_heads}
    for name, count in sizes.items():
        if count % axis.size:
            raise ValueError(f"{name} {count} must be divisible by the {axis.size} ranks of axis {axis.name!r}")
    if isinstance(model, Llama):
        styles = llama_styles(model)
    else:
        styles = {
            name.replace("*", str(i)): style for name, style in gpt_styles().items() for i in range(config.layers)
        }
    modules = dict(model.named_modules())
    for name, style in styles.items():
        module = modules.get(name)
        kind = style.kind.plain if isinstance(style, ReplaceBy) else nn.Module
        is_replaced = isinstance(style, ReplaceBy) and (type(module) is not kind or "forward" in vars(module))
        if module is None or is_replaced:
            problem = "not there" if module is None else f"{type(module).__name__}, not {kind.__name__} as it was built"
            raise ValueError(f"{name} is {problem}: apply tensor parallelism before wrappers and adapters")
    return styles


@dataclass
class ReplaceBy(ParallelStyle):
    """Changes the module's class to `kind`, and makes its parameters DTensors with `placements`; others replicated."""

    kind: type[ShardedModule]
    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_module(module, self.kind, device_mesh, self.placements)


class SplitHeads(ParallelStyle):
    """Divides the head counts of an attention module by the number of ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # q_proj, k_proj and v_proj return this rank's heads, so attention must reshape with local head counts.
        attention: Any = module
        attention.heads //= device_mesh.size()
        attention.key_heads //= device_mesh.size()
        return module


class GatherTokens(ParallelStyle):
    """Tells a block that its norms return the tokens of all ranks (`Block.gathered_ranks`)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        block: Any = module
        block.gathered_ranks = device_mesh.size()
        return module


# Megatron's pair: a column-parallel layer computes this rank's hidden units from all inputs, without communication. The
# row-parallel layer that follows computes this rank's contribution to all outputs, and a reduce-scatter over tokens
# sums the contributions.
COLUMN = ReplaceBy(sharded_modules.ColumnParallelLinear, {"weight": Shard(0), "bias": Shard(0)})
ROW = ReplaceBy(sharded_modules.RowParallelLinear, {"weight": Shard(1)})
TABLE = ReplaceBy(sharded_modules.VocabularyParallelEmbedding, {"weight": Shard(0)})


def llama_styles(model: Llama) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module of a LLaMA, by name."""
    config = model.config
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": TABLE,
        "model.norm": ReplaceBy(sharded_modules.ReplicatedRMSNorm),
    }
    if model.lm_head is not None:
        styles["lm_head"] = ReplaceBy(sharded_modules.VocabularyParallelHead, {"weight": Shard(0)})
    for layer in range(config.layers):
        mixer = config.mixer_of(layer)
        block = LLAMA_BLOCK | (attention_styles(config) if mixer == "attention" else state_styles(mixer))
        styles |= {f"model.layers.{layer}{name}": style for name, style in block.items()}
    return styles


LLAMA_BLOCK: dict[str, ParallelStyle] = {
    "": GatherTokens(),
    ".input_layernorm": ReplaceBy(sharded_modules.GatheringRMSNorm),
    ".post_attention_layernorm": ReplaceBy(sharded_modules.GatheringRMSNorm),
    ".mlp.gate_proj": COLUMN,
    ".mlp.up_proj": COLUMN,
    ".mlp.down_proj": ROW,
}
"""The parallel style of a LLaMA block's modules, without its mixer."""


def attention_styles(config: LlamaConfig) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module of a LLaMA's attention, by name in the block."""
    columns = {f".self_attn.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")}
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return {
        ".self_attn": SplitHeads(),
        **columns,
        **{f".self_attn.{name}": ReplaceBy(sharded_modules.ReplicatedRMSNorm) for name in norms},
        ".self_attn.o_proj": ROW,
    }


def state_styles(mixer: Mixer) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module of a layer with a state, by name in the block."""
    heads = {name: Shard(0) for name in ("A_log", "dt_bias", "D", "norm_weight")}
    convolution = ReplaceBy(sharded_modules.HeadParallelConv1d, {"weight": Shard(0), "bias": Shard(0)})
    kind = sharded_modules.HeadParallelMamba2
    columns = ["q_proj", "k_proj", "v_proj", "z_proj", "a_proj"]
    styles: dict[str, ParallelStyle] = {}
    if mixer == "delta_rule":
        kind = sharded_modules.HeadParallelGatedDeltaNet
        columns.append("b_proj")
        styles[".linear_attn.norm"] = ReplaceBy(sharded_modules.ReplicatedRMSNorm)
    return {
        **styles,
        ".linear_attn": ReplaceBy(kind, heads),
        **{f".linear_attn.{name}": COLUMN for name in columns},
        **{f".linear_attn.{name}_conv1d": convolution for name in ("q", "k", "v")},
        ".linear_attn.o_proj": ROW,
    }


def gpt_styles() -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module of a GPT, by name."""
    block = {
        "": GatherTokens(),
        ".ln_1": ReplaceBy(sharded_modules.GatheringLayerNorm),
        ".attn": SplitHeads(),
        ".attn.q_proj": COLUMN,
        ".attn.k_proj": COLUMN,
        ".attn.v_proj": COLUMN,
        ".attn.c_proj": ROW,
        ".ln_2": ReplaceBy(sharded_modules.GatheringLayerNorm),
        ".mlp.c_fc": COLUMN,
        ".mlp.c_proj": ROW,
    }
    return {
        "transformer.wte": TABLE,
        "transformer.wpe": ReplaceBy(sharded_modules.InterleavedEmbedding),
        **{f"transformer.h.*{name}": style for name, style in block.items()},
        "transformer.ln_f": ReplaceBy(sharded_modules.ReplicatedLayerNorm),
    }


def sharded_head(axis: DeviceMesh, vocabulary: int, head: HeadFunction, tokens: int) -> HeadFunction:
    """The model's `prepare_head` under tensor parallelism: binds `axis` and `vocabulary` to `head`, a loss.

    For the default head, `F.linear`, it returns a function that gathers the logits of all `tokens` tokens; for
    `last_logits`, those of the last one.
    """
    if head in (F.linear, last_logits):
        first = 0 if head is F.linear else tokens - 1
        return partial(full_logits, axis=axis, vocabulary=vocabulary, tokens=slice(first, tokens))
    return partial(head, axis=axis, vocabulary=vocabulary)


def full_logits(hidden: Tensor, weight: Tensor, axis: DeviceMesh, vocabulary: int, tokens: slice) -> Tensor:
    """Returns logits [B, T, V] of some tokens on every rank.

    Every rank must compute the same loss from the logits, because their gradient is not summed over ranks.

    Args:
        hidden: [B, n, E], the hidden states of this rank's interleaved tokens.
        weight: [V_r, E], this rank's rows.
        tokens: the T tokens.
    """
    hidden = all_gather_interleaved(hidden, axis)[:, tokens]
    logits = F.linear(hidden, weight)
    # R may not divide V, so the global shape is passed.
    shards = dtensor.from_local(logits, axis, [Shard(2)], (*logits.shape[:2], vocabulary))
    # A copy, because FSDP2 does not accept a view as a module's output.
    return shards.redistribute(placements=[Replicate()]).to_local().clone()
