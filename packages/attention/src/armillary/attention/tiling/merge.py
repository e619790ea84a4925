"""Sums of partial results: in float32 or wider, in place, and without NaN for rows that have seen no key yet."""

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
    """Rows of the batch, tokens and heads of a partial result; `ALL` for all of them."""

    rows: slice
    tokens: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Returns this part of x [B, T, H, ...]: x itself, or a view."""
        rows, tokens, heads = self
        if rows is ALL and (heads is ALL or (heads.start == 0 and heads.stop == x.shape[2])):
            return x if tokens is ALL else x.narrow(1, tokens.start, tokens.stop - tokens.start)
        return x[rows, tokens, heads]


EVERYTHING = TilePart(ALL, ALL, ALL)


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
        """Returns an empty accumulator for queries q [B, T, H, D] and values v [B, S, K, Dv]."""
        return cls((*q.shape[:3], v.shape[3]), q.dtype, q.device)

    def add(self, part: TilePart, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result: out [b, t, h, Dv] and lse [b, t, h] of `part`."""
        if self.out is None and out.shape == self.shape:  # the first result covers everything: keep it as it is
            self.out, self.lse = out, lse
            return
        total_out, total_lse = self.start()
        merge_(part.of(total_out), part.of(total_lse), out, lse)

    def add_tokens(self, tokens: TokenRanges, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result of all rows and heads for some tokens: out [B, t, H, Dv] and lse [B, t, H]."""
        if len(tokens.runs) == 1:
            (run,) = tokens.runs
            self.add(TilePart(ALL, slice(run.start, run.stop), ALL), out, lse)
            return
        total_out, total_lse = self.start()
        # Copies the tokens together, so that one merge replaces one per run.
        packed_out, packed_lse = tokens.take(total_out), tokens.take(total_lse)
        merge_(packed_out, packed_lse, out, lse)
        tokens.put(total_out, packed_out)
        tokens.put(total_lse, packed_lse)

    def start(self) -> tuple[Tensor, Tensor]:
        """Returns the accumulators in the accumulation dtype, created when first needed."""
        dtype = accumulation_dtype(self.dtype)
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=dtype, device=self.device)
            self.lse = torch.full(self.shape[:3], -torch.inf, dtype=dtype, device=self.device)
        if self.out.dtype != dtype:
            self.out = self.out.to(dtype)
        return self.out, self.lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns (out in the inputs' dtype, lse in the accumulation dtype)."""
        if self.out is None or self.lse is None:
            self.start()
        assert self.out is not None and self.lse is not None
        return self.out.to(self.dtype), self.lse


@dataclass
class Sum:
    """A gradient summed over tiles in the accumulation dtype."""

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
        """Returns the sum in the accumulation dtype."""
        if self.total is None:
            self.total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        elif self.total.dtype != self.dtype:
            self.total = self.total.to(self.dtype)
        return self.total

    def result(self) -> Tensor:
        """Returns the sum without a cast: a single gradient stays in the dtype of its kernel."""
        return self.value() if self.total is None else self.total
