"""A checked call as plain functions from tensors to tensors, without autograd: forward, backward, empty results.

`AttentionCall` runs a method on q, k and v. `ProjectedCall` runs a method that works in stages on hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.interface import AttentionMethod, StagedMethod
from armillary.attention.call.projections import Projections, one_token
from armillary.attention.call.recompute import RNGReplay, outside_autocast
from armillary.attention.call.sources import Projected
from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.core import accumulation_dtype
from armillary.core.parts import own_memory, phase, pivot, register


@dataclass(eq=False)
class AttentionCall:
    """A call of a method on q, k and v.

    `forward` returns out [B, T, H, Dv] and lse [B, T, H], which is empty if it is not needed (`needs_lse`). If the
    method redistributes its inputs, the tensors for `backward` follow. Results do not share memory with inputs, as an
    op requires.

    Args:
        with_lse: True if the caller requests lse.
        prefetched: empty, or the result of `prefetch_queries` if queries are in flight. `forward` removes it.
    """

    method: AttentionMethod
    spec: AttentionSpec
    with_lse: bool
    prefetched: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.registered_id = register(self)

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        method, spec, (q, k, v) = self.method, self.spec, tensors
        with outside_autocast(q.device.type):
            if self.prefetched:
                out, saved = method.forward_prefetched(self.prefetched.pop(), q, k, v, spec)
            else:
                out, saved = method.forward(q, k, v, spec)
            lse, saves_other_tensors = saved.lse, method.redistributes_inputs
            if saves_other_tensors:  # saved.lse is of head shards: the lse of local tokens costs communication
                lse = method.local_lse(saved, spec) if self.needs_lse(sinks) else lse.new_empty(0)
            if sinks is not None:
                # Sinks rescale out and lse after attention, so that kernels need not support them.
                heads = method.heads(range(len(sinks)))
                saved_out, saved_lse = add_sinks(saved.out, saved.lse, sinks[heads.start : heads.stop])
                out, lse = add_sinks(out, lse, sinks) if saves_other_tensors else (saved_out, saved_lse)
                saved = saved._replace(out=saved_out, lse=saved_lse)
            return [own_memory(x) for x in ((out, lse, *saved) if saves_other_tensors else (out, lse))]

    def needs_lse(self, sinks: Tensor | None) -> bool:
        """Returns True if the lse of the local tokens is among the results."""
        return self.with_lse or sinks is not None or not self.method.redistributes_inputs

    def empty_results(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Returns empty tensors shaped like the results of `forward`."""
        q, k, v = tensors
        with_lse = self.needs_lse(sinks)
        if self.method.redistributes_inputs:
            shard = self.method.shard * self.method.sequence_shards // self.method.shards
            sizes = self.spec.layout.sizes[shard], self.spec.key_layout.sizes[shard]
            return empty_redistributed_results(self.method, q, k, v, self.spec.key_heads, sizes, with_lse)
        return [
            q.new_empty((*q.shape[:3], v.shape[3])),
            q.new_empty(q.shape[:3] if with_lse else (0,), dtype=accumulation_dtype(q.dtype)),
        ]

    def backward(self, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """Returns [dq, dk, dv] in the dtypes of q, k and v."""
        with phase("backward"), outside_autocast(dout.device.type):
            grads = self.method.backward(dout, Saved(*saved), self.spec)
        return [own_memory(dx.to(x.dtype)) for dx, x in zip(grads, saved, strict=False)]


@dataclass(eq=False)
class ProjectedCall:
    """A call of a staged method on hidden states x [B, T, E]. Backward needs only x, out and lse.

    `forward` returns out [B, T, H, Dv], lse [B, n, h] of this rank's heads (`StagedMethod.attend`), and lse [B, T, H]
    of the local tokens, which is empty without sinks.

    Args:
        autocast: makes a context with the caller's autocast state. The op cannot read this state itself: under a
            dispatch mode, such as that of selective checkpointing, torch has turned autocast off.
        draws: random states of the projections (for dropout), which backward replays.
    """

    method: StagedMethod
    spec: AttentionSpec
    projections: Projections
    autocast: Callable[[], AbstractContextManager[Any]]
    draws: RNGReplay = field(default_factory=RNGReplay)

    def __post_init__(self) -> None:
        self.registered_id = register(self)

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        method, spec, x = self.method, self.spec, tensors[0]
        with self.autocast():
            out, lse = method.attend(Projected(x, self.projections, draws=self.draws), spec)
            local_lse = lse.new_empty(0)
            if sinks is not None:
                with outside_autocast(x.device.type):
                    out, local_lse = add_sinks(out, method.lse_to_seq(lse, spec), sinks)
                    lse = torch.logaddexp(lse, sinks[method.own_queries(spec)].to(lse.dtype))
        return [out, lse, local_lse]

    def empty_results(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Returns empty tensors shaped like the results of `forward`."""
        with self.autocast():
            q, _, v = one_token(tensors[0], self.projections)
        shard = self.method.shard * self.method.sequence_shards // self.method.shards
        tokens = self.spec.layout.sizes[shard]
        return empty_projected_results(self.method, self.spec.key_heads, tokens, tensors[0], q, v, sinks)

    def trained_parameters(self) -> list[Tensor]:
        """Returns the current parameters that require a gradient, each once, even if several projections use it."""
        parameters = {
            id(parameter): parameter for parameter in self.projections.parameters() if parameter.requires_grad
        }
        return list(parameters.values())

    def backward(self, dout: Tensor, x: Tensor, dx: Tensor | None, out: Tensor, lse: Tensor) -> list[Tensor | None]:
        """Adds the gradient of x to dx, unless that is None, and returns the gradients of `trained_parameters`."""
        # FSDP swaps parameters between forward and backward, so they are read again.
        totals = GradientSums(self.trained_parameters())
        with phase("backward"), self.autocast():
            source = Projected(x, self.projections, dx=dx, totals=totals, draws=self.draws.restart())
            self.method.differentiate(dout, source, out, lse, self.spec)
        return totals.result()


def empty_redistributed_results(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_heads: tuple[int, ...],
    shard_tokens: Sequence[int],
    with_lse: bool,
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of an `AttentionCall` of a method that redistributes its inputs.

    Args:
        key_heads: as in `AttentionSpec`.
        shard_tokens: numbers of queries and of keys of this rank's sequence shard.
        with_lse: True if the lse of the local tokens is among the results.
    """
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3] if with_lse else (0,), dtype=accumulation_dtype(q.dtype))
    return [out, lse, *method.empty_saved(q, k, v, key_heads, *shard_tokens)]


def empty_projected_results(
    method: StagedMethod,
    key_heads: tuple[int, ...],
    shard_tokens: int,
    x: Tensor,
    q: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of a `ProjectedCall`, for q [..., D] and v [..., Dv].

    Args:
        key_heads: as in `AttentionSpec`.
        shard_tokens: number of tokens of this rank's sequence shard.
    """
    out, lse = method.empty_results(x.shape[:2], shard_tokens, key_heads, q, v)
    return [out, lse, x.new_empty(out.shape[:3] if sinks is not None else (0,), dtype=accumulation_dtype(q.dtype))]


def head_sinks(sinks: Tensor | None) -> Tensor | None:
    """Returns one sink per head [H]: the logsumexp over dim 0 of sinks [n, H]. Differentiable.

    n sinks together have the same softmax weight as one sink with the logsumexp of their scores, so the op takes one.
    """
    if sinks is None or sinks.ndim == 1:
        return sinks
    logits = sinks.to(accumulation_dtype(sinks.dtype))
    absent = (logits == -torch.inf).all(0)  # heads without a sink, for which torch's gradient of logsumexp is NaN
    return logits.masked_fill(absent, 0).logsumexp(0).masked_fill(absent, -torch.inf)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) as if each query also saw a key with score `sinks` [H] and value 0 (gpt-oss).

    A sink of -inf has no effect. For a query that sees no key, out stays 0 and lse becomes the sink.
    """
    # With total = log(exp(lse) + exp(sink)), all weights shrink by exp(lse - total). `pivot` replaces -inf by 0, so
    # that -inf - -inf does not give NaN.
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - pivot(total)).exp().unsqueeze(-1)).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient [H] of sinks from the local tokens, to be summed over ranks like any parameter's gradient.

    Args:
        dout, out: [B, T, H, Dv].
        lse: [B, T, H], with the sinks.
        sinks: [H].
    """
    # The sink has softmax weight w = exp(sink - lse) and value 0, so dsink = w (0 - dout . out), summed over queries.
    weight = (sinks.to(lse.dtype) - pivot(lse)).exp()
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 1)).to(sinks.dtype)
