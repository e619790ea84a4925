"""Accumulators of partial results and of gradients. They add in place, in float32 or wider."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core import TokenRanges, accumulation_dtype, merge_, to_device

WHOLE_DIM = slice(None)
MAX_CHUNKS = 16
"""Largest number of chunks in which a packed result is merged."""
MIN_CHUNK = 512
"""Smallest number of tokens of such a chunk, except the last."""


class TilePart(NamedTuple):
    """Some rows of the batch, tokens and heads of a tensor [B, T, H, ...]. `WHOLE_DIM` selects a whole dim."""

    rows: slice
    tokens: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Returns this part of x [B, T, H, ...]: a view, or x itself."""
        rows, tokens, heads = self
        if rows is WHOLE_DIM and (heads is WHOLE_DIM or (heads.start == 0 and heads.stop == x.shape[2])):
            return x if tokens is WHOLE_DIM else x.narrow(1, tokens.start, tokens.stop - tokens.start)
        return x[rows, tokens, heads]

    def ranges(self, batch: int, tokens: int) -> tuple[range, range]:
        """Returns the rows and the tokens of this part of a tensor with `batch` rows of `tokens` tokens."""
        return range(*self.rows.indices(batch)), range(*self.tokens.indices(tokens))


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """n different tokens of a tensor [B, T, H, ...], in any rows and in any order, which are packed as [n, h, ...].

    Args:
        index: int64 [n], the index of each token in the concatenated rows of the batch: row * T + token.
        heads: the h heads, as in `TilePart`.
    """

    index: Tensor
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Returns a copy [n, h, ...] of these tokens of x [B, T, H, ...]."""
        return x.flatten(0, 1)[:, self.heads].index_select(0, self.index)

    def to(self, device: torch.device) -> PackedTokens:
        """Returns these tokens with the index on `device`."""
        return PackedTokens(to_device(self.index, device), self.heads)

    def chunks(self) -> Iterator[tuple[PackedTokens, slice]]:
        """Yields these tokens in up to `MAX_CHUNKS` chunks, each with its slice of the packed dim."""
        tokens = len(self.index)
        size = max(MIN_CHUNK, -(-tokens // MAX_CHUNKS))
        for start in range(0, tokens, size):
            chunk = slice(start, min(start + size, tokens))
            yield PackedTokens(self.index[chunk], self.heads), chunk

    def put(self, x: Tensor, packed: Tensor) -> None:
        """Writes packed values [n, h, ...] to these tokens of x [B, T, H, ...], which must be contiguous."""
        x.view(-1, *x.shape[2:])[:, self.heads].index_copy_(0, self.index, packed)


EVERYTHING = TilePart(WHOLE_DIM, WHOLE_DIM, WHOLE_DIM)


@dataclass
class Merge:
    """Accumulates attention over disjoint sets of keys. Results a and b are merged by their log-sum-exp:

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    A query that has seen no key yet has lse = -inf and out = 0.

    Args:
        shape: [B, T, H, Dv], of out.
        dtype: dtype of the result. The accumulator itself has the accumulation dtype.
        out, lse: the merged results so far; None before the first one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    out: Tensor | None = None
    lse: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, value_dim: int) -> Merge:
        """Returns an empty accumulator for queries q [B, T, H, D] and values of head dim Dv."""
        return cls((*q.shape[:3], value_dim), q.dtype, q.device)

    def add(self, part: TilePart | PackedTokens, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result: out [b, t, h, Dv] and lse [b, t, h], or out [n, h, Dv] and lse [n, h] if packed."""
        if isinstance(part, PackedTokens):
            self.out, self.lse = total_out, total_lse = [x.contiguous() for x in self.totals()]
            # In chunks, because a copy of all tokens at once would be as large as the accumulator.
            for tokens, chunk in part.chunks():
                packed_out, packed_lse = tokens.of(total_out), tokens.of(total_lse)
                merge_(packed_out, packed_lse, out[chunk], lse[chunk])
                tokens.put(total_out, packed_out)
                tokens.put(total_lse, packed_lse)
            return
        if self.out is None and out.shape == self.shape:
            # A first result of all queries becomes the accumulator, without a copy and in its own dtype. `totals`
            # widens it only if a second result comes.
            self.out, self.lse = out, lse
            return
        total_out, total_lse = self.totals()
        merge_(part.of(total_out), part.of(total_lse), out, lse)

    def add_tokens(self, tokens: TokenRanges, out: Tensor, lse: Tensor) -> None:
        """Merges a partial result for t tokens of all rows and heads: out [B, t, H, Dv] and lse [B, t, H]."""
        if len(tokens.runs) == 1:
            (run,) = tokens.runs
            self.add(TilePart(WHOLE_DIM, slice(run.start, run.stop), WHOLE_DIM), out, lse)
            return
        total_out, total_lse = self.totals()
        # Copies the runs into one tensor, so that there is one merge instead of one per run.
        packed_out, packed_lse = tokens.take(total_out), tokens.take(total_lse)
        merge_(packed_out, packed_lse, out, lse)
        tokens.put(total_out, packed_out)
        tokens.put(total_lse, packed_lse)

    def totals(self) -> tuple[Tensor, Tensor]:
        """Returns the accumulators (out, lse) in the accumulation dtype, to be updated in place.

        Before the first result they are 0 and -inf.
        """
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
            self.totals()
        assert self.out is not None and self.lse is not None
        return self.out.to(self.dtype), self.lse


@dataclass
class Sum:
    """Sums a gradient over kernel calls, in the accumulation dtype.

    Args:
        shape, dtype: of the sum.
        total: the sum so far; None before the first gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    total: Tensor | None = None

    @classmethod
    def like(cls, x: Tensor) -> Sum:
        """Returns an empty sum of gradients of x."""
        return cls(tuple(x.shape), accumulation_dtype(x.dtype), x.device)

    def add(self, part: TilePart | PackedTokens, gradient: Tensor) -> None:
        """Adds the gradient [b, t, h, D] of a part, or [n, h, D] of packed tokens."""
        if isinstance(part, PackedTokens):
            self.total = self.value().contiguous()
            part.put(self.total, part.of(self.total).add_(gradient))
            return
        if self.total is None and gradient.shape == self.shape:  # as in `Merge.add`: no copy of a first gradient
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
        """Returns the sum without a cast: if only one gradient was added, it is in the dtype of its kernel."""
        return self.value() if self.total is None else self.total
