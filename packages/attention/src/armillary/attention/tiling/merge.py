"""Adding up partial results: in float32 at least, in place, and without NaN where nobody has contributed yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.merge import merge_
from armillary.core.token_ranges import TokenRanges

ALL = slice(None)


class TilePart(NamedTuple):
    """Rows of the batch, tokens and heads that a partial result is about; `ALL` where it is about all of them."""

    rows: slice
    tokens: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """The part of x [B, T, H, ..]: x itself where that is all of it, else a view."""
        rows, tokens, heads = self
        if rows is ALL and (heads is ALL or (heads.start == 0 and heads.stop == x.shape[2])):
            return x if tokens is ALL else x.narrow(1, tokens.start, tokens.stop - tokens.start)
        return x[rows, tokens, heads]


@dataclass
class Merge:
    """Attention over disjoint sets of keys, merged by their log-sum-exp.

    A row that has seen no key has lse = -inf and out = 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    out: Tensor | None = None
    lse: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> Merge:
        """Nothing yet, for these queries [B, T, H, D] and values [B, S, K, Dv]."""
        return cls((*q.shape[:3], v.shape[3]), q.dtype, q.device)

    def add(self, part: TilePart, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result: out [b, t, h, Dv] and lse [b, t, h] of `part`."""
        if self.out is None and out.shape == self.shape:
            self.out, self.lse = out, lse
            return
        whole_out, whole_lse = self.start()
        merge_(part.of(whole_out), part.of(whole_lse), out, lse)

    def add_tokens(self, tokens: TokenRanges, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result of all rows and heads for some tokens: out [B, t, H, Dv] and lse [B, t, H]."""
        if len(tokens.runs) == 1:
            (run,) = tokens.runs
            self.add(TilePart(ALL, slice(run.start, run.stop), ALL), out, lse)
            return
        whole = self.start()
        parts = tokens.take(whole[0]), tokens.take(whole[1])  # copies: one merge, not one a run
        merge_(*parts, out, lse)
        for x, part in zip(whole, parts, strict=True):
            tokens.put(x, part)

    def start(self) -> tuple[Tensor, Tensor]:
        """The accumulators, in the accumulation dtype, made when they are first needed."""
        dtype = accumulation_dtype(self.dtype)
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=dtype, device=self.device)
            self.lse = torch.full(self.shape[:3], -torch.inf, dtype=dtype, device=self.device)
        if self.out.dtype != dtype:
            self.out = self.out.to(dtype)
        return self.out, self.lse

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the inputs' dtype, lse in the accumulation dtype)."""
        if self.out is None or self.lse is None:
            self.start()
        assert self.out is not None and self.lse is not None
        return self.out.to(self.dtype), self.lse


@dataclass
class Sum:
    """A gradient summed over tiles, in the accumulation dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    total: Tensor | None = None

    @classmethod
    def like(cls, x: Tensor) -> Sum:
        return cls(tuple(x.shape), accumulation_dtype(x.dtype), x.device)

    def add(self, part: TilePart, gradient: Tensor) -> None:
        if self.total is None and gradient.shape == self.shape:
            self.total = gradient
            return
        part.of(self.value()).add_(gradient)

    def value(self) -> Tensor:
        """The sum in the accumulation dtype."""
        if self.total is None:
            self.total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        elif self.total.dtype != self.dtype:
            self.total = self.total.to(self.dtype)
        return self.total

    def result(self) -> Tensor:
        """The sum as it is: in a kernel's own dtype, if there was nothing to add up."""
        return self.value() if self.total is None else self.total
