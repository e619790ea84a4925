"""Context parallelism for parts of a plain torch model, as a style of `parallelize_module`."""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils import _pytree as pytree

from armillary.attention.call.validation import check_layout
from armillary.attention.context_parallel.sdpa import Routing, unbound
from armillary.attention.context_parallel.sequence import check_method
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.internal import dtensor


class ContextParallelStyle(ParallelStyle):
    """Routes a module's `scaled_dot_product_attention` calls through a context-parallel method.

        style = ContextParallelStyle(cp.method, layout=cp.method.layout(length))
        parallelize_module(model, mesh["ring"], {"layers.*.attention": style})

        batch = cp.shard(ids)
        loss = cp.loss(model(batch.ids, batch.position_ids), batch)

    Parameters stay as they are, so torch's tensor-parallel styles and FSDP2 apply as usual.

    Inputs of the module are this rank's tokens [B, T, ...], in the layout's order. DTensors on the mesh that
    `parallelize_module` gets must be `Shard(1)` on its axes of several ranks. The module then computes with their local
    tensors, and its outputs with T tokens become DTensors with the same placements.

    Pass `batch.position_ids` to the model: `torch.arange(T)` in a module would be the positions of the first shard. An
    `attn_mask` must be of the whole sequence; in a compiled graph it is an error, so use `mask` there.

    Activation checkpointing recomputes the module in backward. If the style has a `layout`, backward needs no block.
    But if documents or a mask come from a `sequence` block (`with batch`), call backward inside the block. On a GPU it
    raises even there, because autograd's threads do not see the block: give the style a `mask`, or use `sdpa_parallel`.

    Args:
        attend: the attention method, on axes of the mesh that `parallelize_module` gets.
        layout: layout of the sequence; by default the layout of the `sequence` block around the call.
        mask: replaces `is_causal`, for example by a mask with a window. Documents of the `sequence` block are added.

    Bytes sent: as by the method.

    Raises:
        ValueError: `attend` is no method, `layout` no layout, or `mask` no mask. In `parallelize_module`: a mesh with
            other axes than those of `attend`. In a call, besides errors as in `sdpa_parallel`: a layout, documents or a
            mask that differ from the block's; DTensors that are not `Shard(1)` on all axes of the mesh; a module that
            ends without a routed call.
    """

    def __init__(
        self, attend: Method, *, layout: SequenceLayout | None = None, mask: AttentionMask | None = None
    ) -> None:
        super().__init__()
        check_method(attend)
        check_layout("layout", layout)
        if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed")
        self.method: Method = attend
        self.layout: SequenceLayout | None = layout
        self.mask: AttentionMask | None = mask

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names or ()
        axes = [axis.name for axis in self.method.axes if axis.size > 1]
        extra = [name for i, name in enumerate(names) if device_mesh.size(i) > 1 and name not in axes]
        if extra or any(name not in names for name in axes):
            raise ValueError(
                f"ContextParallelStyle({type(self.method).__name__}) works on axes {tuple(axes)}; "
                f"parallelize_module was given a mesh with axes {names}: pass mesh[{', '.join(map(repr, axes))}]"
            )
        forward = unbound(module.forward)
        routing = Routing(self.method, self.layout, self.mask)

        # Only `forward` is replaced: torch's tensor-parallel styles and FSDP2 wrap parameters and `__call__`.
        @wraps(forward)
        def forward_on_shards(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inputs: list[DTensor] = []
            args, kwargs = pytree.tree_map_only(DTensor, lambda x: to_local(x, device_mesh, inputs), (args, kwargs))
            routing.used, routing.unrouted = False, ""
            with routing:
                out = forward(module, *args, **kwargs)
            if not torch.compiler.is_compiling():
                routing.check_used(f"{type(module).__name__}.forward under ContextParallelStyle")
            return to_dtensors(out, inputs[0]) if inputs else out

        # A bound method, because a copy of the module then gets a `forward` bound to the copy.
        module.forward = MethodType(forward_on_shards, module)
        return module

    def __repr__(self) -> str:
        return f"ContextParallelStyle({type(self.method).__name__}, layout={self.layout}, mask={self.mask})"


def to_local(x: DTensor, mesh: DeviceMesh, inputs: list[DTensor]) -> Any:
    """Returns the local tensor of a DTensor on `mesh`, which is added to `inputs`; others unchanged."""
    if x.device_mesh != mesh:
        return x
    if any(placement != Shard(1) and mesh.size(i) > 1 for i, placement in enumerate(x.placements)):
        raise ValueError(f"{x.placements} on axes {mesh.mesh_dim_names}: tokens must be Shard(1) on all of them")
    inputs.append(x)
    return dtensor.local_of(x)


def to_dtensors(outputs: Any, like: DTensor) -> Any:
    """Makes DTensors, placed as `like`, of the outputs with as many tokens as the local tensor of `like`."""
    tokens = like.to_local().shape[1]

    def to_dtensor(x: Any) -> Any:
        if isinstance(x, (nn.Parameter, DTensor)) or x.ndim < 2 or x.shape[1] != tokens:
            return x
        return dtensor.result_like(like, x, (x.shape[0], like.shape[1], *x.shape[2:]))

    return pytree.tree_map_only(torch.Tensor, to_dtensor, outputs)
