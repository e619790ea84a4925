"""Memory layouts of tensors: the strides that users pass, and values that such strides can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, permutations
from random import Random

import torch
from torch import Tensor

from conformance.case import MEMORY, Case

TENSOR_LAYOUTS = tuple(kind for kind in MEMORY if kind not in ("packed", "mixed"))


@dataclass(frozen=True)
class Memory:
    """The memory layout of a tensor.

    Args:
        kind: one of `TENSOR_LAYOUTS`.
        order: dims of a "permuted" tensor, outermost in memory first.
        zero_stride_dims: dims of an "expanded" tensor that have stride 0.
        sliced_dim: the dim of a "sliced" tensor that has every other element of the buffer.
        offset: index of the first element of a "sliced" tensor in the buffer.
    """

    kind: str
    order: tuple[int, ...]
    zero_stride_dims: tuple[int, ...]
    sliced_dim: int
    offset: int

    @classmethod
    def of(cls, case: Case, name: str, ndim: int) -> Memory:
        """Returns the layout of one tensor of a case."""
        random = Random(f"{case.seed} {name}")
        kind = {"dout": case.gradient, "sinks": "plain"}.get(name, "plain" if name[0] == "w" else case.memory)
        kind = random.choice(TENSOR_LAYOUTS) if kind == "mixed" else "plain" if kind == "packed" else kind
        orders = [order for order in permutations(range(ndim)) if order[-1] != ndim - 1] or [(0,)]
        zero_strides = [(0,), (2,), (0, 2)] if ndim == 4 else [(0,)]
        zero_strides += [tuple(range(ndim))] if name == "dout" else []
        return cls(
            kind, random.choice(orders), random.choice(zero_strides), random.randrange(ndim), random.choice((1, 3))
        )

    def values(self, x: Tensor) -> Tensor:
        """Returns x with equal values along dims of stride 0."""
        for dim in self.zero_stride_dims if self.kind == "expanded" else ():
            x = x.narrow(dim, 0, 1).expand(x.shape)
        return x

    def strided_copy(self, x: Tensor) -> Tensor:
        """Returns a copy of x in this memory layout; a "sliced" one has NaN between its elements."""
        match self.kind:
            case "transposed":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "permuted":
                inverse = [self.order.index(dim) for dim in range(x.ndim)]
                return x.permute(self.order).clone(memory_format=torch.contiguous_format).permute(inverse)
            case "sliced":
                # A buffer of NaN, twice as long in one dim, of which the tensor is every other element.
                sizes = [2 * size if dim == self.sliced_dim else size for dim, size in enumerate(x.shape)]
                flat = x.new_full((self.offset + 2 * x.numel(),), torch.nan)
                view = flat[self.offset :].view(sizes)[(slice(None),) * self.sliced_dim + (slice(None, None, 2),)]
                return view.copy_(x)
            case "expanded":
                # Stores one element of each dim that has stride 0, and expands it.
                first = tuple(slice(0, 1) if dim in self.zero_stride_dims else slice(None) for dim in range(x.ndim))
                return x[first].clone(memory_format=torch.contiguous_format).expand(x.shape)
            case _:
                return x.clone(memory_format=torch.contiguous_format)


def lay_out(local: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Returns the tensors in the memory layouts of the case."""
    laid = {name: Memory.of(case, name, x.ndim).strided_copy(x) for name, x in local.items()}
    return laid | _packed(local) if case.memory == "packed" and not case.projected else laid


def _packed(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of q, k and v that have the keys' tokens, as slices of one tensor."""
    names = [name for name in "qkv" if local[name].shape[1] == local["k"].shape[1]]
    packed = torch.cat([local[name].flatten(2) for name in names], dim=-1)
    ends = list(accumulate(local[name].shape[2] * local[name].shape[3] for name in names))
    views = torch.tensor_split(packed, ends[:-1], dim=-1)
    return {name: x.unflatten(2, local[name].shape[2:]) for name, x in zip(names, views, strict=True)}
