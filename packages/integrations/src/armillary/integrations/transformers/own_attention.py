"""Attention that layers of transformers compute themselves, without its attention interface: Falcon, GPT-J, RemBERT.

`route_own_attention` runs the forward of such a layer under a mode in which the product of queries and keys is no
tensor but a `Scores`: a record of the scale, the mask and the dropout that forward applies to it. Its product with the
values is then our attention. A forward that does anything else with scores raises, such as one that adds a bias (ALiBi,
DeBERTa), so no layer attends to its shard alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from armillary.core.internal import compat
from armillary.integrations.transformers.mask_functions import ShardMask

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm"})

# Functions that let tokens see each other, or end in attention weights, without a `Scores`.
MIXES = frozenset({"softmax", "log_softmax", "einsum", "scaled_dot_product_attention", "multi_head_attention_forward"})

# Methods of `Scores` under other names of functions of tensors.
SYNONYMS = {
    "add": "__add__",
    "mul": "__mul__",
    "div": "__truediv__",
    "bmm": "matmul",
    "reshape": "view",
} | dict.fromkeys(("float", "type", "contiguous"), "to")


def can_be_routed(layer: nn.Module) -> bool:
    """Returns True if forward takes the mask of transformers' mask functions, and is that of the layer's class."""
    return "attention_mask" in signature(type(layer).forward).parameters and "forward" not in vars(layer)


def route_own_attention(layer: nn.Module) -> None:
    """Makes a layer with attention of its own attend by the method of the mask that it gets."""
    layer.forward = MethodType(_forward, layer)  # a copy of the layer binds it to itself


def is_routed(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "__func__", None) is _forward


@compat.never_traced  # a graph would have neither the mode nor the record
def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = OwnAttention(layer)
    with call:
        output = type(layer).forward(layer, *args, **kwargs)
    if not call.attends:
        raise call.error("multiplies no attention weights by values")
    return _without_scores(output)


class OwnAttention(TorchFunctionMode):
    """One forward of a layer: records products of queries and keys."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.attends = layer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if any(issubclass(x, Scores) for x in types):
            return func(*args, **kwargs)  # `Scores.__torch_function__`
        if name == "baddbmm":
            return self._product_and_bias(*args, **kwargs)
        # Products with weights have two dimensions at most.
        if name in PRODUCTS and all(isinstance(x, Tensor) and x.ndim > 2 for x in args[:2]):
            return self._product(*args[:2])
        if name in MIXES:
            raise self.error(f"calls {name} of something else than scores")
        return func(*args, **kwargs)

    def _product(self, query: Tensor, transposed_key: Tensor) -> Scores:
        leading = torch.broadcast_shapes(query.shape[:-2], transposed_key.shape[:-2])
        return Scores(self, query, transposed_key.transpose(-1, -2), leading)

    def _product_and_bias(
        self, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Scores:
        if beta and bool(input.any()):  # BLOOM's ALiBi; GPT-NeoX Japanese has zeros
            raise self.error("adds a bias to its scores")
        return self._product(batch1, batch2) * alpha

    def error(self, reason: str) -> ValueError:
        return ValueError(
            f"{type(self.layer).__name__} computes attention itself, and {reason}: only softmax(q kᵀ · scale + mask) v "
            "with a mask of transformers' mask functions can be sharded"
        )


@dataclass(frozen=True)
class Scores:
    """Products of queries [..., T, D] and keys [..., T, D], scaled and masked; `after_softmax`: their softmax."""

    call: OwnAttention
    query: Tensor
    key: Tensor
    leading: tuple[int, ...]  # dimensions before [T, T]
    scale: float = 1.0
    mask: ShardMask | None = None
    after_softmax: bool = False
    dropout_rate: float = 0.0

    def __getattr__(self, name: str) -> Any:
        if name not in SYNONYMS:
            raise self.call.error(f"computes with its scores ({name})")
        return getattr(self, SYNONYMS[name])

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = (y for x in args for y in (x if isinstance(x, (list, tuple)) else (x,)))
        scores = next(x for x in parts if isinstance(x, cls))
        if args[0] is not scores:  # where(mask, scores, ...), cat, a bias + scores
            scores.__getattr__(func.__name__)
        return getattr(scores, func.__name__)(*args[1:], **(kwargs or {}))

    # 1. Before softmax: the scale and the mask.

    def __mul__(self, factor: Any) -> Scores:
        # After the mask, a negative factor would show what is hidden.
        if self.after_softmax or not _is_number(factor) or not float(factor) > 0:
            raise self.call.error("multiplies its scores by other than one positive number")
        return replace(self, scale=self.scale * float(factor))

    def __truediv__(self, divisor: Any) -> Scores:
        return self * (1 / divisor if _is_number(divisor) else divisor)

    def __add__(self, mask: Any) -> Scores:
        if not isinstance(mask, ShardMask) or self.mask is not None or self.after_softmax:
            raise self.call.error(f"adds a {type(mask).__name__} to its scores")
        if len(self.leading) != 2 or self.leading[0] != mask.batch:
            raise self.call.error(f"has scores {tuple(self.shape)} of {mask.batch} rows")
        return replace(self, mask=mask)

    def max(self, other: Any = None, *_: Any, **__: Any) -> Scores:
        # Nothing is below the lowest number (XGLM).
        if self.after_softmax or not _is_number(other) or float(other) > torch.finfo(self.dtype).min:
            raise self.call.error("clamps its scores")
        return self

    def softmax(self, dim: int, *_: Any, **__: Any) -> Scores:
        if self.mask is None or self.after_softmax or dim not in (-1, len(self.leading) + 1):
            raise self.call.error(f"calls softmax of dim {dim} without a mask, or twice")
        return replace(self, after_softmax=True)

    # 2. After it: dropout, and the product with values.

    def dropout(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores:
        if not self.after_softmax:
            raise self.call.error("drops scores")
        return replace(self, dropout_rate=p if training else 0.0)

    def matmul(self, value: Tensor) -> Tensor:
        if self.mask is None or not self.after_softmax:
            raise self.call.error("multiplies scores without softmax")
        q, k, v = (x.reshape(self.mask.batch, -1, *x.shape[-2:]).to(value.dtype) for x in (self.query, self.key, value))
        out, _ = self.mask.attention(self.call.layer, q, k, v, self.mask, self.scale, self.dropout_rate)
        self.call.attends = True
        return out.transpose(1, 2).reshape(*self.leading, *out.shape[1::2])

    # 3. At any time: shapes and casts.

    def view(self, *shape: Any) -> Scores:
        new = torch.empty(self.shape, device="meta").view(*shape).shape
        if new[-2:] != self.shape[-2:]:
            raise self.call.error(f"views scores {tuple(self.shape)} as {tuple(new)}")
        return replace(self, leading=tuple(new[:-2]))

    def to(self, *_: Any, **__: Any) -> Scores:
        return self

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.leading, self.query.shape[-2], self.key.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.call.error("computes with its scores")

    __radd__, __rmul__, __matmul__ = __add__, __mul__, matmul
    __getitem__ = __neg__ = __abs__ = __sub__ = __rsub__ = __pow__ = __rtruediv__ = _refuse


def _is_number(x: Any) -> bool:
    """Returns True for a number, or a tensor of one, which is no parameter: that would lose its gradient."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad)


def _without_scores(output: Any) -> Any:
    """Returns a layer's output with None in the place of attention weights, as transformers' interface has it."""
    if isinstance(output, Scores):
        return None
    if type(output) is tuple:
        return tuple(map(_without_scores, output))
    return {name: _without_scores(x) for name, x in output.items()} if type(output) is dict else output
