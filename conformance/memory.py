"""How a tensor lies in memory: strides that users come with, and values that such strides allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, permutations
from random import Random

import torch
from torch import Tensor

from conformance.case import MEMORY, Case

ALONE = tuple(how for how in MEMORY if how not in ("packed", "mixed"))


@dataclass(frozen=True)
class Memory:
    """One way for a tensor to lie.

    Args:
        how: one of `ALONE`.
        order: of dims, outermost first; where it is permuted.
        along: dims of stride 0, where it is expanded.
        every: the dim of which only every other element is taken, where it is sliced.
        offset: of the first element, likewise.
    """

    how: str
    order: tuple[int, ...]
    along: tuple[int, ...]
    every: int
    offset: int

    @classmethod
    def of(cls, case: Case, name: str, ndim: int) -> Memory:
        """Of one tensor of a case: a pure function of both."""
        random = Random(f"{case.seed} {name}")
        how = {"dout": case.gradient, "sinks": "plain"}.get(name, "plain" if name[0] == "w" else case.memory)
        how = random.choice(ALONE) if how == "mixed" else "plain" if how == "packed" else how
        orders = [order for order in permutations(range(ndim)) if order[-1] != ndim - 1] or [(0,)]
        along = [(0,), (2,), (0, 2)] if ndim == 4 else [(0,)]
        along += [tuple(range(ndim))] if name == "dout" else []
        return cls(how, random.choice(orders), random.choice(along), random.randrange(ndim), random.choice((1, 3)))

    def values(self, x: Tensor) -> Tensor:
        """x, but the same all along dims of stride 0."""
        for dim in self.along if self.how == "expanded" else ():
            x = x.narrow(dim, 0, 1).expand(x.shape)
        return x

    def laid(self, x: Tensor) -> Tensor:
        """The values of x in memory of their own, and NaN in what lies between them."""
        match self.how:
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
    """The same values in the memory that the case asks for."""
    laid = {name: Memory.of(case, name, x.ndim).laid(x) for name, x in local.items()}
    return laid | _packed(local) if case.memory == "packed" and not case.projected else laid


def _packed(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v, as far as they have the same tokens, as slices of one tensor."""
    together = [name for name in "qkv" if local[name].shape[1] == local["k"].shape[1]]
    packed = torch.cat([local[name].flatten(2) for name in together], dim=-1)
    ends = list(accumulate(local[name].shape[2] * local[name].shape[3] for name in together))
    views = torch.tensor_split(packed, ends[:-1], dim=-1)
    return {name: x.unflatten(2, local[name].shape[2:]) for name, x in zip(together, views, strict=True)}
