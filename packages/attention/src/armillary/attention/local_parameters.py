"""Projections whose parameters are DTensors, computing with this rank's part of those as if they were plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode

from armillary.attention.projections import Projections


def with_local_parameters(projections: Projections, shared: frozenset[str]) -> Projections:
    """The projections, on local tensors alone; known token by token where they were.

    Args:
        shared: axes on whose ranks a copied parameter is used for different tokens or heads.
    """
    by_token = hasattr(projections, "of_tokens")  # a tracer cannot ask a Protocol
    return (TokensFromLocalParts if by_token else FromLocalParts)(projections, shared)


@dataclass(frozen=True)
class FromLocalParts:
    """Projections that are given local tensors, and in which any DTensor is taken for what this rank has of it."""

    whole: Any
    shared: frozenset[str]

    @property
    def heads(self) -> int:
        return self.whole.heads

    @property
    def key_heads(self) -> int:
        return self.whole.key_heads

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        with LocalParts(self.shared):
            return self.whole.q(x, heads)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        with LocalParts(self.shared):
            return self.whole.kv(x, heads)

    def parameters(self) -> Iterable[Tensor]:
        return self.whole.parameters()

    def made_of(self) -> Hashable | None:
        whole = self.whole.made_of() if hasattr(self.whole, "made_of") else None
        return None if whole is None else ("local parts", whole)


@dataclass(frozen=True)
class TokensFromLocalParts(FromLocalParts):
    """Likewise, of projections that can be had of some tokens alone."""

    def of_tokens(self, tokens: slice) -> Self:
        return replace(self, whole=self.whole.of_tokens(tokens))


class LocalParts(TorchFunctionMode):
    """Within it, a function of torch that is called with a DTensor gets this rank's part.

    The gradient of the part comes back as one of the DTensor: a share of a sum over those axes of `shared` on which the
    DTensor is copied. So nothing is sent, and no op need know DTensors; torch's own flatten no uneven shards, select no
    rows by number, and are traced by no graph.
    """

    def __init__(self, shared: frozenset[str]) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*self.local(args), **{name: self.local(value) for name, value in (kwargs or {}).items()})

    def local(self, value: Any) -> Any:
        """What a function is to be called with."""
        if isinstance(value, DTensor):
            names = value.device_mesh.mesh_dim_names or ()
            placed = zip(names, value.placements, strict=True)
            gradient = [Partial() if at in self.shared and its == Replicate() else its for at, its in placed]
            return value.to_local(grad_placements=gradient)
        if type(value) in (list, tuple):
            return type(value)(self.local(each) for each in value)
        return value
