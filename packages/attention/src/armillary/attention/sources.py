"""Where a method that walks over stages of heads takes its q, k and v from, and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from armillary.attention.projections import Projections, TokenProjections
from armillary.core.accumulate import Totals, accumulation_dtype
from armillary.core.chunks import chunks
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
        spaced = evenly(tuple(heads))
        for total, share in zip(self.gradients()[1:], (dk, dv), strict=True):
            if spaced is None:
                total.index_add_(2, torch.tensor(heads, device=total.device), share.to(total.dtype))
            else:
                total[:, :, spaced].add_(share)

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
        self._add(("q", *heads), lambda projections, x: (projections.q(x, heads),), [dq])

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        self._add(("kv", *heads), lambda projections, x: projections.kv(x, heads), [(dk,), (dv,)])

    @torch.no_grad()
    def _make(self, what: Hashable, project: Project) -> Sequence[Tensor]:
        """The projections of all tokens, piece by piece: what lies between x and them never exists for all at once."""
        parts, whole = self._pieces(), list[Tensor]()
        for tokens, projections in parts:
            with self.autocast(), self.draws.at((what, tokens.start), self.x.device):
                made = project(projections, self.x[:, tokens])
            if len(parts) == 1:
                return made
            whole = whole or [y.new_empty((y.shape[0], self.x.shape[1], *y.shape[2:])) for y in made]
            for all_tokens, y in zip(whole, made, strict=True):
                all_tokens[:, tokens] = y
        return whole

    def _add(self, what: Hashable, project: Project, grads: Sequence[Sequence[Tensor]]) -> None:
        """Adds to dx and to the parameters' totals what gradients of the projections, each in parts, come to."""
        for tokens, projections in self._pieces() if self.dx is not None or self.totals.parameters else []:
            x = self.x[:, tokens].detach().requires_grad_(self.dx is not None)
            with torch.enable_grad(), self.autocast(), self.draws.at((what, tokens.start), x.device):
                made = project(projections, x)
            dmade = [torch.cat([part[:, tokens] for part in parts], dim=2) for parts in grads]
            pairs = [(y, dy.to(y.dtype)) for y, dy in zip(made, dmade, strict=True) if y.requires_grad]
            if pairs:
                self._differentiate(pairs, x, tokens)
            del made, dmade, pairs

    def _differentiate(self, pairs: Sequence[tuple[Tensor, Tensor]], x: Tensor, tokens: slice) -> None:
        wanted = [*([] if self.dx is None else [x]), *self.totals.parameters]
        made, dmade = zip(*pairs, strict=True)
        shares: list[Tensor | None] = list(torch.autograd.grad(made, wanted, dmade, allow_unused=True))
        if self.dx is not None and (share := shares.pop(0)) is not None:
            self.dx[:, tokens] += share
        self.totals.add(shares)

    def _pieces(self) -> list[tuple[slice, Projections]]:
        if not isinstance(self.projections, TokenProjections):
            return [(slice(None), self.projections)]
        return [(tokens, self.projections.of_tokens(tokens)) for tokens in chunks(self.x.shape[1], self.piece)]


Project = Callable[[Projections, Tensor], Sequence[Tensor]]
"""From projections and x to some of q, k and v."""


def select(x: Tensor, heads: Heads) -> Tensor:
    """Heads of x [B, T, H, D]: a view where they are evenly spaced."""
    spaced = evenly(tuple(heads))
    return x[:, :, list(heads)] if spaced is None else x[:, :, spaced]


def place(x: Tensor, heads: Heads, parts: Sequence[Tensor]) -> None:
    """Writes heads of x [B, T, H, D], from parts [B, T, h, D] that follow each other."""
    done = 0
    for part in parts:
        mine = tuple(heads[done : done + part.shape[2]])
        done += part.shape[2]
        spaced = evenly(mine)
        x[:, :, list(mine) if spaced is None else spaced] = part


@lru_cache(maxsize=1024)
def evenly(heads: tuple[int, ...]) -> slice | None:
    """The slice that rising heads are, if they are one."""
    if len(heads) < 2:
        return slice(*(heads[0], heads[0] + 1) if heads else (0, 0))
    run = range(heads[0], heads[-1] + 1, max(heads[1] - heads[0], 1))
    return slice(run.start, run.stop, run.step) if heads == tuple(run) else None
