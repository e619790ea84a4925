"""Memory layouts of tensors: the strides that users pass, and values that such strides can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, permutations
from random import Random

import torch
from torch import Tensor

from conformance.case import MEMORY, Case

ALONE = tuple(kind for kind in MEMORY if kind not in ("packed", "mixed"))


@dataclass(frozen=True)
class Memory:
    """The memory layout of a tensor.

    Args:
        kind: one of `ALONE`.
        order: of a permuted tensor: dims, outermost first.
        along: of an expanded tensor: dims of stride 0.
        every: of a sliced tensor: the dim with every other element of the buffer.
        offset: of a sliced tensor: index of the first element.
    """

    kind: str
    order: tuple[int, ...]
    along: tuple[int, ...]
    every: int
    offset: int

    @classmethod
    def of(cls, case: Case, name: str, ndim: int) -> Memory:
        """Returns the layout of one tensor of a case."""
        random = Random(f"{case.seed} {name}")
        kind = {"dout": case.gradient, "sinks": "plain"}.get(name, "plain" if name[0] == "w" else case.memory)
        kind = random.choice(ALONE) if kind == "mixed" else "plain" if kind == "packed" else kind
        orders = [order for order in permutations(range(ndim)) if order[-1] != ndim - 1] or [(0,)]
        along = [(0,), (2,), (0, 2)] if ndim == 4 else [(0,)]
        along += [tuple(range(ndim))] if name == "dout" else []
        return cls(kind, random.choice(orders), random.choice(along), random.randrange(ndim), random.choice((1, 3)))

    def values(self, x: Tensor) -> Tensor:
        """Returns x with equal values along dims of stride 0."""
        for dim in self.along if self.kind == "expanded" else ():
            x = x.narrow(dim, 0, 1).expand(x.shape)
        return x

    def laid(self, x: Tensor) -> Tensor:
        """Returns a copy of x in this layout, with NaN between its elements."""
        match self.kind:
            case "transposed":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "permuted":
                inverse = [self.order.index(dim) for dim in range(x.ndim)]
                return x.permute(self.order).clone(memory_format=torch.contiguous_format).permute(inverse)
            case "sliced":
                sizes = [2 * size if dim == self.every else size for dim, size in enumerate(x.shape)]
                flat = x.new_full((self.offset + 2 * x.numel(),), torch.nan)
                view = flat[self.offset :].view(sizes)[(slice(None),) * self.every + (slice(None, None, 2),)]
                return view.copy_(x)
            case "expanded":
                first = tuple(slice(0, 1) if dim in self.along else slice(None) for dim in range(x.ndim))
                return x[first].clone(memory_format=torch.contiguous_format).expand(x.shape)
            case _:
                return x.clone(memory_format=torch.contiguous_format)


def lay_out(local: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Returns the tensors in the memory layouts of the case."""
    laid = {name: Memory.of(case, name, x.ndim).laid(x) for name, x in local.items()}
    return laid | _packed(local) if case.memory == "packed" and not case.projected else laid


def _packed(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns q, k and v, if they have the same tokens, as slices of one tensor."""
    names = [name for name in "qkv" if local[name].shape[1] == local["k"].shape[1]]
    packed = torch.cat([local[name].flatten(2) for name in names], dim=-1)
    ends = list(accumulate(local[name].shape[2] * local[name].shape[3] for name in names))
    views = torch.tensor_split(packed, ends[:-1], dim=-1)
    return {name: x.unflatten(2, local[name].shape[2:]) for name, x in zip(names, views, strict=True)}
