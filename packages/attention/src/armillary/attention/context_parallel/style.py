"""Context parallelism for parts of a plain torch model, as a style of `parallelize_module`."""

from __future__ import annotations

from collections.abc import Mapping
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
from armillary.core import Axis, SequenceLayout
from armillary.core.placements import dtensor_like, local_of


class ContextParallelStyle(ParallelStyle):
    """Routes a module's `scaled_dot_product_attention` calls through a context-parallel method.

        style = ContextParallelStyle(cp.method, layout=cp.method.layout(length))
        parallelize_module(model, mesh["ring"], {"layers.*.attention": style})

        batch = cp.shard(ids)
        loss = cp.loss(model(batch.ids, batch.position_ids), batch)

    Parameters stay as they are, so torch's tensor-parallel styles and FSDP2 apply as usual.

    Tensors that enter the module hold this rank's tokens [B, T, ...], in the layout's order. DTensors on the style's
    mesh, `Shard(1)` on all of it, enter as their local tensors; the module's outputs with as many tokens then leave as
    DTensors with the same placements.

    A module does not show its positions: its own `torch.arange(T)` would be that of the first shard, so pass
    `batch.position_ids`. An `attn_mask` must be of the whole sequence, and is refused in a graph; see `mask`.

    Activation checkpointing recomputes the module in backward. With `layout` that needs no block, unless documents or
    a mask come from a `sequence` block (`with batch`): then call backward inside of it. On a GPU it is refused, because
    autograd's threads do not see the block: give `mask`, or use `sdpa_parallel`.

    Args:
        attend: the method, over axes of the mesh that `parallelize_module` gets.
        layout: layout of the sequence; by default that of the `sequence` block around the call.
        mask: replaces `is_causal`, for example by one with a window. Documents of the block are added to it.

    Bytes sent: those of the method.

    Raises:
        ValueError: no method or layout; at `parallelize_module`, a mesh with other axes than those of `attend`; at a
            call as `sdpa_parallel`, a layout or documents that differ from those of the block, and DTensors that are
            not `Shard(1)` on all of the mesh.
    """

    def __init__(
        self, attend: Method, *, layout: SequenceLayout | None = None, mask: AttentionMask | None = None
    ) -> None:
        super().__init__()
        check_method(attend)
        check_layout("layout", layout)
        if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed")
        self.method, self.layout, self.mask = attend, layout, mask

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check_mesh(device_mesh)
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

        module.forward = MethodType(forward_on_shards, module)  # bound, so that a copy of the module gets its own
        return module

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        axes: Mapping[str, Axis] = {axis.name: axis for axis in self.method.axes if axis.size > 1}
        extra = [name for i, name in enumerate(names) if mesh.size(i) > 1 and name not in axes]
        if extra or any(name not in names for name in axes):
            raise ValueError(
                f"ContextParallelStyle({type(self.method).__name__}) works on axes {tuple(axes)}; "
                f"parallelize_module was given a mesh with axes {names}: pass mesh[{', '.join(map(repr, axes))}]"
            )

    def __repr__(self) -> str:
        return f"ContextParallelStyle({type(self.method).__name__}, layout={self.layout}, mask={self.mask})"


def to_local(x: DTensor, mesh: DeviceMesh, inputs: list[DTensor]) -> Any:
    """Returns the local tensor of a DTensor on this mesh, which is added to `inputs`; others (of `tp`) unchanged."""
    if x.device_mesh != mesh:
        return x
    if any(placement != Shard(1) and mesh.size(i) > 1 for i, placement in enumerate(x.placements)):
        raise ValueError(f"{x.placements} on axes {mesh.mesh_dim_names}: tokens must be Shard(1) on all of them")
    inputs.append(x)
    return local_of(x)


def to_dtensors(outputs: Any, like: DTensor) -> Any:
    """Makes DTensors, placed as `like`, of the local tensors with as many tokens as its local tensor."""
    tokens = like.to_local().shape[1]

    def place(x: Any) -> Any:
        no_tokens = isinstance(x, (nn.Parameter, DTensor)) or x.ndim < 2 or x.shape[1] != tokens
        return x if no_tokens else dtensor_like(like, x, (x.shape[0], like.shape[1], *x.shape[2:]))

    return pytree.tree_map_only(torch.Tensor, place, outputs)
