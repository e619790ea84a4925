"""Projections without weights."""

from collections.abc import Sequence

from torch import Tensor


class Split:
    """Splits hidden states [B, T, `width`] into q, k and v."""

    def __init__(self, heads: int, key_heads: int, head_dim: int, value_dim: int | None = None) -> None:
        self.heads, self.key_heads = heads, key_heads
        self.dims = [heads * head_dim, key_heads * head_dim, key_heads * (value_dim or head_dim)]
        self.width = sum(self.dims)

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return self._column(x, 0, self.heads)[:, :, list(heads)]

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        k, v = (self._column(x, i, self.key_heads)[:, :, list(heads)] for i in (1, 2))
        return k, v

    def _column(self, x: Tensor, i: int, heads: int) -> Tensor:
        return x.split(self.dims, dim=-1)[i].unflatten(-1, (heads, -1))

    def parameters(self) -> list[Tensor]:
        return []
