"""Tensor-parallel versions of linear layers, norms, embeddings and mixers, which compute with local parameters.

A registered parameter is a `DTensor`, as FSDP2, checkpoints, clipping and optimizers expect. Reading it as an attribute
returns its local part. Between blocks, tokens are interleaved over the ranks (`armillary.models.layers.interleaved`).
The norms before attention and MLP gather them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from armillary.core import Axis
from armillary.core.parts import compat, dtensor
from armillary.models.layers.interleaved import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved
from armillary.models.layers.state_mixers import GatedDeltaNet, Mamba2
from armillary.models.llama import Head

M = TypeVar("M", bound="ShardedModule")


class ShardedModule(nn.Module):
    """A module whose parameters are placed on `axis`."""

    axis: Axis
    empty: frozenset[str]
    """Names of parameters whose part on this rank is empty: 5 rows over 4 ranks are parts of 2, 2, 1 and 0."""
    plain: ClassVar[type[nn.Module]]
    """The unsharded class that it replaces."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # A parameter that FSDP shards too is a DTensor on several mesh axes, which only FSDP itself reads. During
        # forward FSDP has gathered it: then it is a DTensor on the tensor-parallel axis alone.
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        return EmptyShard.apply(value, self, name) if name in self.empty else local(value)


class EmptyShard(torch.autograd.Function):
    """Returns this rank's part of a parameter, if the part is empty.

    It is a node of the graph, so that this rank runs the same collectives in backward as all others. Its backward
    returns no gradient, because FSDP2 cannot reduce empty gradients. The parameter gets a gradient of size 0 at the end
    of the whole backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, module: ShardedModule, name: str) -> Tensor:
        ctx.module, ctx.name = module, name
        return parameter.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Under ZeRO stage 1 the parameter stays gathered, with the empty gradient of the previous micro-batch.
        dict(ctx.module.named_parameters(recurse=False))[ctx.name].grad = None
        compat.after_backward(partial(set_empty_gradient, ctx.module, ctx.name))
        return None, None, None


def set_empty_gradient(module: nn.Module, name: str) -> None:
    """Sets the gradient of an empty part to zeros, if it is None.

    Runs after backward, when FSDP has reduced gradients and, except between micro-batches of ZeRO stage 1, resharded
    the parameters.
    """
    parameter = dict(module.named_parameters(recurse=False))[name]
    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def local(parameter: DTensor) -> Tensor:
    """Returns this rank's part of a parameter.

    Its gradient has the parameter's placement. The gradient of a replicated parameter is `Partial`.
    """
    (placement,) = parameter.placements
    return compat.to_local(parameter, [Partial() if placement == Replicate() else placement])


def shard_module(module: nn.Module, kind: type[M], mesh: DeviceMesh, placements: Mapping[str, Placement]) -> M:
    """Changes the class of `module` to `kind`, in place, and makes its parameters DTensors.

    There is no communication: every rank has the full parameters (or "meta"), and keeps its part.

    Args:
        placements: placements of parameters by name; the others are replicated.
    """
    for name, parameter in module.named_parameters(recurse=False):
        # `src_data_rank=None` means no broadcast.
        dtensor = distribute_tensor(parameter.detach(), mesh, [placements.get(name, Replicate())], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))
    parameters = cast(Mapping[str, DTensor], dict(module.named_parameters(recurse=False)))
    module.__class__ = kind
    sharded = cast(M, module)
    sharded.axis = Axis.of(mesh)
    sharded.empty = frozenset(name for name, parameter in parameters.items() if not parameter.to_local().numel())
    return sharded


class ColumnParallelLinear(ShardedModule, nn.Linear):
    """A linear layer from all inputs to this rank's outputs. Weight and bias are sharded by rows."""

    plain = nn.Linear


class RowParallelLinear(ShardedModule, nn.Linear):
    """A linear layer from this rank's inputs to all outputs. The weight is sharded by columns.

    The input has the tokens of all ranks. A reduce-scatter sums the outputs over ranks, and returns this rank's tokens.
    """

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
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
    """An embedding whose table is sharded by rows.

    Each rank looks up all tokens in its own rows, with zeros for tokens of other ranks' rows. A reduce-scatter sums the
    results over ranks, and returns this rank's interleaved tokens.
    """

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        table = self.weight
        first = sum(dtensor.chunk_sizes(self.num_embeddings, self.axis.size)[: self.axis.rank])
        rows = checked_indices(input, self.num_embeddings) - first
        on_this_rank = (rows >= 0) & (rows < len(table))
        # A rank without rows looks up a row of zeros instead, so that its backward runs the same collectives.
        x = F.embedding(rows.where(on_this_rank, 0), table if len(table) else F.pad(table, (0, 0, 0, 1)))
        return reduce_scatter_interleaved(x.where(on_this_rank.unsqueeze(-1), 0), self.axis)


def checked_indices(indices: Tensor, count: int) -> Tensor:
    """Returns `indices`. torch raises if one is below 0 or not below `count`, as for an unsharded table.

    Adds zeros that `gather` looks up at `indices` in a table of `count` zeros. The lookup in this rank's rows would not
    raise, because it masks the rows of other ranks; and indexing by `[]` would count a negative index from the end.
    """
    zeros = indices.new_zeros(1).expand(count)  # one element of memory
    return indices + zeros.gather(0, indices.flatten().long()).view_as(indices)


class InterleavedEmbedding(ShardedModule, nn.Embedding):
    """An embedding of positions [T] or [B, T] that returns this rank's interleaved tokens. The table is replicated."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        positions = checked_indices(input, self.num_embeddings)
        rows = positions if positions.ndim == 2 else positions.unsqueeze(0)
        return F.embedding(interleaved_shard(rows, self.axis), self.weight)


class VocabularyParallelHead(ShardedModule, Head):
    """An LM head with this rank's rows of the weight. `tensor.sharded_head` tells the loss the axis and V."""

    plain = Head
