"""What one attention call computes, apart from its tensors; what a caller may ask of it; what backward takes back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self, TypeVar, cast

from torch import Tensor

from armillary.attention.checks import check_options
from armillary.attention.kernels import Kernel, Scores
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.block import BlockAttention, head_runs, kernel_calls
from armillary.attention.tiling.grid import Grid, grid_of
from armillary.core import SequenceLayout
from armillary.core.token_ranges import TokenRanges

Known = TypeVar("Known")
LAYOUTS = (SequenceLayout, type(None))


class Saved(NamedTuple):
    """What a method's backward takes back: the tensors as its innermost loop saw them.

    q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out [B, T, H, Dv], lse [B, T, H] over all keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionOptions(NamedTuple):
    """What a caller asks of a call besides its tensors: the keyword arguments of `Method.__call__`."""

    mask: AttentionMask
    layout: SequenceLayout | None = None
    key_layout: SequenceLayout | None = None
    scale: float | None = None
    softcap: float | None = None
    kernel: str | Kernel | None = None
    return_lse: bool = False

    def checked(self) -> Self:
        """Itself, its types and numbers checked.

        Raises:
            ValueError: with what would do.
        """
        usual = type(self.mask) is AttentionMask and type(self.layout) in LAYOUTS and self.scale is self.softcap is None
        if not (usual and self.key_layout is None and type(self.return_lse) is bool):
            check_options(self.mask, self.layout, self.key_layout, self.scale, self.softcap, self.return_lse)
        return self


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One attention call, checked. The same on every rank of a method apart from `key_heads`.

    Calls that are alike share one, and with it all that is found from it once (`once`).

    Args:
        mask: in global positions.
        layout: of the queries over the sequence axis (one shard where there is none).
        key_layout: of the keys and values, with as many shards; the same as `layout`, but for cross-attention.
        scores: from dot products to scores.
        key_heads: for each query head at hand, the key/value head at hand that it uses.
        kernel: computes the tiles.
    """

    mask: AttentionMask
    layout: SequenceLayout
    key_layout: SequenceLayout
    scores: Scores
    key_heads: tuple[int, ...]
    kernel: Kernel
    _known: dict[Hashable, object] = field(default_factory=dict[Hashable, object], init=False, repr=False)

    @cached_property
    def grid(self) -> Grid:
        """What shards see of each other."""
        return grid_of(self.layout, self.key_layout, self.mask)

    def once(self, key: Hashable, find: Callable[[], Known]) -> Known:
        """What `find` returns, found once for each `key`."""
        known = self._known
        if key not in known:
            known[key] = find()
        return cast("Known", known[key])

    def with_heads(self, key_heads: tuple[int, ...]) -> AttentionSpec:
        """The call as a method inside sees it: these heads only."""
        return self.once(("heads", key_heads), lambda: replace(self, key_heads=key_heads))

    def block(
        self, query: int, key: int, queries: TokenRanges | None = None, keys: TokenRanges | None = None
    ) -> BlockAttention:
        """Shard `query` of the queries against shard `key` of the keys, or those tokens of them that are at hand."""
        where = (query, key, queries, keys)
        if (found := self._known.get(where)) is None:
            calls = kernel_calls(self.grid, self.kernel, head_runs(self.key_heads), *where)
            found = self._known[where] = BlockAttention(
                query, key, self.kernel, self.scores.turned, self.scores.turn, tuple(calls)
            )
        return cast(BlockAttention, found)


@lru_cache(maxsize=256)
def key_heads_of(heads: int, key_heads: int) -> tuple[int, ...]:
    """For each query head, its key/value head: h // (H / K)."""
    return tuple(h * key_heads // heads for h in range(heads))
