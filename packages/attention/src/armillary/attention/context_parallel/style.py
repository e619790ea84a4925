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
    """Has the `scaled_dot_product_attention` calls of a module attend over the whole sequence, from a shard of it.

        parallelize_module(model, mesh["ring"], {"layers.*.attention": ContextParallelStyle(Ring(mesh["ring"]))})

        with sequence(layout=layout):
            logits = model(layout.take(ids, attend.shard), positions=layout.positions(attend.shard))

    Parameters stay as they are, so that torch's tensor-parallel styles and FSDP2 go around it. As each rank has its own
    tokens, gradients of parameters are shares, to be summed over ranks: call `armillary.core.sum_gradients(model)`
    after `fully_shard`.

    Tensors that enter the module hold this rank's tokens [B, T, ...], in the layout's order (`layout.take`, or
    `distribute_sequence`). DTensors on the style's mesh, `Shard(1)` on all of it, enter as their local tensors, and
    what the module returns then leaves as DTensors placed likewise, on the same mesh.

    Not seen from a module, and so for the caller to get right: positions (a module's own `torch.arange(T)` are those of
    a first shard: pass `layout.positions(attend.shard)`), and masks of its tokens alone (an `attn_mask` is of the
    whole sequence, and in a graph refused; see `mask`).

    Activation checkpointing recomputes the module in backward. With `layout` that needs no block, unless documents or
    a mask come from `sequence(...)`: then backward must run inside of that block, and is refused on a GPU, whose
    autograd threads do not see it (give `mask`, or use `sdpa_parallel`).

    Args:
        attend: the method, over axes of the mesh that `parallelize_module` is given.
        layout: how the sequence is sharded; by default that of the `sequence(...)` around the call.
        mask: replaces `is_causal`, for example by one with a window. Documents of `sequence(...)` are added to it.

    Raises:
        ValueError: no method or layout; at `parallelize_module`, a mesh with other axes than those of `attend`; at a
            call as `sdpa_parallel`, a layout or documents that differ from those of `sequence(...)`, and DTensors that
            are not `Shard(1)` on all of the mesh.
    """

    def __init__(
        self, attend: Method, *, layout: SequenceLayout | None = None, mask: AttentionMask | None = None
    ) -> None:
        super().__init__()
        check_method(attend)
        check_layout("layout", layout)
        if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed")
        self.attend, self.layout, self.mask = attend, layout, mask

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check_mesh(device_mesh)
        forward = unbound(module.forward)
        routing = Routing(self.attend, self.layout, self.mask)

        @wraps(forward)
        def over_all_shards(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            entered: list[DTensor] = []
            args, kwargs = pytree.tree_map_only(DTensor, lambda x: local_part(x, device_mesh, entered), (args, kwargs))
            routing.used, routing.beside = False, ""
            with routing:
                left = forward(own, *args, **kwargs)
            if not torch.compiler.is_compiling():
                routing.check_used(f"{type(own).__name__}.forward under ContextParallelStyle")
            return placed_as(entered[0], left) if entered else left

        module.forward = MethodType(over_all_shards, module)  # a copy of the module calls its own
        return module

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        wanted: Mapping[str, Axis] = {axis.name: axis for axis in self.attend.axes if axis.size > 1}
        others = [name for i, name in enumerate(names) if mesh.size(i) > 1 and name not in wanted]
        if others or any(name not in names for name in wanted):
            raise ValueError(
                f"ContextParallelStyle({type(self.attend).__name__}) works on axes {tuple(wanted)}; "
                f"parallelize_module was given a mesh with axes {names}: pass mesh[{', '.join(map(repr, wanted))}]"
            )

    def __repr__(self) -> str:
        return f"ContextParallelStyle({type(self.attend).__name__}, layout={self.layout}, mask={self.mask})"


def local_part(x: DTensor, mesh: DeviceMesh, entered: list[DTensor]) -> Any:
    """What this rank has of `x`, which is noted, if it is on this mesh; others stay DTensors, such as those of `tp`."""
    if x.device_mesh != mesh:
        return x
    if any(found != Shard(1) and mesh.size(i) > 1 for i, found in enumerate(x.placements)):
        raise ValueError(f"{x.placements} on axes {mesh.mesh_dim_names}: tokens must be Shard(1) on all of them")
    entered.append(x)
    return local_of(x)


def placed_as(like: DTensor, left: Any) -> Any:
    """Tensors with as many tokens as this rank's part of `like` become DTensors placed as it is."""
    tokens = like.to_local().shape[1]

    def place(x: Any) -> Any:
        sharded = isinstance(x, (nn.Parameter, DTensor)) or x.ndim < 2 or x.shape[1] != tokens
        return x if sharded else dtensor_like(like, x, (x.shape[0], like.shape[1], *x.shape[2:]))

    return pytree.tree_map_only(torch.Tensor, place, left)
