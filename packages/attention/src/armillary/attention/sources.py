"""Where a method that walks over stages of heads takes its q, k and v from, and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from armillary.attention.projections import CollectsGradients, Projections, TokenProjections
from armillary.core.accumulate import Totals, accumulation_dtype
from armillary.core.chunks import at_tokens, chunks
from armillary.core.recompute import RNGReplay, capture_autocast

Heads = Sequence[int]


class QKVSource(Protocol):
    """q, k and v of this rank's tokens, a few heads at a time."""

    @property
    def device_type(self) -> str:
        """Where they are, such as "cpu"."""
        ...

    def q(self, heads: Heads) -> Tensor:
        """[B, T, len(heads), D]"""
        ...

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """[B, T, len(heads), D] and [B, T, len(heads), Dv]"""
        ...

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        """Takes in the gradient of `q(heads)`, in parts [B, T, h, D] that follow each other."""
        ...

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        """Takes in gradients of `kv(heads)`."""
        ...


@dataclass
class Finished(QKVSource):
    """q [B, T, H, D], k [B, S, K, D] and v [B, S, K, Dv] that are there as a whole; so are their gradients."""

    whole: tuple[Tensor, Tensor, Tensor]
    grads: tuple[Tensor, ...] = ()

    @property
    def device_type(self) -> str:
        return self.whole[0].device.type

    def q(self, heads: Heads) -> Tensor:
        return select(self.whole[0], heads)

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return select(self.whole[1], heads), select(self.whole[2], heads)

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        place(self.gradients()[0], heads, dq)

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        for total, share in zip(self.gradients()[1:], (dk, dv), strict=True):
            at_heads(total, heads, share, Tensor.add_)

    def gradients(self) -> tuple[Tensor, ...]:
        """(dq, dk, dv), the last two in the accumulation dtype: heads that ranks share come home more than once."""
        if not self.grads:
            q, k, v = self.whole
            self.grads = (
                torch.empty_like(q),
                *(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (k, v)),
            )
        return self.grads


@dataclass
class Projected(QKVSource):
    """q, k and v that are made of x when they are asked for, and made again in backward: nothing is kept.

    Projections run under autocast as it is when this is constructed, whatever it is around them when they do.

    Args:
        x: [B, T, E], this rank's tokens.
        piece: tokens that are projected at once, where the projections know single tokens.
        dx: what the gradient of x is added to, in place; None where nobody wants it.
        totals: what the gradients of parameters are added to. They are the parameters as they are now: FSDP swaps them
            between forward and backward.
        draws: random numbers of the projections (dropout), which backward draws again.
    """

    x: Tensor
    projections: Projections
    piece: int | None = None
    dx: Tensor | None = None
    totals: Totals = field(default_factory=Totals)
    draws: RNGReplay = field(default_factory=RNGReplay)

    def __post_init__(self) -> None:
        self.autocast = capture_autocast(self.device_type)

    @property
    def device_type(self) -> str:
        return self.x.device.type

    def q(self, heads: Heads) -> Tensor:
        (q,) = self._make(("q", *heads), lambda projections, x: (projections.q(x, heads),))
        return q

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        k, v = self._make(("kv", *heads), lambda projections, x: projections.kv(x, heads))
        return k, v

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        several = len(heads) < self.projections.heads
        self._add(("q", *heads), lambda projections, x: (projections.q(x, heads),), [dq], several)

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        several = len(heads) < self.projections.key_heads
        self._add(("kv", *heads), lambda projections, x: projections.kv(x, heads), [(dk,), (dv,)], several)

    @torch.no_grad()
    def _make(self, what: Hashable, project: Project) -> Sequence[Tensor]:
        """The projections of all tokens, piece by piece: what lies between x and them never exists for all at once."""
        parts, whole = self._pieces(), list[Tensor]()
        for tokens, projections in parts:
            with self.autocast(), self.draws.at((what, tokens.start), self.x.device):
                made = project(projections, at_tokens(self.x, tokens))
            if len(parts) == 1:
                return made
            whole = whole or [y.new_empty((y.shape[0], self.x.shape[1], *y.shape[2:])) for y in made]
            for all_tokens, y in zip(whole, made, strict=True):
                all_tokens[:, tokens] = y
        return whole

    def _add(self, what: Hashable, project: Project, grads: Sequence[Sequence[Tensor]], several: bool) -> None:
        """Adds to dx and to the parameters' totals what gradients of the projections, each in parts, come to.

        Args:
            several: not all heads; other calls will add to the same parameters.
        """
        pieces = self._pieces() if self.dx is not None or self.totals.parameters else []
        for tokens, projections in pieces:
            if (several or len(pieces) > 1) and hasattr(projections, "collecting"):
                projections = cast(CollectsGradients, projections).collecting(self.totals)
            x = at_tokens(self.x, tokens).detach().requires_grad_(self.dx is not None)
            with torch.enable_grad(), self.autocast(), self.draws.at((what, tokens.start), x.device):
                made = project(projections, x)
            dmade = [joined([at_tokens(part, tokens) for part in parts]) for parts in grads]
            pairs = [(y, dy.to(y.dtype)) for y, dy in zip(made, dmade, strict=True) if y.requires_grad]
            if pairs:
                self._differentiate(pairs, x, tokens)
            del made, dmade, pairs

    def _differentiate(self, pairs: Sequence[tuple[Tensor, Tensor]], x: Tensor, tokens: slice) -> None:
        wanted = [*([] if self.dx is None else [x]), *self.totals.parameters]
        made, dmade = zip(*pairs, strict=True)
        shares: list[Tensor | None] = list(torch.autograd.grad(made, wanted, dmade, allow_unused=True))
        if self.dx is not None and (share := shares.pop(0)) is not None:
            at_tokens(self.dx, tokens).add_(share)
        self.totals.add(shares)

    def _pieces(self) -> list[tuple[slice, Projections]]:
        cut = chunks(self.x.shape[1], self.piece)
        if isinstance(self.projections, TokenProjections) and len(cut) > 1:
            return [(tokens, self.projections.of_tokens(tokens)) for tokens in cut]
        return [(slice(0, self.x.shape[1]), self.projections)]


Project = Callable[[Projections, Tensor], Sequence[Tensor]]
"""From projections and x to some of q, k and v."""


def select(x: Tensor, heads: Heads, dim: int = 2) -> Tensor:
    """Heads of x [B, T, H, D], where they are `dim`: of its memory where they are evenly spaced."""
    return joined([at_run(x, run, dim) for run in runs(tuple(heads))], dim)


def joined(parts: list[Tensor], dim: int = 2) -> Tensor:
    """Parts [B, T, h, D] as one tensor; one part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def at_run(x: Tensor, run: slice, dim: int) -> Tensor:
    """x at a run of heads, which are `dim`: a view, or itself where these are all."""
    return x if run == slice(0, x.shape[dim], 1) else x[(slice(None),) * dim + (run,)]


def place(x: Tensor, heads: Heads, parts: Sequence[Tensor]) -> None:
    """Writes heads of x [B, T, H, D], from parts [B, T, h, D] that follow each other."""
    done = 0
    for part in parts:
        at_heads(x, heads[done : done + part.shape[2]], part, Tensor.copy_)
        done += part.shape[2]


def at_heads(x: Tensor, heads: Heads, part: Tensor, put: Callable[[Tensor, Tensor], object], dim: int = 2) -> None:
    """Puts `part` to these heads of x, where they are `dim`, in place: `Tensor.copy_` or `Tensor.add_`."""
    done = 0
    for run in runs(tuple(heads)):
        into = at_run(x, run, dim)
        put(into, part if into.shape[dim] == part.shape[dim] else part.narrow(dim, done, into.shape[dim]))
        done += into.shape[dim]


@lru_cache(maxsize=1024)
def runs(heads: tuple[int, ...]) -> tuple[slice, ...]:
    """Heads as slices, each as long as they are evenly spaced and rising; of no heads, an empty one.

    Indexed by a list, a tensor on a GPU would have the host wait until all before is computed.
    """
    if not heads:
        return (slice(0, 0, 1),)
    start, *others = heads
    step = max(1, others[0] - start) if others else 1
    stop = next((i for i in range(1, len(heads)) if heads[i] != start + i * step), len(heads))
    first = slice(start, heads[stop - 1] + 1, step)
    return (first, *runs(heads[stop:])) if stop < len(heads) else (first,)
