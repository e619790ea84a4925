"""What the op pair runs (`autograd.py`): a method on finished q, k and v, or one that makes them of hidden states.

Both are plain functions from tensors to tensors, without autograd: forward, backward, and the shapes that they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from armillary.attention.projections import Projections, one_token
from armillary.attention.sources import Projected, QKVSource
from armillary.attention.spec import AttentionSpec, Saved
from armillary.core.accumulate import Totals, accumulation_dtype
from armillary.core.collectives.compiled import alone
from armillary.core.collectives.merge import pivot
from armillary.core.observe.ledger import phase
from armillary.core.recompute import RNGReplay, outside_autocast


class Attends(Protocol):
    """Of a method (`methods/base.py`), what a call of it needs."""

    redistributes_inputs: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]: ...
    def forward_prefetched(
        self, started: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Saved]: ...
    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]: ...
    def heads(self, heads: range) -> range: ...
    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor: ...
    def saved_like(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Saved: ...


class AttendsInStages(Protocol):
    """Of a method that makes q, k and v a few heads at a time (UPipe), what a call of it needs."""

    def attend(self, source: QKVSource, spec: AttentionSpec, into: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    def differentiate(self, dout: Tensor, source: QKVSource, out: Tensor, lse: Tensor, spec: AttentionSpec) -> None: ...
    def lse_to_seq(self, lse: Tensor, spec: AttentionSpec) -> Tensor: ...
    def own_queries(self, spec: AttentionSpec) -> slice: ...
    def results(self, batch: int, q: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A method on q, k and v. Its results: out, lse (empty unless needed), and what backward takes of others.

    Results are in memory of their own, as an op's must be.

    Args:
        with_lse: lse [B, T, H] is asked for.
        started: what waits for the queries that the method has sent already, if it has.
    """

    method: Attends
    spec: AttentionSpec
    with_lse: bool
    started: list[Any] = field(default_factory=list[Any])

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """The results."""
        method, spec, (q, k, v) = self.method, self.spec, tensors
        with outside_autocast(q.device.type):
            if self.started:
                out, saved = method.forward_prefetched(self.started.pop(), q, k, v, spec)
            else:
                out, saved = method.forward(q, k, v, spec)
            lse, moved = saved.lse, method.redistributes_inputs
            if moved:  # then the lse of own tokens costs communication: only when it is needed
                lse = method.local_lse(saved, spec) if self.needs_lse(sinks) else lse.new_empty(0)
            if sinks is not None:
                out, lse, saved = self._sunk(out, lse, saved, sinks)
            return [alone(x) for x in ((out, lse, *saved) if moved else (out, lse))]

    def _sunk(self, out: Tensor, lse: Tensor, saved: Saved, sinks: Tensor) -> tuple[Tensor, Tensor, Saved]:
        heads = self.method.heads(range(len(sinks)))
        inner_out, inner_lse = sunk(saved.out, saved.lse, sinks[heads.start : heads.stop])
        own = sunk(out, lse, sinks) if self.method.redistributes_inputs else (inner_out, inner_lse)
        return *own, saved._replace(out=inner_out, lse=inner_lse)

    def needs_lse(self, sinks: Tensor | None) -> bool:
        """Whether the lse of this rank's own tokens is among the results."""
        return self.with_lse or sinks is not None or not self.method.redistributes_inputs

    def forward_like(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Empty tensors shaped as those of `forward`."""
        q, k, v = tensors
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3] if self.needs_lse(sinks) else (0,), dtype=accumulation_dtype(q.dtype))
        return [out, lse, *(self.method.saved_like(q, k, v, self.spec) if self.method.redistributes_inputs else ())]

    def backward(self, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """[dq, dk, dv], in the dtypes of q, k and v."""
        with phase("backward"), outside_autocast(dout.device.type):
            grads = self.method.backward(dout, Saved(*saved), self.spec)
        return [alone(dx.to(x.dtype)) for dx, x in zip(grads, saved, strict=False)]


@dataclass(frozen=True, eq=False)
class ProjectedCall:
    """A method that works in stages on hidden states x [B, T, E] and projections: it keeps x, out and lse alone.

    Its results: out, lse of this rank's heads, lse of its own tokens; the last is empty without sinks.

    Args:
        autocast: as it is where the call is made. An op cannot ask: where a dispatch mode runs it (a selective
            checkpoint's, or a counter's), torch has turned autocast off.
        draws: random numbers of the projections (dropout), which backward draws again.
    """

    method: AttendsInStages
    spec: AttentionSpec
    projections: Projections
    autocast: Callable[[], AbstractContextManager[Any]]
    draws: RNGReplay = field(default_factory=RNGReplay)

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """The results."""
        method, spec, x = self.method, self.spec, tensors[0]
        with self.autocast():
            out, lse = method.attend(Projected(x, self.projections, draws=self.draws), spec)
            local_lse = lse.new_empty(0)
            if sinks is not None:
                with outside_autocast(x.device.type):
                    out, local_lse = sunk(out, method.lse_to_seq(lse, spec), sinks)
                    lse = torch.logaddexp(lse, sinks[method.own_queries(spec)].to(lse.dtype))
        return [out, lse, local_lse]

    def forward_like(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Empty tensors shaped as those of `forward`."""
        with self.autocast():
            q, _, v = one_token(tensors[0], self.projections)
        return results_like(self.method, self.spec, tensors[0], q, v, sinks)

    def trained(self) -> list[Tensor]:
        """The parameters that want a gradient, as they are now."""
        named = {id(parameter): parameter for parameter in self.projections.parameters() if parameter.requires_grad}
        return list(named.values())  # each once, even if two projections share it

    def differentiate(
        self, dout: Tensor, x: Tensor, dx: Tensor | None, out: Tensor, lse: Tensor
    ) -> list[Tensor | None]:
        """Adds the gradient of x to dx; returns those of `trained()`."""
        totals = Totals(self.trained())
        with phase("backward"), self.autocast():
            source = Projected(x, self.projections, dx=dx, totals=totals, draws=self.draws.again())
            self.method.differentiate(dout, source, out, lse, self.spec)
        return totals.result()


def results_like(
    method: AttendsInStages, spec: AttentionSpec, x: Tensor, q: Tensor, v: Tensor, sinks: Tensor | None
) -> list[Tensor]:
    """Empty tensors shaped as the results of a `ProjectedCall`, for q [..., D] and v [..., Dv]."""
    out, lse = method.results(x.shape[0], q, v, spec)
    return [out, lse, x.new_empty(out.shape[:3] if sinks is not None else (0,), dtype=accumulation_dtype(q.dtype))]


def head_sinks(sinks: Tensor | None) -> Tensor | None:
    """Returns one sink logit per head [H]: the logsumexp over S of sinks [S, H]. Differentiable.

    S keys of value 0 weigh as much as one whose exp is the sum of theirs, so the op knows one sink per head.
    """
    if sinks is None or sinks.ndim == 1:
        return sinks
    logits = sinks.to(accumulation_dtype(sinks.dtype))
    absent = (logits == -torch.inf).all(0)  # torch's gradient of their logsumexp is NaN
    return logits.masked_fill(absent, 0).logsumexp(0).masked_fill(absent, -torch.inf)


def sunk(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) as if each query also saw a key with score `sinks` [H] and value 0 (sinks, as in gpt-oss).

    A sink of -inf is none; a query that sees no key has nothing else.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - pivot(total)).exp().unsqueeze(-1)).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """dsinks [H] of this rank's tokens; like any parameter's, it is to be summed over ranks."""
    weight = (sinks.to(lse.dtype) - pivot(lse)).exp()
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 1)).to(sinks.dtype)
