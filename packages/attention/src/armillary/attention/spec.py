"""What one attention call computes, apart from its tensors; and the contract of a method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from armillary.attention.kernels import Kernel, Scores
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.grid import Grid, grid_of
from armillary.core import SequenceLayout


class Saved(NamedTuple):
    """What a method's backward takes back: the tensors as its innermost walk saw them.

    q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out [B, T, H, Dv], lse [B, T, H] over all keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Call:
    """One attention call. Hashable, and the same on every rank of a method apart from `key_heads`.

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

    @property
    def grid(self) -> Grid:
        """What shards see of each other."""
        return grid_of(self.layout, self.key_layout, self.mask)


class HeadRun(NamedTuple):
    """Query heads q0..q1 over key/value heads k0..k1, the same number of query heads for each key/value head."""

    q0: int
    q1: int
    k0: int
    k1: int


@lru_cache(maxsize=256)
def head_runs(key_heads: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """The fewest runs of equal groups, one kernel call each. A kernel shares heads evenly; a rank's may be uneven."""
    runs: list[HeadRun] = []
    for key_head in sorted(set(key_heads)):
        q0 = key_heads.index(key_head)
        q1 = q0 + key_heads.count(key_head)
        if runs and _group(runs[-1]) == q1 - q0:
            runs[-1] = HeadRun(runs[-1].q0, q1, runs[-1].k0, key_head + 1)
        else:
            runs.append(HeadRun(q0, q1, key_head, key_head + 1))
    return tuple(runs)


def _group(run: HeadRun) -> int:
    return (run.q1 - run.q0) // (run.k1 - run.k0)
