"""Projections with DTensor parameters, computed with the local parts of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode

from armillary.attention.call.projections import Projections
from armillary.core.parts import compat


def with_local_parameters(projections: Projections, sharding_axes: frozenset[str]) -> Projections:
    """Returns the projections on local tensors; `TokenProjections` if the originals are.

    Args:
        sharding_axes: mesh axes whose ranks have different rows, tokens or heads.
    """
    by_token = hasattr(projections, "of_tokens")  # isinstance of a Protocol cannot be traced
    return (LocalTokenProjections if by_token else LocalProjections)(projections, sharding_axes)


@dataclass(frozen=True)
class LocalProjections:
    """Projections of local tensors, which use the local part of each DTensor parameter."""

    original: Any
    sharding_axes: frozenset[str]

    @property
    def heads(self) -> int:
        return self.original.heads

    @property
    def key_heads(self) -> int:
        return self.original.key_heads

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        with LocalPartsMode(self.sharding_axes):
            return self.original.q(x, heads)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        with LocalPartsMode(self.sharding_axes):
            return self.original.kv(x, heads)

    def parameters(self) -> Iterable[Tensor]:
        return self.original.parameters()

    def cache_key(self) -> Hashable | None:
        cache_key = self.original.cache_key() if hasattr(self.original, "cache_key") else None
        return None if cache_key is None else ("local parts", cache_key)


@dataclass(frozen=True)
class LocalTokenProjections(LocalProjections):
    """`LocalProjections` of `TokenProjections`."""

    def of_tokens(self, tokens: slice) -> Self:
        return replace(self, original=self.original.of_tokens(tokens))


class LocalPartsMode(TorchFunctionMode):
    """Passes the local part of each DTensor argument to torch's functions.

    The gradient of the local part becomes the gradient of the DTensor, `Partial` on those of `sharding_axes` on which
    the DTensor is replicated. This needs no communication. DTensor's own sharding rules are not used, because they do
    not flatten uneven shards or index rows, and cannot be traced.
    """

    def __init__(self, sharding_axes: frozenset[str]) -> None:
        super().__init__()
        self.sharding_axes = sharding_axes

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*self.local(args), **{name: self.local(value) for name, value in (kwargs or {}).items()})

    def local(self, value: Any) -> Any:
        """Returns an argument with each DTensor in it replaced by its local part."""
        if isinstance(value, DTensor):
            # Ranks that use a replicated parameter for different rows, tokens or heads have a share of its gradient.
            names = value.device_mesh.mesh_dim_names or ()
            gradient = [
                Partial() if name in self.sharding_axes and placement == Replicate() else placement
                for name, placement in zip(names, value.placements, strict=True)
            ]
            return compat.to_local(value, gradient)
        if type(value) in (list, tuple):
            return type(value)(self.local(item) for item in value)
        return value
