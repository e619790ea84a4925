"""Projections from hidden states to query, key and value heads, for any subset of the heads.

UPipe projects one stage of heads at a time. So `HeadProjections` computes only the requested heads, and in backward
`collected_linear` adds the gradient of their rows of the weight to one buffer, instead of a new tensor for each stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention.internal import GradientSums, ProjectionParts, head_slices, select_heads, update_heads
from armillary.core.internal import compat, register_as_tensor
from armillary.models.layers.rope import RotaryEmbedding


@dataclass(frozen=True)
class HeadProjections:
    """Projections from hidden states x [B, T, E] to q [B, T, H, D] and k, v [B, T, K, D], with norms and RoPE.

    Implements `TokenProjections`, `CacheableProjections`, `CollectsGradients` and `Traceable`.
    """

    # Projections from E to H D, K D and K D. If one is a plain `nn.Linear`, only the requested heads are computed.
    # Another module (LoRA adapter, float8, hooks) computes all heads, and the requested ones are selected.
    query: nn.Module
    key: nn.Module
    value: nn.Module
    heads: int  # H
    key_heads: int  # K
    head_dim: int  # D
    rotation: RotaryEmbedding | None = None  # at the positions of the tokens of x
    norm: nn.Module | None = None  # applied to x first
    query_norm: nn.Module | None = None  # applied to each head before RoPE (Qwen3), as is `key_norm`
    key_norm: nn.Module | None = None
    # The registered number of the `ProjectionModule` that made these projections, from which a compiled graph rebuilds
    # them. A tensor, so that torch.compile does not make a graph for each number.
    projector: Tensor | None = None
    # Sums to which backward adds the gradients of plain linear layers, instead of returning them.
    totals: GradientSums | None = None

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.head_dim

    def modules(self) -> tuple[nn.Module | None, ...]:
        return self.norm, self.query, self.key, self.value, self.query_norm, self.key_norm

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """Returns the queries of these h heads: [B, T, h, D]."""
        x = x if self.norm is None else self.norm(x)
        q = self._project(self.query, x, heads, self.heads, self.head_dim)
        q = q if self.query_norm is None else self.query_norm(q)
        return q if self.rotation is None else self.rotation(q)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values of these h key/value heads: [B, T, h, D] each."""
        x = x if self.norm is None else self.norm(x)
        k = self._project(self.key, x, heads, self.key_heads, self.head_dim)
        v = self._project(self.value, x, heads, self.key_heads, self.head_dim)
        k = k if self.key_norm is None else self.key_norm(k)
        return k if self.rotation is None else self.rotation(k), v

    def parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(module.parameters() for module in self.modules() if module is not None)

    def parts(self) -> ProjectionParts | None:
        """Returns the tensors from which an op rebuilds the projections.

        None if it cannot: there is no projector, `norm` is given, key and value are one module, or a module is not a
        plain linear layer or norm (LoRA, hooks).
        """
        modules = [module for module in self.modules() if module is not None]
        plain_modules = all(plain(module, nn.Linear, nn.RMSNorm, nn.LayerNorm) for module in modules)
        if self.projector is None or self.norm is not None or not plain_modules or self.key is self.value:
            return None
        tensors = [] if self.rotation is None else [self.rotation.cos, self.rotation.sin]
        parameters = [
            getattr(submodule, name)  # the attribute is the local part of a sharded parameter (`ShardedModule`)
            for module in modules
            for submodule in module.modules()
            for name, parameter in submodule._parameters.items()  # pyright: ignore[reportPrivateUsage]
            if parameter is not None and parameter.requires_grad
        ]
        return ProjectionParts(self.projector, self.head_dim, self.value_dim, tensors, parameters)

    def cache_key(self) -> Hashable | None:
        """Returns a cache key for the shapes and dtypes of q, k and v; None unless all layers and norms are plain."""
        descriptions = [() if module is None else module_key(module) for module in self.modules()]
        angles = () if self.rotation is None else (tensor_key(self.rotation.cos), tensor_key(self.rotation.sin))
        return None if None in descriptions else (self.heads, self.key_heads, self.head_dim, angles, *descriptions)

    def of_tokens(self, tokens: slice) -> Self:
        return self if self.rotation is None else replace(self, rotation=self.rotation.of_tokens(tokens))

    def collecting(self, totals: GradientSums) -> Self:
        return replace(self, totals=totals)

    def _project(self, linear: nn.Module, x: Tensor, heads: Sequence[int], count: int, dim: int) -> Tensor:
        """Computes the requested heads [B, T, h, dim] of a projection to `count` heads."""
        plain_linear = linear if isinstance(linear, nn.Linear) and plain(linear, nn.Linear) else None
        # In backward of `Projected`, gradients of the parameters are added to `totals`. But the weight of a layer with
        # a submodule (a parametrization) is not a parameter.
        if self.totals is not None and plain_linear is not None and not any(plain_linear.children()):
            y = collected_linear(x, plain_linear, HeadRows(tuple(heads), dim), self.totals)
            return y.unflatten(-1, (len(heads), dim))
        if tuple(heads) == tuple(range(count)):
            return linear(x).unflatten(-1, (count, dim))
        # A module with hooks or its own `forward` must be called as a whole, and computes all heads.
        if plain_linear is None:
            return select_heads(linear(x).unflatten(-1, (count, dim)), heads)
        # A plain linear layer: only the rows of the requested heads are multiplied.
        rows = HeadRows(tuple(heads), dim)
        bias = cast(Tensor | None, plain_linear.bias)
        y = F.linear(x, rows.of(plain_linear.weight), None if bias is None else rows.of(bias))
        return y.unflatten(-1, (len(heads), dim))


class ProjectionModule(nn.Module):
    """Attention of a layer, an `AttentionFunction`, with its projections to q, k and v."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, heads: int, key_heads: int, head_dim: int, attention: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim, self.attention = heads, key_heads, head_dim, attention
        self.value_dim = head_dim
        self.q_norm = self.k_norm = None
        # An op in a compiled graph finds the module by this number, and rebuilds `HeadProjections`.
        self.projector = register_as_tensor(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.projector = register_as_tensor(self)  # a copy needs a number of its own

    def projections(self, rotation: RotaryEmbedding | None, norm: nn.Module | None) -> HeadProjections:
        """Returns the projections from x [B, T, E] to q, k and v, which apply `norm` to x first."""
        return HeadProjections(
            query=self.q_proj,
            key=self.k_proj,
            value=self.v_proj,
            projector=self.projector,
            heads=self.heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            rotation=rotation,
            norm=norm,
            query_norm=self.q_norm,
            key_norm=self.k_norm,
        )

    def projections_of(self, tensors: Sequence[Tensor]) -> HeadProjections:
        """Rebuilds the projections from the tensors of `HeadProjections.parts`."""
        return self.projections(RotaryEmbedding(*tensors) if tensors else None, None)


def plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Returns True if the module has the `forward` of one of the classes `kinds`, and no hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    is_changed = "forward" in vars(module) or any(vars(module)[name] for name in hooks)
    # Methods are compared instead of classes, because a subclass (a tensor-parallel layer) may inherit `forward`.
    return any(type(module).forward is kind.forward for kind in kinds) and not is_changed


def module_key(module: nn.Module) -> Hashable | None:
    """Returns a cache key for the shape and dtype of a plain module's result; None for other modules."""
    # Not by attribute: reading a sharded module's attribute would make its local part (`ShardedModule`).
    parameters = module._parameters  # pyright: ignore[reportPrivateUsage]
    children = module._modules  # pyright: ignore[reportPrivateUsage] - a parametrization, or a subclass's submodule
    if children or "weight" not in parameters or not plain(module, nn.Linear, nn.RMSNorm, nn.LayerNorm):
        return None
    plain_types = all(
        x is None or type(x) in (Tensor, nn.Parameter) or compat.is_dtensor(x) for x in parameters.values()
    )
    if not plain_types and not compat.fakes_tensors():  # a quantized weight, not a fake tensor of a simulated step
        return None
    return type(module), getattr(module, "normalized_shape", None), *map(tensor_key, parameters.values())


def tensor_key(x: Tensor | None) -> Hashable:
    """Returns shape, dtype and device of a tensor, and of a DTensor also its mesh and placements."""
    if x is None:
        return None
    placement = (x.device_mesh, x.placements) if compat.is_dtensor(x) else ()
    return x.shape, x.dtype, x.device, *placement


# -- gradients of some rows of a weight -------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadRows:
    """The rows of h of the H heads in a weight [H D, E] or a bias [H D]."""

    heads: tuple[int, ...]  # indices of the h heads
    dim: int  # D, rows per head

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the rows of the heads, [h D, ...]: a view if the heads are consecutive."""
        return select_heads(parameter.unflatten(0, (-1, self.dim)), self.heads, 0).flatten(0, 1)

    def add_to(self, total: Tensor, rows: Tensor) -> None:
        """Adds `rows` [h D, ...] to the heads' rows of `total` [H D, ...]."""
        update_heads(total.unflatten(0, (-1, self.dim)), self.heads, rows.unflatten(0, (-1, self.dim)), Tensor.add_, 0)

    def add_product(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Adds dy^T x to the heads' rows of `total` [H D, E], with dy [n, h D] and x [n, E]."""
        run, *more_runs = head_slices(self.heads)
        if more_runs or run.step != 1:
            self.add_to(total, product(dy, x, total.dtype))
            return
        # The heads are consecutive: one fused op.
        add_product(total[run.start * self.dim : run.stop * self.dim], dy, x)


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds dy^T x to `total`, whose dtype may be wider."""
    # `addmm` with `out_dtype` exists on CUDA only.
    if dy.dtype == total.dtype or not dy.is_cuda:
        total.addmm_(dy.T.to(total.dtype), x.to(total.dtype))
    else:  # tensor cores multiply in the narrow dtype and accumulate in the wide one, without a product in memory
        torch.addmm(total, dy.T, x, out_dtype=total.dtype, out=total)


def product(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns dy^T x in `dtype`, which may be wider than the dtype of dy and x."""
    if dy.dtype == dtype or not dy.is_cuda:
        return dy.T.to(dtype) @ x.to(dtype)
    return torch.mm(dy.T, x, out_dtype=dtype)


def collected_linear(x: Tensor, linear: nn.Linear, rows: HeadRows, totals: GradientSums) -> Tensor:
    """Computes the outputs [..., h D] of the heads `rows`. Backward adds gradients of weight and bias to `totals`."""
    # Not by attribute: reading a sharded module's attribute would make its local part (`ShardedModule`).
    weight, bias = (linear._parameters[name] for name in ("weight", "bias"))  # pyright: ignore[reportPrivateUsage]
    return cast(Tensor, cast(Any, CollectedLinear).apply(x, weight, bias, rows, totals))


class CollectedLinear(torch.autograd.Function):
    # Weight and bias are inputs, so that autograd runs backward even if x needs no gradient. Their gradient is None.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: HeadRows, totals: GradientSums
    ) -> Tensor:
        used_weight = rows.of(compat.local_part(weight.detach()))
        y = F.linear(x, used_weight, None if bias is None else rows.of(compat.local_part(bias.detach())))
        ctx.rows, ctx.totals, ctx.parameters = rows, totals, (weight, bias)
        ctx.save_for_backward(x, used_weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,), (x, used_weight) = grad_outputs, ctx.saved_tensors
        # Under autocast, forward ran in the dtype of dy, which may not be the weight's.
        dx = dy @ used_weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        weight, bias = map(ctx.totals.buffer, ctx.parameters)
        if weight is not None:
            ctx.rows.add_product(weight, dy.flatten(0, -2), x.flatten(0, -2).to(dy.dtype))
        if bias is not None:
            ctx.rows.add_to(bias, dy.flatten(0, -2).sum(0, dtype=bias.dtype))
        return dx, None, None, None, None
