"""Tensor parallelism over one mesh axis of R ranks (Megatron-LM, arXiv 1909.08053 and, for norms, 2205.05198).

Attention is sharded by heads, the MLP by hidden units, embedding table and head by the vocabulary. Norms and the
residual stream are sharded by tokens: rank r has every R-th one. A block gathers twice and reduces twice, forward and
backward alike: 4 (R - 1) / R B T E e bytes sent each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from armillary.core import Axis, all_gather_interleaved
from armillary.models.block import HeadFunction
from armillary.models.gpt import GPT
from armillary.models.llama import Llama
from armillary.models.parallel import sharded_modules
from armillary.models.parallel.sharded_modules import ShardedModule, place


def tensor_parallel(model: Llama | GPT, axis: DeviceMesh) -> None:
    """Cuts the model over `axis`, in place. Parameters become `DTensor`s; nothing is sent.

    The model is called as before, with all tokens of the sequence shard on every rank of the axis, and with the same
    results there. A `head` is given the hidden states [B, ceil(T / R), E] of the rank's own tokens, its rows [V_r, E]
    of the weight, and `axis=` and `vocabulary=` (V) as `linear_token_loss` takes them; without a head, logits [B, T, V]
    are gathered.

    Without FSDP, the gradient of a parameter that is copied (norms, some biases) comes as `Partial`: this rank's share.
    Clipping and AdamW sum it up; so does `full_tensor()`.

    Args:
        model: with plain parameters, the same on all ranks or on "meta"; not yet under FSDP, wrapped or adapted.
        axis: a 1-D mesh, such as `mesh["tp"]`. One rank leaves the model as it is.

    Raises:
        ValueError: heads, key/value heads or the MLP's width are not divided by R, or a module is not what the model
            was built with (wrapped, replaced, or cut already). Raised before anything is changed.
    """
    if Axis.of(axis).size == 1:
        return
    styles = styles_for(model, Axis.of(axis))
    parallelize_module(model, axis, styles)
    model.tensor_axis = Axis.of(axis)
    model.heading = partial(on_vocabulary, axis, model.config.vocab_size)


def styles_for(model: Llama | GPT, axis: Axis) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module, by name. Errors as in `tensor_parallel`."""
    config = model.config
    width = model.config.hidden_dim if isinstance(model, Llama) else 4 * config.dim
    for name, count in {"heads": config.heads, "kv_heads": config.kv_heads, "MLP width": width}.items():
        if count % axis.size:
            raise ValueError(f"{name} {count} cannot be divided by {axis.size} ranks of axis {axis.name!r}")
    patterns = llama_styles(model) if isinstance(model, Llama) else gpt_styles()
    styles = {name.replace("*", str(i)): style for name, style in patterns.items() for i in range(config.layers)}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        parallel_styles = modules.get(name)
        kind = style.kind.plain if isinstance(style, ReplaceBy) else nn.Module
        touched = isinstance(style, ReplaceBy) and (
            type(parallel_styles) is not kind or "forward" in vars(parallel_styles)
        )
        if parallel_styles is None or touched:
            shown = (
                "not there"
                if parallel_styles is None
                else f"{type(parallel_styles).__name__}, not {kind.__name__} as it was built"
            )
            raise ValueError(f"{name} is {shown}: cut a model first, and then wrap it or put adapters in")
    return styles


@dataclass
class ReplaceBy(ParallelStyle):
    """Makes the module one of `kind`, with its parameters placed; unnamed ones are replicated."""

    kind: type[ShardedModule]
    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return place(module, self.kind, device_mesh, self.placements)


class SplitHeads(ParallelStyle):
    """Gives attention this rank's heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        attention.heads, attention.key_heads = (
            attention.heads // device_mesh.size(),
            attention.key_heads // device_mesh.size(),
        )
        return module


class GatherTokens(ParallelStyle):
    """Makes the block's norms return the tokens of all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        block: Any = module
        block.gathered_ranks = device_mesh.size()
        return module


COLUMN = ReplaceBy(sharded_modules.ColumnParallelLinear, {"weight": Shard(0), "bias": Shard(0)})
ROW = ReplaceBy(sharded_modules.RowParallelLinear, {"weight": Shard(1)})
TABLE = ReplaceBy(sharded_modules.VocabularyParallelEmbedding, {"weight": Shard(0)})


def llama_styles(model: Llama) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module of a LLaMA, by name."""
    block = {
        "": GatherTokens(),
        ".input_layernorm": ReplaceBy(sharded_modules.GatheringRMSNorm),
        ".self_attn": SplitHeads(),
        ".self_attn.q_proj": COLUMN,
        ".self_attn.k_proj": COLUMN,
        ".self_attn.v_proj": COLUMN,
        ".self_attn.q_norm": ReplaceBy(sharded_modules.ReplicatedRMSNorm),
        ".self_attn.k_norm": ReplaceBy(sharded_modules.ReplicatedRMSNorm),
        ".self_attn.o_proj": ROW,
        ".post_attention_layernorm": ReplaceBy(sharded_modules.GatheringRMSNorm),
        ".mlp.gate_proj": COLUMN,
        ".mlp.up_proj": COLUMN,
        ".mlp.down_proj": ROW,
    }
    if not model.config.qk_norm:
        block = {name: style for name, style in block.items() if name[-6:] not in ("q_norm", "k_norm")}
    head = (
        {}
        if model.lm_head is None
        else {"lm_head": ReplaceBy(sharded_modules.VocabularyParallelHead, {"weight": Shard(0)})}
    )
    return {
        "model.embed_tokens": TABLE,
        **{f"model.layers.*{name}": style for name, style in block.items()},
        "model.norm": ReplaceBy(sharded_modules.ReplicatedRMSNorm),
        **head,
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


def on_vocabulary(axis: DeviceMesh, vocabulary: int, head: HeadFunction, tokens: int) -> HeadFunction:
    """Returns the head for hidden states of some tokens, and a weight with some rows of the vocabulary."""
    if head is F.linear:
        return partial(whole_logits, axis=axis, vocabulary=vocabulary, tokens=tokens)
    return partial(head, axis=axis, vocabulary=vocabulary)


def whole_logits(hidden: Tensor, weight: Tensor, axis: DeviceMesh, vocabulary: int, tokens: int) -> Tensor:
    """Computes logits [B, T, V] on every rank, from hidden states [B, n, E] of its tokens and rows [V_r, E] of the
    head.
    """
    return gathered_logits(all_gather_interleaved(hidden, axis)[:, :tokens], weight, axis, vocabulary)


def gathered_logits(hidden: Tensor, weight: Tensor, axis: DeviceMesh, vocabulary: int) -> Tensor:
    """Computes logits [B, T, V] on every rank, from hidden states [B, T, E] of all tokens and rows [V_r, E] of the
    head.

    Every rank must use them alike: their gradient is taken from one rank, not summed.
    """
    logits = F.linear(hidden, weight)
    shape = torch.Size((*logits.shape[:2], vocabulary))
    stride = (shape[1] * vocabulary, vocabulary, 1)
    shards = DTensor.from_local(logits, axis, [Shard(2)], run_check=False, shape=shape, stride=stride)
    return shards.redistribute(placements=[Replicate()]).to_local().clone()  # FSDP2 wants no view
