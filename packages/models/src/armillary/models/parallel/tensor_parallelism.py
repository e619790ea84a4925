"""Tensor parallelism over one mesh axis of R ranks (Megatron-LM, arXiv 1909.08053 and, for norms, 2205.05198).

Attention is sharded by heads, the MLP by hidden units, embedding table and head by the vocabulary. Norms and the
residual stream are sharded by tokens: rank r has the tokens i R + r. In forward, a block all-gathers before attention
and before the MLP, and reduce-scatters after each: each rank sends 4 (R - 1) / R B T E e bytes. In backward too.

A registered parameter is a `DTensor`, as FSDP2, checkpoints, clipping and optimizers expect. Modules compute with local
tensors: reading a parameter as an attribute returns its local part.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from armillary.core import Axis
from armillary.core.internal import compat, dtensor
from armillary.models.block import Block, HeadFunction
from armillary.models.config import LlamaConfig, Mixer
from armillary.models.gpt import GPT
from armillary.models.layers.interleaved import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved
from armillary.models.layers.projections import ProjectionModule
from armillary.models.layers.state_mixers import GatedDeltaNet, Mamba2
from armillary.models.llama import Head, Llama
from armillary.models.sample import last_logits

M = TypeVar("M", bound="ShardedModule")


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
    ranks = Axis.of(axis).size
    if ranks == 1:
        return
    # 1. Modules with parameters: another class, and parameters as DTensors.
    modules = dict(model.named_modules())
    for name, style in styles_for(model, Axis.of(axis)).items():
        shard_module(modules[name], style.kind, axis, style.placements)
    for module in modules.values():
        if isinstance(module, Block):
            module.gathered_ranks = ranks  # its norms return the tokens of all ranks
        elif isinstance(module, ProjectionModule):
            module.heads //= ranks  # column-parallel projections return this rank's heads
            module.key_heads //= ranks
    # 2. The function that a call passes as `head`.
    model.prepare_head = partial(sharded_head, axis, model.config.vocab_size)


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
    """Returns logits [B, T, V] of T tokens on every rank, of this rank's hidden [B, n, E] and weight [V_r, E].

    Every rank must compute the same loss from the logits, because their gradient is not summed over ranks.
    """
    logits = F.linear(all_gather_interleaved(hidden, axis)[:, tokens], weight)
    # R may not divide V, so the global shape is passed.
    shards = dtensor.from_local(logits, axis, [Shard(2)], (*logits.shape[:2], vocabulary))
    # A copy, because FSDP2 does not accept a view as a module's output.
    return shards.redistribute(placements=[Replicate()]).to_local().clone()


# -- modules with local parameters -------------------------------------------------------------------------------------


class ShardedModule(nn.Module):
    """A module whose parameters are placed on `axis`."""

    axis: Axis
    # Names of parameters whose part on this rank is empty: 5 rows over 4 ranks are parts of 2, 2, 1 and 0.
    empty: frozenset[str]
    # The unsharded class that it replaces.
    plain: ClassVar[type[nn.Module]]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # A parameter that FSDP shards too is a DTensor on several mesh axes, which only FSDP itself reads. During
        # forward FSDP has gathered it: then it is a DTensor on the tensor-parallel axis alone.
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        return EmptyShard.apply(value, self, name) if name in self.empty else local(value)


def local(parameter: DTensor) -> Tensor:
    """Returns this rank's part of a parameter. The gradient of a replicated parameter is `Partial`."""
    (placement,) = parameter.placements
    return compat.to_local(parameter, [Partial() if placement == Replicate() else placement])


class EmptyShard(torch.autograd.Function):
    """Returns this rank's part of a parameter, if the part is empty.

    It is a node of the graph, so that this rank runs the same collectives in backward as all others.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, module: ShardedModule, name: str) -> Tensor:
        ctx.module, ctx.name = module, name
        return parameter.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # No gradient is returned, because FSDP2 cannot reduce empty ones. The parameter gets a gradient of size 0 at
        # the end of the whole backward, when FSDP has reduced gradients and, except between micro-batches of ZeRO
        # stage 1, resharded the parameters.
        module, name = ctx.module, ctx.name

        def set_empty_gradient() -> None:
            parameter = dict(module.named_parameters(recurse=False))[name]
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

        # Under ZeRO stage 1 the parameter stays gathered, with the empty gradient of the previous micro-batch.
        dict(module.named_parameters(recurse=False))[name].grad = None
        compat.after_backward(set_empty_gradient)
        return None, None, None


def shard_module(module: nn.Module, kind: type[M], mesh: DeviceMesh, placements: Mapping[str, Placement]) -> M:
    """Changes the class of `module` to `kind`, in place, and makes its parameters DTensors.

    Parameters without an entry in `placements` are replicated.
    """
    empty: set[str] = set()
    for name, parameter in module.named_parameters(recurse=False):
        # No broadcast (`src_data_rank=None`): every rank has the full parameters (or "meta"), and keeps its part.
        shards = distribute_tensor(parameter.detach(), mesh, [placements.get(name, Replicate())], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shards, requires_grad=parameter.requires_grad))
        if not shards.to_local().numel():
            empty.add(name)
    module.__class__ = kind
    sharded = cast(M, module)
    sharded.axis, sharded.empty = Axis.of(mesh), frozenset(empty)
    return sharded


class ColumnParallelLinear(ShardedModule, nn.Linear):
    """A linear layer from all inputs to this rank's outputs. Weight and bias are sharded by rows."""

    plain = nn.Linear


class ReplicatedLinear(ShardedModule, nn.Linear):
    """A linear layer that each rank computes for the tokens of all ranks. The weight is replicated.

    Its outputs go to this rank's heads only, so the gradients of input and weight are this rank's shares. Those of the
    input are summed once, in the backward of the gathering norm.
    """

    plain = nn.Linear


class RowParallelLinear(ShardedModule, nn.Linear):
    """A linear layer from this rank's inputs to all outputs, of this rank's tokens. Sharded by columns."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        # The input has the tokens of all ranks.
        y, bias = reduce_scatter_interleaved(F.linear(input, self.weight), self.axis), cast(Tensor | None, self.bias)
        return y if bias is None else y + bias


class ReplicatedRMSNorm(ShardedModule, nn.RMSNorm):
    """An RMSNorm of this rank's tokens, or of this rank's heads. The weight is replicated."""

    plain = nn.RMSNorm


class ReplicatedLayerNorm(ShardedModule, nn.LayerNorm):
    """A LayerNorm of this rank's tokens. Weight and bias are replicated."""

    plain = nn.LayerNorm


class GatheringRMSNorm(ReplicatedRMSNorm):
    """An RMSNorm of this rank's tokens that returns the normed tokens of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_interleaved(super().forward(x), self.axis)


class GatheringLayerNorm(ReplicatedLayerNorm):
    """A LayerNorm of this rank's tokens that returns the normed tokens of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return all_gather_interleaved(super().forward(input), self.axis)


class HeadParallelConv1d(ShardedModule, nn.Conv1d):
    """The weights of a depthwise convolution, sharded by channels."""

    plain = nn.Conv1d


class HeadParallelGatedDeltaNet(ShardedModule, GatedDeltaNet):
    """A Gated DeltaNet with this rank's heads."""

    plain = GatedDeltaNet


class HeadParallelMamba2(ShardedModule, Mamba2):
    """A Mamba-2 with this rank's groups of heads."""

    plain = Mamba2


class VocabularyParallelEmbedding(ShardedModule, nn.Embedding):
    """An embedding whose table is sharded by rows. Returns this rank's interleaved tokens."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        table = self.weight
        first = sum(dtensor.chunk_sizes(self.num_embeddings, self.axis.size)[: self.axis.rank])
        rows = checked_indices(input, self.num_embeddings) - first
        # Each rank looks up all tokens in its own rows, with zeros for tokens of other ranks' rows. The reduce-scatter
        # sums the results over ranks.
        on_this_rank = (rows >= 0) & (rows < len(table))
        # A rank without rows looks up a row of zeros instead, so that its backward runs the same collectives.
        x = F.embedding(rows.where(on_this_rank, 0), table if len(table) else F.pad(table, (0, 0, 0, 1)))
        return reduce_scatter_interleaved(x.where(on_this_rank.unsqueeze(-1), 0), self.axis)


class InterleavedEmbedding(ShardedModule, nn.Embedding):
    """An embedding of positions [T] or [B, T] that returns this rank's interleaved tokens. The table is replicated."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        positions = checked_indices(input, self.num_embeddings)
        rows = positions if positions.ndim == 2 else positions.unsqueeze(0)
        return F.embedding(interleaved_shard(rows, self.axis), self.weight)


def checked_indices(indices: Tensor, count: int) -> Tensor:
    """Returns `indices`. torch raises if one is below 0 or not below `count`, as for an unsharded table."""
    # Adds zeros that `gather` looks up at `indices` in a table of `count` zeros. The lookup in this rank's rows would
    # not raise, because it masks the rows of other ranks; indexing by `[]` would count a negative index from the end.
    zeros = indices.new_zeros(1).expand(count)  # one element of memory
    return indices + zeros.gather(0, indices.flatten().long()).view_as(indices)


class VocabularyParallelHead(ShardedModule, Head):
    """An LM head with this rank's rows of the weight. `sharded_head` passes the axis and V to the loss."""

    plain = Head


# -- which module is sharded how ---------------------------------------------------------------------------------------


class Style(NamedTuple):
    """The class that a module gets, and the placements of its parameters by name; others are replicated."""

    kind: type[ShardedModule]
    placements: Mapping[str, Placement] = {}


# Megatron's pair: a column-parallel layer computes this rank's hidden units from all inputs, without communication. The
# row-parallel layer that follows computes this rank's contribution to all outputs, and a reduce-scatter over tokens
# sums the contributions.
COLUMN = Style(ColumnParallelLinear, {"weight": Shard(0), "bias": Shard(0)})
ROW = Style(RowParallelLinear, {"weight": Shard(1)})
TABLE = Style(VocabularyParallelEmbedding, {"weight": Shard(0)})
HEAD = Style(VocabularyParallelHead, {"weight": Shard(0)})
CONVOLUTION = Style(HeadParallelConv1d, {"weight": Shard(0), "bias": Shard(0)})

GPT_BLOCK = {
    "ln_1": Style(GatheringLayerNorm),
    "attn.q_proj": COLUMN,
    "attn.k_proj": COLUMN,
    "attn.v_proj": COLUMN,
    "attn.c_proj": ROW,
    "ln_2": Style(GatheringLayerNorm),
    "mlp.c_fc": COLUMN,
    "mlp.c_proj": ROW,
}
# A LLaMA's block without its mixer.
LLAMA_BLOCK = {
    "input_layernorm": Style(GatheringRMSNorm),
    "post_attention_layernorm": Style(GatheringRMSNorm),
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}
ATTENTION = {
    "self_attn.q_proj": COLUMN,
    "self_attn.k_proj": COLUMN,
    "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": ROW,
}
LATENT_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa": Style(ReplicatedLinear),
    "self_attn.kv_a_layernorm": Style(ReplicatedRMSNorm),
    "self_attn.kv_b_proj": COLUMN,
    "self_attn.o_proj": ROW,
}
LATENT_QUERIES = {
    "self_attn.q_a_proj": Style(ReplicatedLinear),
    "self_attn.q_a_layernorm": Style(ReplicatedRMSNorm),
    "self_attn.q_b_proj": COLUMN,
}
QK_NORMS = {"self_attn.q_norm": Style(ReplicatedRMSNorm), "self_attn.k_norm": Style(ReplicatedRMSNorm)}
# The modules that both mixers with a state have.
STATE = {
    "linear_attn.q_proj": COLUMN,
    "linear_attn.k_proj": COLUMN,
    "linear_attn.v_proj": COLUMN,
    "linear_attn.z_proj": COLUMN,
    "linear_attn.a_proj": COLUMN,
    "linear_attn.q_conv1d": CONVOLUTION,
    "linear_attn.k_conv1d": CONVOLUTION,
    "linear_attn.v_conv1d": CONVOLUTION,
    "linear_attn.o_proj": ROW,
}
HEADS = {"A_log": Shard(0), "dt_bias": Shard(0), "D": Shard(0), "norm_weight": Shard(0)}
STATE_STYLES: dict[Mixer, dict[str, Style]] = {
    "delta_rule": STATE
    | {
        "linear_attn": Style(HeadParallelGatedDeltaNet, HEADS),
        "linear_attn.b_proj": COLUMN,
        "linear_attn.norm": Style(ReplicatedRMSNorm),
    },
    "mamba2": STATE | {"linear_attn": Style(HeadParallelMamba2, HEADS)},
}


def styles_for(model: Llama | GPT, axis: Axis) -> dict[str, Style]:
    """Returns the style of each module with parameters, by name. Errors as in `tensor_parallel`."""
    # 1. Sizes that R must divide.
    config = model.config
    width = model.config.hidden_dim if isinstance(model, Llama) else 4 * config.dim
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "MLP width": width}
    if isinstance(config, LlamaConfig) and config.states is not None:
        sizes |= {"states.heads": config.states.heads, "states.key_heads": config.states.key_heads}
    for name, count in sizes.items():
        if count % axis.size:
            raise ValueError(f"{name} {count} must be divisible by the {axis.size} ranks of axis {axis.name!r}")
    # 2. Styles by name.
    if isinstance(model, Llama):
        attention = ATTENTION | (QK_NORMS if model.config.qk_norm else {})
        if (latent := model.config.latent) is not None:
            queries = {"self_attn.q_proj": COLUMN} if latent.query_rank is None else LATENT_QUERIES
            attention = LATENT_ATTENTION | queries
        styles = {"model.embed_tokens": TABLE, "model.norm": Style(ReplicatedRMSNorm)}
        styles |= {} if model.lm_head is None else {"lm_head": HEAD}
        for layer in range(config.layers):
            block = LLAMA_BLOCK | STATE_STYLES.get(model.config.mixer_of(layer), attention)
            styles |= {f"model.layers.{layer}.{name}": style for name, style in block.items()}
    else:
        styles = {"transformer.wte": TABLE, "transformer.wpe": Style(InterleavedEmbedding)}
        styles |= {f"transformer.h.{i}.{name}": GPT_BLOCK[name] for i in range(config.layers) for name in GPT_BLOCK}
        styles["transformer.ln_f"] = Style(ReplicatedLayerNorm)
    # 3. Each module must still be the one that the model was built with: changing the class drops everything else.
    modules = dict(model.named_modules())
    for name, style in styles.items():
        module, kind = modules.get(name), style.kind.plain
        if module is None or type(module) is not kind or "forward" in vars(module):
            problem = "not there" if module is None else f"{type(module).__name__}, not {kind.__name__} as it was built"
            raise ValueError(f"{name} is {problem}: apply tensor parallelism before wrappers and adapters")
    return styles
