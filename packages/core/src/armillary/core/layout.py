"""Sequence layouts: the global positions of each shard of a sequence.

The loader, RoPE, the labels and attention read one immutable `SequenceLayout`, so their positions always agree. It has
constructors for contiguous, zigzag, striped and balanced partitions, and accepts any other partition as spans.
`attention_balance` and `attention_traffic` judge a layout under a mask.

Sources: zigzag as in USP (arXiv 2405.07719, algorithm 2), striped as in Striped Attention (arXiv 2311.09431).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from armillary.core.argument_checks import check_bool, check_choice, check_dim, integer, number
from armillary.core.balance import SEND_COST, STATE_TOKENS, balanced_spans
from armillary.core.layout_cost import PositionRuns, RingShares, token_hops
from armillary.core.slices import Integers, Sliced, Slices, mask_slices, mirror
from armillary.core.spans import MAX_POSITION, Spans, cut, cut_spans, join_spans, missing_position, span_text

Side = Literal["queries", "keys", "both"]
SIDES: dict[str, tuple[int, ...]] = {"queries": (0,), "keys": (1,), "both": (0, 1)}
"""For each `balanced_by`, the counts of pairs that are balanced (`RingShares.pairs_before`): 0 by query, 1 by key."""


class SequenceLayout:
    """A partition of positions 0..length-1 over shards, as the spans of each shard in local order.

    Args:
        spans: for each shard, its ranges of positions (step >= 1) in local order. Together they must cover every
            position once, and no shard may be empty. A span that continues the previous one is joined to it.

    Raises:
        ValueError: missing or repeated positions, no shard or an empty one, a step below 1, spans that are not ranges,
            a position above 2^63 - 1.
    """

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    __slots__ = ("_encoded", "ends", "length", "sizes", "spans_by_shard", "text")

    spans_by_shard: tuple[Spans, ...]
    """The spans of each shard, in local order."""
    sizes: tuple[int, ...]
    """Number of tokens of each shard."""
    ends: tuple[int, ...]
    """0, then the number of tokens of the shards up to and including each shard."""
    length: int
    """Number of tokens of the sequence, N."""
    text: str
    """The layout as a string, such as "0:2,6:8;2:6", for `read` and for keys of compiled graphs."""

    def __init__(self, spans: Iterable[Iterable[range]]) -> None:
        try:  # `join_spans` checks that the elements are ranges
            shards = [list(shard) for shard in spans]
        except TypeError:
            raise ValueError(
                f"spans {spans!r}: give a list of ranges for each shard, [[range(0, 8)], [range(8, 16)]]"
            ) from None
        self.spans_by_shard = tuple(join_spans(shard) for shard in shards)
        self.sizes = tuple(sum(map(len, shard)) for shard in self.spans_by_shard)
        self.ends = (0, *accumulate(self.sizes))
        self.length = self.ends[-1]
        self._check()
        self.text = ";".join(",".join(map(span_text, shard)) for shard in self.spans_by_shard)
        numbers: list[int] = []
        for shard in self.spans_by_shard:
            numbers += [len(shard), *chain.from_iterable((span.start, span.stop, span.step) for span in shard)]
        self._encoded = np.array(numbers, dtype=np.int64)  # not np.fromiter: dynamo traces layouts made in a graph

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SequenceLayout) and self.spans_by_shard == other.spans_by_shard)

    def __hash__(self) -> int:
        # Every attention call looks up caches by layout, and a layout may have thousands of spans. Python hashes a
        # string once. Nothing is hashed in `__init__`, at which dynamo before torch 2.13 would break a graph.
        return hash(self.text)

    def _check(self) -> None:
        # Together the spans must start at 0 and have no gap. `missing_position` also refuses repeated positions.
        if not self.spans_by_shard:
            raise ValueError("a layout needs at least one shard; got none")
        if 0 in self.sizes:
            empty = self.sizes.index(0)
            raise ValueError(f"shard {empty} of {self.shards} has no positions; every shard needs at least one")
        all_spans = [span for spans in self.spans_by_shard for span in spans]
        first = min(span[0] for span in all_spans)
        if first != 0:
            raise ValueError(f"positions must start at 0; the smallest one here is {first}")
        if (gap := missing_position(all_spans)) is not None:
            raise ValueError(f"no shard has position {gap} of {max(span[-1] for span in all_spans) + 1}")

    def __repr__(self) -> str:
        shards = "; ".join(", ".join(map(span_text, spans)) for spans in self.spans_by_shard[:8])
        return f"SequenceLayout(length={self.length}, shards={self.shards}: {shards}{'; ...' * (self.shards > 8)})"

    # -- constructors, which raise ValueError if a shard would be empty -----------------------------------------------

    @classmethod
    def contiguous(cls, length: int, shards: int) -> SequenceLayout:
        """Shard r holds chunk r of `shards` chunks. Sizes differ by at most one, larger ones first."""
        length, shards = _check_sizes(length, shards)
        return cls([[chunk] for chunk in cut(range(length), shards)])

    @classmethod
    def zigzag(cls, length: int, shards: int) -> SequenceLayout:
        """Shard r holds chunks r and 2 * shards - 1 - r of 2 * shards chunks: equal work under a causal mask.

        Sizes differ by at most one.
        """
        length, shards = _check_sizes(length, shards)
        chunks = cut(range(length), 2 * shards)
        return cls([[chunks[r], chunks[-1 - r]] for r in range(shards)])

    @classmethod
    def striped(cls, length: int, shards: int, stripe: int = 1) -> SequenceLayout:
        """Shard (p // stripe) % shards holds position p. Sizes differ by at most `stripe`."""
        if (stripe := integer("stripe", stripe)) < 1:
            raise ValueError(f"stripe must be at least 1; got {stripe}")
        length, shards = _check_sizes(length, shards)
        if stripe == 1:
            return cls([[range(r, length, shards)] for r in range(shards)])
        # The first position of each stripe, by shard. The last stripe of the sequence may be shorter than the others.
        starts = [range(r * stripe, length, shards * stripe) for r in range(shards)]
        return cls([[range(s, min(s + stripe, length)) for s in shard] for shard in starts])

    @classmethod
    def balanced(
        cls,
        length: int,
        shards: int,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        mask: Sliced | None = None,
        send_cost: float | None = None,
        balanced_by: Side = "queries",
        states: bool = False,
    ) -> SequenceLayout:
        """Returns a layout that balances attention work under a mask and sends few bytes around a ring.

        Most documents that fit on a shard are not cut; longer ones are cut over few consecutive shards. No shard has
        more than 1.10 times the mean number of tokens, or of the (query, key) pairs that `balanced_by` counts; if no
        layout is found that is that even, the limit widens in steps of 0.05. The result sends at most as many bytes as
        zigzag, contiguous, or a layout that cuts no document, if these are as even.

        Where zigzag is less even, the result sends at most 1.5 times as many bytes, with this exception: if no layout
        within the limit is found that sends so few, balance must be worth its bytes. Then the result is the layout of
        least cost, and token-hops (`attention_traffic`) are at most those of zigzag plus
        shards * (pairs of zigzag's most loaded shard - those of the result's) / `send_cost`; it may be less even. No
        factor alone bounds them, since zigzag may send nothing: of documents [0, 8, 24, 32] on 2 ranks it cuts none,
        but one rank has two thirds of the pairs.

        With `send_cost=0` bytes are ignored: sizes differ by at most one token, and pairs, counted both by queries and
        by keys, are within 1.02 times the mean if possible.

        Args:
            window: (left, right), each None or at least 0, as in an attention mask.
            documents: boundaries 0, end of the first, ..., `length`; or one list of boundaries per batch row, and the
                sum over the rows is balanced.
            mask: any other attention mask, instead of `causal`, `window` and `documents`.
            send_cost: cost of sending one token to the next rank, as the number of (query, key) pairs that take as
                long to compute; 1000 by default. 0: sending costs nothing.
            balanced_by: the pairs that count as a shard's work. "queries": those of its queries, as when keys rotate;
                "keys": those of its keys, as when queries rotate; "both": each of the two counts is balanced.
            states: True for a model that has layers with a state, too. Where a document is cut, these send their state
                to all ranks; it counts as 512 tokens of each. The runs of a shard are then few and long. With
                `send_cost=0` it changes nothing.

        Raises:
            ValueError: documents that fall or are not from 0 to `length`, an invalid window, `mask` together with
                another mask argument, a negative `send_cost`, an unknown `balanced_by`, `length`^2 times rows of 2^63
                or more.
        """
        length, shards = _check_sizes(length, shards)
        send_cost = SEND_COST if send_cost is None else number("send_cost", send_cost)
        if send_cost < 0:
            raise ValueError(f"send_cost={send_cost}: a number of pairs of at least 0 is needed, or None")
        sides = SIDES[check_choice("balanced_by", balanced_by, tuple(SIDES))]
        rows = _slices_by_row(length, causal, window, documents, mask)
        state_tokens = STATE_TOKENS if check_bool("states", states) else 0
        return cls(balanced_spans(length, shards, rows, send_cost, sides, state_tokens))

    @classmethod
    def read(cls, text: str) -> SequenceLayout:
        """Returns the layout with this `text`.

        Raises:
            ValueError: the text has another format, or its spans do not form a layout.
        """
        try:
            shards = [[range(*map(int, span.split(":"))) for span in shard.split(",")] for shard in text.split(";")]
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f'{text!r} is not the text of a layout, such as "0:2,6:8;2:6"') from None
        return cls(shards)

    @property
    def numbers(self) -> Tensor:
        """The layout as int64 [n] on the CPU, for `of_numbers`: for each shard its number of spans, then start, stop
        and step of each span.

        A compiled graph gets them as an input tensor, so that another layout needs no new graph.
        """
        return torch.from_numpy(self._encoded)  # a view: a tensor of every layout would count as memory of a step

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> SequenceLayout:
        shards, start = list[list[range]](), 0
        while start < len(numbers):
            stop = start + 1 + 3 * numbers[start]
            shards.append([range(*numbers[i : i + 3]) for i in range(start + 1, stop, 3)])
            start = stop
        return cls(shards)

    # -- shards ---------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        return len(self.spans_by_shard)

    def spans(self, shard: int) -> Spans:
        """Returns the spans of `shard`, in local order."""
        if not 0 <= integer("shard", shard) < self.shards:
            raise ValueError(f"shard {shard} is not one of the {self.shards} shards 0..{self.shards - 1}")
        return self.spans_by_shard[shard]

    def positions(self, shard: int) -> Tensor:
        """Returns the global positions of the tokens of `shard`, a LongTensor [T] on the CPU."""
        return torch.cat([torch.arange(s.start, s.stop, s.step) for s in self.spans(shard)])

    def shards_at(self, positions: Integers) -> Integers:
        """Returns the shard that holds each of `positions`. Memory is O(spans), not O(N)."""
        run_starts, run_shards, strided_spans = _sort_spans(self)
        shards = np.zeros_like(positions)
        if len(run_starts):
            # A position belongs to the last run that starts at or before it, unless a span with a step has it.
            shards = run_shards[np.searchsorted(run_starts, positions, side="right") - 1]
        for span, shard in strided_spans:
            inside = (positions >= span.start) & (positions < span.stop)
            shards[inside & (positions % span.step == span.start % span.step)] = shard
        return shards

    # -- between the sequence and its shards ------------------------------------------------------------------------

    def take(self, x: Tensor, shard: int, dim: int = 1) -> Tensor:
        """Returns the tokens of `x` that `shard` holds: N on `dim` becomes T. Differentiable; always a copy."""
        if _token_count(x, dim) != self.length:
            raise ValueError(
                f"dim {dim} of {tuple(x.shape)} has {x.shape[dim]} positions; the layout has {self.length}"
            )
        return x.index_select(dim, self.positions(shard).to(x.device))

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Returns the tensor in sequence order from the tensors of all shards: the inverse of `take`. Differentiable.

        Args:
            parts: one tensor for each shard, in shard order.
            dim: dim of the tokens.

        Raises:
            ValueError: an element is not a tensor, sizes on `dim` are not those of the shards, or the tensors differ
                in their number of dims, dtype or device.
        """
        if not isinstance(parts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            raise ValueError(f"parts are a {type(parts).__name__}; a list with a tensor for each shard is needed")
        sizes = tuple(_token_count(x, dim) for x in parts)
        if sizes != self.sizes:
            raise ValueError(f"parts have {sizes} positions on dim {dim}; the layout's shards have {self.sizes}")
        kinds = dict.fromkeys(f"{x.ndim} dims in {x.dtype} on {x.device}" for x in parts)
        if len(kinds) > 1:
            raise ValueError(f"parts differ in dims, dtype or device: {'; '.join(kinds)}")
        # In the concatenation of all shards, the token of position p is at index inverse[p].
        order = shard_order(self)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(self.length))
        return torch.cat(list(parts), dim).index_select(dim, inverse.to(parts[0].device))

    # -- derived layouts --------------------------------------------------------------------------------------------

    def refine(self, n: int) -> SequenceLayout:
        """Cuts each shard into `n` pieces, in local order: piece u of shard r becomes shard r * n + u.

        Raises:
            ValueError: `n` is below 1, or a shard has fewer than `n` tokens.
        """
        return _refine(self, integer("n", n))

    def coarsen(self, n: int) -> SequenceLayout:
        """Joins every `n` adjacent shards into one: shards then have the positions that they had before `refine(n)`.

        Raises:
            ValueError: `n` does not divide the number of shards.
        """
        return _coarsen(self, integer("n", n))


def shard_order(layout: SequenceLayout) -> Tensor:
    """Returns the positions of shard 0, shard 1, ..., concatenated: a LongTensor [N] on the CPU."""
    return torch.cat([layout.positions(shard) for shard in range(layout.shards)])


@lru_cache(maxsize=16)  # sorting the spans of a million stripes takes seconds
def _sort_spans(layout: SequenceLayout) -> tuple[Integers, Integers, list[tuple[range, int]]]:
    """Returns (sorted starts of all spans with step 1, their shards, (span, shard) of all other spans)."""
    spans = [(span, shard) for shard, spans in enumerate(layout.spans_by_shard) for span in spans]
    runs = sorted((span.start, shard) for span, shard in spans if span.step == 1)
    starts, shards = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return starts, shards, [(span, shard) for span, shard in spans if span.step > 1]


# Cached, because every attention call of every layer derives the same layouts.
@lru_cache(maxsize=256)
def _refine(layout: SequenceLayout, n: int) -> SequenceLayout:
    smallest = min(layout.sizes)
    if n < 1 or smallest < n:
        min_tokens = layout.shards * n
        raise ValueError(f"cannot cut shards of {smallest} tokens in {n}; give at least {min_tokens} tokens in all")
    pieces = (piece for spans in layout.spans_by_shard for piece in cut_spans(spans, n))
    return SequenceLayout(pieces) if n > 1 else layout


@lru_cache(maxsize=256)
def _coarsen(layout: SequenceLayout, n: int) -> SequenceLayout:
    if n < 1 or layout.shards % n:
        raise ValueError(f"cannot join {layout.shards} shards in groups of {n}; {n} must divide {layout.shards}")
    if n == 1:
        return layout
    groups = (layout.spans_by_shard[i : i + n] for i in range(0, layout.shards, n))
    return SequenceLayout(map(chain.from_iterable, groups))


def attention_balance(
    layout: SequenceLayout,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    mask: Sliced | None = None,
    of_keys: bool = False,
) -> float:
    """Returns the load of the most loaded shard over the mean load, in (query, key) pairs; 1 is perfectly even.

    Args:
        layout: the layout to judge.
        causal, window, documents, mask: as in `SequenceLayout.balanced`.
        of_keys: True counts a shard's work by its keys instead of its queries, as when queries rotate.

    Raises:
        ValueError: `layout` is not a SequenceLayout; otherwise as `SequenceLayout.balanced`.
    """
    check_layout(layout)
    rows = _slices_by_row(layout.length, causal, window, documents, mask)
    ring, runs = RingShares(layout.length, layout.shards, rows), PositionRuns.of_spans(layout.spans_by_shard)
    loads: list[int] = ring.pairs_of_shards(runs)[int(check_bool("of_keys", of_keys))].tolist()
    return max(loads) * layout.shards / sum(loads) if any(loads) else 1.0


def attention_traffic(
    layout: SequenceLayout,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    mask: Sliced | None = None,
    of_queries: bool = False,
) -> int:
    """Returns the token-hops of one pass of keys around a ring, in the cheaper direction.

    A token-hop is one token sent to the next rank. A key stops at the last rank that has a query which sees it. For k
    and v of [B, N, K, D], all ranks together send 2 B K D elements per token-hop.

    Args:
        causal, window, documents, mask: as in `SequenceLayout.balanced`.
        of_queries: True counts a pass of queries instead. A query stops at the last rank that has a key it sees.

    Raises:
        ValueError: `layout` is not a SequenceLayout; otherwise as `SequenceLayout.balanced`.
    """
    check_layout(layout)
    rows = _slices_by_row(layout.length, causal, window, documents, mask)
    rows = [mirror(row) for row in rows] if check_bool("of_queries", of_queries) else rows
    return token_hops(PositionRuns.of_spans(layout.spans_by_shard), layout.shards, rows)


def _slices_by_row(
    length: int,
    causal: bool,
    window: Sequence[int | None] | None,
    documents: Sequence[int] | Sequence[Sequence[int]] | None,
    mask: Sliced | None,
) -> Sequence[Slices]:
    """Returns one array of slices per batch row, or a single one for all rows."""
    # The one place where the arguments of a mask become slices.
    if mask is None:
        return mask_slices(length, causal, window, documents)
    if not (check_bool("causal", causal) and window is documents is None):
        raise ValueError(f"mask={mask!r} excludes other values of causal, window and documents")
    if not hasattr(mask, "slices"):
        raise ValueError(
            f"mask is a {type(mask).__name__}; an attention mask is needed, or anything with slices(length)"
        )
    return mask.slices(length)


def check_layout(layout: object) -> None:
    if not isinstance(layout, SequenceLayout):
        raise ValueError(f"layout is a {type(layout).__name__}; a SequenceLayout is needed")


def _check_sizes(length: int, shards: int) -> tuple[int, int]:
    length, shards = integer("length", length), integer("shards", shards)
    if shards < 1:
        raise ValueError(f"a layout needs at least 1 shard; got {shards}")
    if length < shards:
        raise ValueError(
            f"a sequence of {length} tokens is shorter than its {shards} shards; give at least {shards} tokens"
        )
    if length > MAX_POSITION:
        raise ValueError(f"a sequence of {length} tokens: positions are counted up to 2^63 - 1; give fewer")
    return length, shards


def _token_count(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"a layout takes tokens from tensors and joins tensors; got {type(x).__name__}")
    return x.shape[check_dim("x", x, dim)]
