"""The kernel interface: a tile of a block, the call that computes it, and packs of small tiles in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from armillary.attention.kernels.inputs import Inputs, Limits
from armillary.attention.mask import Window
from armillary.core import to_device
from armillary.core.internal import compat, count_pairs, number, slice_array

ALIGNMENT = 8
"""Number of 16-bit elements in 16 bytes, the unit of a GPU load. Rows must start at multiples of this number."""

BackwardTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dout, q, k, v, out, lse)."""


class Tile(NamedTuple):
    """The work of one kernel call: rows (queries) q0 .. q1 - 1, columns (keys) k0 .. k1 - 1, and a visible band.

    Row a sees column b iff low <= b - a <= high. Indices are local to the shards of queries and keys. None is no bound.
    A trimmed tile (`trim`) is canonical: every row and column has a visible pair, and a bound that excludes no pair is
    None.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None = None
    high: int | None = None

    @property
    def offsets(self) -> Window:
        """(low, high) if rows are counted from q0 and columns from k0."""
        shift = self.k0 - self.q0
        return None if self.low is None else self.low - shift, None if self.high is None else self.high - shift

    @property
    def area(self) -> int:
        return count_pairs(slice_array([self]))

    def rows(self, start: int, stop: int) -> Tile | None:
        """Returns the part in rows start .. stop - 1, trimmed; None if it has no visible pair."""
        return self._replace(q0=max(self.q0, start), q1=min(self.q1, stop)).trim()

    def columns(self, start: int, stop: int) -> Tile | None:
        """Returns the part in columns start .. stop - 1, trimmed; None if it has no visible pair."""
        return self._replace(k0=max(self.k0, start), k1=min(self.k1, stop)).trim()

    def trim(self) -> Tile | None:
        """Returns the canonical tile with the same visible pairs; None if there are none."""
        q0, q1, k0, k1, low, high = self
        if low is not None and high is not None and low > high:
            return None
        # Drops rows that see no column: row a sees a + low .. a + high. Then drops columns that no remaining row sees.
        q0, q1 = q0 if high is None else max(q0, k0 - high), q1 if low is None else min(q1, k1 - low)
        k0, k1 = k0 if low is None else max(k0, q0 + low), k1 if high is None else min(k1, q1 + high)
        if q0 >= q1 or k0 >= k1:
            return None
        # A bound binds only if it hides a corner: the last row's first column, or the first row's last column.
        low = None if low is None or low <= k0 - (q1 - 1) else low
        high = None if high is None or high >= (k1 - 1) - q0 else high
        return Tile(q0, q1, k0, k1, low, high)


# -- one tile in one call ---------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Scale and softcap of scores: s = scale * q k, and with a softcap c, c * tanh(s / c).

    Kernels take positive scales only, because they find the largest score before they scale it, and hide keys with
    -inf. For other scales the caller multiplies q by `sign`, calls the kernel with `with_positive_scale`, and
    multiplies dq by `sign`.
    """

    scale: float
    softcap: float | None = None

    @property
    def sign(self) -> int:
        return (self.scale > 0) - (self.scale < 0)

    @property
    def with_positive_scale(self) -> Scores:
        """Gives q times `sign` the scores that `self` gives q."""
        return self if self.scale > 0 else self._replace(scale=abs(self.scale) or 1.0)


class Kernel(Protocol):
    """Attention of one tile, without dropout. Stateless. Query head h uses key/value head h // (H / K).

    Shapes: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out and dout [B, T, H, Dv], lse [B, T, H] in the
    accumulation dtype (float32, or float64 for float64). The caller guarantees that every query sees at least one key,
    that tensors have `contiguous_rows`, and that the scale is positive.

    A subclass must define `name`, `cut`, `forward` and `backward`.
    """

    name: str
    """Value of the argument `kernel` of a call that selects this kernel."""
    limits: ClassVar[Limits] = Limits()
    """The inputs that the kernel supports; by default all without softcap."""

    def refuses(self, inputs: Inputs) -> str | None:
        """Returns the reason why the kernel does not support these inputs, or None. By default by `limits`."""
        return self.limits.refuses(inputs)

    def drawback(self, inputs: Inputs) -> str | None:
        """Returns the reason to prefer every other kernel that supports these inputs, or None."""
        return None

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        """Cuts a tile into pieces, one for each kernel call. A kernel that supports any band returns the whole tile."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of one piece. Query a sees key b iff band[0] <= b - a <= band[1]; None is no bound."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the piece's share of (dq, dk, dv). `out` and `lse` are over *all* keys, not only the piece's."""
        ...


def check_softcap(softcap: float | None) -> None:
    if softcap is not None and not number("softcap", softcap, ", or None for no cap") > 0:
        raise ValueError(f"softcap {softcap} must be above 0, or None for no cap")


def contiguous_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """Returns x [..., D] with contiguous rows of D elements that do not overlap, copied if need be.

    Args:
        multiple: also copies unless every row starts at a multiple of this number of elements.
    """
    # Kernels allocate results with the strides of their inputs, so these need such rows.
    *outer, last = x.stride()
    rows_apart = last == 1 and min(outer) >= x.shape[-1]  # an expanded dim has stride 0
    if rows_apart and (multiple == 1 or not any(start % multiple for start in (x.storage_offset(), *outer))):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def pad_head_dims(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors [..., D] of one head dim, the largest. Zeros change no score, no output and no gradient."""
    dim = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])) for x in tensors]


# -- many small tiles in one call -------------------------------------------------------------------------------------
#
# Documents make many small tiles, none of which keeps a GPU busy: the overhead of a call is larger than its
# computation. Large tiles are not packed: they keep it busy already, and packing copies their tokens.

MIN_SINGLE_TOKENS = 4096
"""A piece with this many queries or keys, over all its rows, is not packed."""
MAX_PACKED_TOKENS = 65536
"""A pack with this many tokens takes no more pieces, which bounds the memory of the copies."""


class Lengths(NamedTuple):
    """Lengths of n packed sequences: boundaries (cu_seqlens), int32 [n + 1], and the largest lengths."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int

    @property
    def by_name(self) -> dict[str, Tensor | int]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return dict(zip(names, self, strict=True))


class Sequences(NamedTuple):
    """The packed sequences of a kernel call. A sequence is one row of the batch of one piece.

    The order is piece after piece, and within a piece row after row.

    Args:
        queries, keys: number of queries and keys of each sequence.
        band: band of the first piece. Other bands may differ, but all pieces have the same `PackingKernel.pack_key`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    band: Window

    def lengths(self, device: torch.device) -> Lengths:
        """Returns the lengths on a device. Cached, so that layers and backward do not copy them again."""
        # A fake tensor belongs to its mode and must not outlive it.
        boundaries = _copy_boundaries if compat.fakes_tensors() else _cached_boundaries
        longest = max(self.queries, default=0), max(self.keys, default=0)
        return Lengths(boundaries(self.queries, device), boundaries(self.keys, device), *longest)


def _copy_boundaries(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


_cached_boundaries = lru_cache(maxsize=256)(_copy_boundaries)


class PackingKernel(Kernel):
    """A kernel that computes several small pieces in one call."""

    @abstractmethod
    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        """Returns a key that is equal for pieces that one call can compute; None if a piece is not packed."""

    @abstractmethod
    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Computes `forward` of several pieces, whose tokens are packed on dim 0.

        Shapes: q [queries, H, D], k [keys, K, D], v [keys, K, Dv], out [queries, H, Dv], lse [queries, H].
        """

    @abstractmethod
    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes `backward` of several pieces, packed as in `forward_packed`."""


class Batched(PackingKernel):
    """Base of kernels without variable lengths: small pieces of one shape and band are rows of a batch."""

    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        return queries, keys, band

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _rows(sequences.queries, q)[0], *_rows(sequences.keys, k, v)
        out, lse = self.forward(q, k, v, sequences.band, scores)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        dout, q, out, lse = _rows(sequences.queries, dout, q, out, lse)
        k, v = _rows(sequences.keys, k, v)
        dq, dk, dv = self.backward(dout, q, k, v, out, lse, sequences.band, scores)
        return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)


def _rows(lengths: tuple[int, ...], *packed: Tensor) -> list[Tensor]:
    """[n t, ...] -> [n, t, ...] for packed tensors of n sequences of t tokens."""
    return [x.unflatten(0, (len(lengths), lengths[0])) for x in packed]
