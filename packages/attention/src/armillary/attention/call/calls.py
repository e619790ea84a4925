"""A call as plain functions from tensors to tensors, without autograd: forward, backward, and the shapes of results.

`AttentionCall` runs a method on q, k and v, `ProjectedCall` a method that works in stages on hidden states. The ops of
`autograd.py` take one of them in eager mode. In a graph of torch.compile they take the fields of a `GraphCall`, which
makes the call when the graph runs. All three have `forward`, `backward` and `empty_results`.

`forward` returns out [B, T, H, Dv]; lse [B, T, H] of the local tokens, or an empty tensor if nobody needs it; and
tensors for backward, if these are others than the call's own and (out, lse).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from armillary.attention.call.qkv_sources import (
    Projected,
    Projections,
    Projector,
    latents_of_projections,
    one_token,
    projected_dtype,
)
from armillary.attention.call.recompute import GradientSums, RNGReplay, outside_autocast
from armillary.attention.call.spec import (
    AttentionMethod,
    AttentionOptions,
    AttentionSpec,
    Saved,
    StagedMethod,
    key_heads_of,
)
from armillary.attention.call.validation import check_call, expanded_shapes
from armillary.attention.kernels import KERNELS
from armillary.attention.tiling.latents import Expansion, TokenSizes
from armillary.core import SequenceLayout, accumulation_dtype
from armillary.core.internal import compat, object_of, own_memory, phase, pivot

# -- calls of eager mode ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class AttentionCall:
    """A checked call of a method on q, k and v; or on q, rotary keys, latents and the weight of their expansion.

    Results share no memory with inputs, as an op requires.

    Args:
        with_lse: True if the caller requests lse.
        prefetched: empty, or the result of `prefetch_queries` if queries are in flight. `forward` removes it.
    """

    is_projected: ClassVar[bool] = False
    input_count: ClassVar[int] = 4
    """Maximum number of the call's tensors that the op of forward takes."""

    method: AttentionMethod
    spec: AttentionSpec
    with_lse: bool = False
    prefetched: list[Any] = field(default_factory=list[Any])

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        method, spec, (q, k, v, *weight) = self.method, self.spec, tensors
        with outside_autocast(q.device.type):
            if weight:
                out, saved = self._forward_latents(q, k, v, *weight)
            elif self.prefetched:
                out, saved = method.forward_prefetched(self.prefetched.pop(), q, k, v, spec)
            else:
                out, saved = method.forward(q, k, v, spec)
            lse, saves_other_tensors = saved.lse, method.redistributes_inputs
            if saves_other_tensors:  # saved.lse is of head shards: the lse of local tokens costs communication
                with_lse = self.with_lse or sinks is not None
                lse = method.local_lse(saved, spec) if with_lse else lse.new_empty(0)
            if sinks is not None:
                # Sinks rescale out and lse after attention, so that kernels need not support them.
                heads = method.heads(range(len(sinks)))
                saved_out, saved_lse = add_sinks(saved.out, saved.lse, sinks[heads.start : heads.stop])
                out, lse = add_sinks(out, lse, sinks) if saves_other_tensors else (saved_out, saved_lse)
                saved = saved._replace(out=saved_out, lse=saved_lse)
            return [own_memory(x) for x in ((out, lse, *saved) if saves_other_tensors else (out, lse))]

    def backward(self, dout: Tensor, saved: Sequence[Tensor], key_shape: Sequence[int] = ()) -> list[Tensor]:
        """Returns [dq, dk, dv] in the dtypes of q, k and v; with latents also the gradient of the weight.

        Args:
            saved: the fields of `Saved`; with latents then the tensors of which `latents_of` tells.
        """
        latents = latents_of(saved)
        with phase("backward"), outside_autocast(dout.device.type):
            if latents:
                grads = self._backward_latents(dout, Saved(*saved[:5]), *latents)
            else:
                grads = self.method.backward(dout, Saved(*saved), self.spec)
        inputs = saved[0], *(latents or saved[1:3])
        return [own_memory(dx.to(x.dtype)) for dx, x in zip(grads, inputs, strict=True)]

    def _forward_latents(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Saved]:
        expansion = Expansion.of(q, k, weight)
        if sends_latents(self.method, (q, k, v, weight), self.spec.key_heads):
            out, saved = self.method.forward(q, k, v, self.spec, expansion)
            return out, without_own_latents(self.method, saved)
        return self.method.forward(q, *expansion.expand(k, v), self.spec)

    def _backward_latents(
        self, dout: Tensor, saved: Saved, k: Tensor, v: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        expansion = Expansion.of(saved.q, k, weight, in_backward=True)
        assert expansion.weight_grad is not None
        if sends_latents(self.method, (saved.q, k, v, weight), self.spec.key_heads):
            if self.method.saves_own_latents:
                saved = saved._replace(k=k, v=v)
            dq, dk, dv = self.method.backward(dout, saved, self.spec, expansion)
        else:
            if not self.method.redistributes_inputs:  # otherwise expanded head shards are saved
                expanded_k, expanded_v = expansion.expand(k, v)
                saved = saved._replace(k=expanded_k, v=expanded_v)
            dq, *key_grads = self.method.backward(dout, saved, self.spec)
            dk, dv = expansion.collapse(v, *key_grads)
        return dq, dk, dv, expansion.weight_grad

    def empty_results(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Returns empty tensors shaped like the results of `forward`."""
        spec, with_lse = self.spec, self.with_lse or sinks is not None
        shard = sequence_shard(self.method)
        sizes = spec.layout.sizes[shard], spec.key_layout.sizes[shard]
        return empty_results(self.method, tensors, spec.key_heads, sizes, with_lse)


@dataclass(eq=False)
class ProjectedCall:
    """A checked call of a staged method on hidden states x [B, T, E]. Backward needs only x, out and lse.

    The tensor for backward is lse [B, n, h] of this rank's heads (`StagedMethod.attend`).

    Args:
        autocast: makes a context with the caller's autocast state. The op cannot read this state itself: under a
            dispatch mode, such as that of selective checkpointing, torch has turned autocast off.
        draws: random states of the projections (for dropout), which backward replays.
    """

    is_projected: ClassVar[bool] = True
    input_count: ClassVar[int] = 1  # x; autograd takes also the parameters, which may be DTensors

    method: StagedMethod
    spec: AttentionSpec
    projections: Projections
    autocast: Callable[[], AbstractContextManager[Any]]
    draws: RNGReplay = field(default_factory=RNGReplay)

    def trained_parameters(self) -> list[Tensor]:
        """Returns the current parameters that require a gradient, each once, even if several projections use it."""
        parameters = {
            id(parameter): parameter for parameter in self.projections.parameters() if parameter.requires_grad
        }
        return list(parameters.values())

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        method, spec, x = self.method, self.spec, tensors[0]
        with self.autocast():
            projections = sent_projections(method, x, self.projections, spec.key_heads)
            source = Projected(x, projections, draws=self.draws)
            out, lse = method.attend(source, spec, expansion=source.expansion)
            local_lse = lse.new_empty(0)
            if sinks is not None:
                with outside_autocast(x.device.type):
                    out, local_lse = add_sinks(out, method.lse_to_seq(lse, spec), sinks)
                    lse = torch.logaddexp(lse, sinks[method.own_queries(spec)].to(lse.dtype))
        return [out, local_lse, lse]

    def backward(self, dout: Tensor, x: Tensor, dx: Tensor | None, out: Tensor, lse: Tensor) -> list[Tensor | None]:
        """Adds the gradient of x to dx, unless that is None, and returns the gradients of `trained_parameters`."""
        # FSDP swaps parameters between forward and backward, so they are read again.
        totals = GradientSums(self.trained_parameters())
        with phase("backward"), self.autocast():
            projections = sent_projections(self.method, x, self.projections, self.spec.key_heads)
            source = Projected(x, projections, dx=dx, totals=totals, draws=self.draws.restart())
            self.method.differentiate(dout, source, out, lse, self.spec, source.expansion)
        return totals.result()

    def empty_results(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Returns empty tensors shaped like the results of `forward`."""
        with self.autocast():
            q, _, v = one_token(tensors[0], self.projections)
        tokens = self.spec.layout.sizes[sequence_shard(self.method)]
        return empty_projected_results(self.method, tensors[0], q, v, self.spec.key_heads, tokens, sinks)


# -- calls of a graph -------------------------------------------------------------------------------------------------

AUTOCAST_DTYPES = {
    "": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Dtypes of autocast by name; "" is autocast off."""


class GraphCall(NamedTuple):
    """A call without its tensors, in a graph: the objects that the ops take (`objects`).

    A graph must not depend on the values of a call, so the call is checked when the graph runs.

    Args:
        options: as the caller gave them, with the kernel's name. Mask and layouts are None in fake kernels, where their
            values are unknown.
        tokens, key_tokens: `shard_tokens` of queries and keys if the shapes of results depend on them, otherwise 0.
        autocast: name of autocast's dtype for projections (`autocast_name`).
        heads, key_heads, head_dim, value_dim: H, K, D and Dv of a call on hidden states; None for calls on q, k and v.
        tensor_count: number of `ProjectionParts.tensors`.
    """

    method: AttentionMethod
    options: AttentionOptions
    tokens: int
    key_tokens: int
    autocast: str = ""
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    tensor_count: int = 0

    @classmethod
    def of(
        cls, method: AttentionMethod, options: AttentionOptions, tokens: int, key_tokens: int, *projected: Any
    ) -> GraphCall:
        """Returns the description of a call.

        Args:
            tokens, key_tokens: numbers of this rank's queries and keys.
            projected: the fields from `autocast` on.

        Raises:
            ValueError: the kernel is an object that is not in `KERNELS`, where the op looks up its name.
        """
        mask, layout, key_layout, scale, softcap, kernel, return_lse = options
        if not (isinstance(kernel, str | None) or any(kernel is known_kernel for known_kernel in KERNELS)):
            names = ", ".join(known_kernel.name for known_kernel in KERNELS)
            raise ValueError(f"torch.compile takes kernels of {names}; got {kernel}")
        if method.redistributes_inputs or method.projects_in_stages:
            tokens = shard_tokens(method, layout, tokens)
            key_tokens = shard_tokens(method, layout if key_layout is None else key_layout, key_tokens)
        else:
            tokens = key_tokens = 0  # a graph for all values
        scale = None if scale is None else float(scale)
        softcap = None if softcap is None else float(softcap)
        kernel = kernel if kernel is None or isinstance(kernel, str) else kernel.name
        options = AttentionOptions(mask, layout, key_layout, scale, softcap, kernel, return_lse)
        return cls(method, options, tokens, key_tokens, *projected)

    @property
    def objects(self) -> tuple[Any, ...]:
        """The call as single objects, as ops take them."""
        return (self.method, *self.options, *self[2:])

    @classmethod
    def of_objects(cls, method: AttentionMethod, *objects: Any) -> GraphCall:
        """Returns the call of these `objects`."""
        count = len(AttentionOptions._fields)
        return cls(method, AttentionOptions(*objects[:count]), *objects[count:])

    @property
    def is_projected(self) -> bool:
        return self.heads is not None

    @property
    def input_count(self) -> None:
        """None: the ops take all tensors."""
        return None

    def forward(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Runs the call.

        Args:
            tensors: as of `AttentionCall`; or x and the fields of `ProjectionParts` that are tensors.
        """
        call = self._projected_call(*tensors) if self.is_projected else self._checked_call(*tensors)
        return call.forward(tensors, sinks)

    def backward(self, dout: Tensor, saved: Sequence[Tensor], key_shape: Sequence[int]) -> list[Tensor]:
        """Returns the gradients of q, k and v; or of x and the parameters, alone in their memory.

        Args:
            saved: the fields of `Saved`; or the tensors of `forward` on hidden states, then out and lse.
            key_shape: (S, K), tokens and heads of the call's keys. The saved k and v may be head shards instead.
        """
        if not self.is_projected:
            # The call's own q, k and v may be freed. Its checks read no values: one expanded element is enough.
            q, (k, v, *weight) = saved[0], latents_of(saved) or saved[1:3]
            key_sizes = (dout.shape[0], *key_shape)
            like = ((dout.shape[:3], q), (key_sizes, k), (key_sizes, v))
            qkv = [x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in like]
            return self._checked_call(*qkv, *weight).backward(dout, saved)
        *tensors, out, lse = saved
        dx = torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
        with compat.above_autograd():
            grads = self._projected_call(*tensors).backward(dout, tensors[0], dx, out, lse)
        # Gradients of the parameters' local parts: zeros for a parameter that has none.
        results = [dx]
        for grad, parameter in zip(grads, tensors[2 + self.tensor_count :], strict=True):
            if grad is None:
                results.append(torch.zeros_like(parameter, memory_format=torch.contiguous_format))
            else:
                local = compat.local_part(grad).to(parameter.dtype)
                results.append(local.clone(memory_format=torch.contiguous_format))
        return results

    def _checked_call(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> AttentionCall:
        spec = check_call(self.method, q, k, v, None, self.options, weight)
        return AttentionCall(self.method, spec, self.options.return_lse)

    def _projected_call(self, x: Tensor, number: Tensor, *projection_tensors: Tensor) -> ProjectedCall:
        # Projections are not traced: their module makes them when the graph runs, with its current parameters, because
        # FSDP may have swapped them. The parameters are inputs of the op only for their gradients.
        projector: Projector = object_of(int(number.item()))
        spec, dtype = check_call(self.method, *self._empty_heads(x), None, self.options), AUTOCAST_DTYPES[self.autocast]
        autocast = partial(torch.autocast, x.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
        projections = projector.projections_of(projection_tensors[: self.tensor_count])
        return ProjectedCall(cast(StagedMethod, self.method), spec, projections, autocast)

    def _empty_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns empty tensors shaped like q, k and v of a call on hidden states x; all are one expanded element."""
        element: Any = x.new_empty(1, dtype=AUTOCAST_DTYPES[self.autocast] or x.dtype)
        sizes = (self.heads, self.head_dim), (self.key_heads, self.head_dim), (self.key_heads, self.value_dim)
        q, k, v = (element.expand(*x.shape[:2], *heads_and_dim) for heads_and_dim in sizes)
        return q, k, v

    def empty_results(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
        """Returns empty tensors shaped like the results of `forward`, while a graph is traced."""
        # Without the call, whose checks would specialize the graph to the present sizes: tokens may be symbols.
        method: Any = self.method
        if self.is_projected:
            q, k, v = self._empty_heads(tensors[0])
            key_heads = key_heads_of(int(q.shape[2]), int(k.shape[2]))
            return empty_projected_results(method, tensors[0], q, v, key_heads, self.tokens, sinks)
        key_heads: tuple[int, ...] = ()
        if method.redistributes_inputs:
            # `index` turns symbolic heads and dims into numbers, with guards.
            tensors = [x.new_empty((*x.shape[:2], *map(index, x.shape[2:]))) for x in tensors]
            q, k, v = expanded_shapes(*tensors)
            method.check(q, k, v)
            key_heads = key_heads_of(q.shape[2], k.shape[2])
        with_lse = self.options.return_lse or sinks is not None
        return empty_results(method, tensors, key_heads, (self.tokens, self.key_tokens), with_lse)


def autocast_name(x: Tensor) -> str:
    """Returns the name of autocast's dtype for projections of x; "" if autocast is off or x is float64."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return ""
    dtype = torch.get_autocast_dtype(device_type)
    return next(name for name, candidate in AUTOCAST_DTYPES.items() if candidate == dtype)


def shard_tokens(method: AttentionMethod, layout: SequenceLayout | None, tokens: int) -> int:
    """Returns the number of tokens of this rank's sequence shard; a symbol while a graph is traced.

    Args:
        layout: layout over all ranks of the method or over its sequence axis; None if there is one shard.
        tokens: number of tokens of this rank.
    """
    if layout is None:
        return tokens
    # Not a sum of `sizes`: torch.compile would make each of them a symbol at the first length that changes it.
    head_ranks = method.shards // method.sequence_shards
    shard, ranks = method.shard // head_ranks, head_ranks if len(layout.sizes) == method.shards else 1
    return layout.ends[(shard + 1) * ranks] - layout.ends[shard * ranks]


# -- shapes of results ------------------------------------------------------------------------------------------------


def sequence_shard(method: AttentionMethod) -> int:
    """Returns the index of this rank's shard on the sequence axis."""
    return method.shard * method.sequence_shards // method.shards


def empty_results(
    method: AttentionMethod,
    tensors: Sequence[Tensor],
    key_heads: tuple[int, ...],
    shard_tokens: tuple[int, int],
    with_lse: bool,
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of an `AttentionCall` on tensors q, k and v.

    Args:
        key_heads: as in `AttentionSpec`.
        shard_tokens: numbers of queries and of keys of this rank's sequence shard.
        with_lse: True if the caller or the sinks need the lse of the local tokens.
    """
    q, k, v = expanded_shapes(*tensors)
    has_lse = with_lse or not method.redistributes_inputs
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3] if has_lse else (0,), dtype=accumulation_dtype(q.dtype))
    if not method.redistributes_inputs:
        return [out, lse]
    if len(tensors) > 3 and sends_latents(method, tensors, key_heads):
        expansion = Expansion.of(q, tensors[1], tensors[3])
        _, k, v, _ = tensors
        saved = method.empty_saved(q, k, v, key_heads, *shard_tokens, expansion=expansion)
        return [out, lse, *without_own_latents(method, saved)]
    return [out, lse, *method.empty_saved(q, k, v, key_heads, *shard_tokens)]


def latents_of(saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns a call's own rotary keys, latents and weight from the tensors saved for backward; empty without latents.

    After the fields of `Saved` come all three if `Saved` has other keys, otherwise the weight alone.
    """
    own_tensors = saved[len(Saved._fields) :]
    return own_tensors if len(own_tensors) != 1 else (*saved[1:3], *own_tensors)


def without_own_latents(method: AttentionMethod, saved: Saved) -> Saved:
    """Returns tensors saved by a call that sends latents, with empty k and v if these are the call's own.

    The results of an op must not be its inputs. Backward has the call's own latents anyway (`latents_of`).
    """
    empty = saved.k.new_empty(0)
    return saved._replace(k=empty, v=empty.clone()) if method.saves_own_latents else saved


def sends_latents(method: AttentionMethod, tensors: Sequence[Tensor], key_heads: tuple[int, ...]) -> bool:
    """Returns True if a method sends the latents of a call instead of expanded keys.

    Args:
        tensors: q, rotary keys, latents and the weight of their expansion.
    """
    q, k, _, weight = tensors
    return method.sends_latents(key_heads, TokenSizes.of(weight.shape, k.shape[3], q.dtype))


def sent_projections(
    method: AttentionMethod, x: Tensor, projections: Projections, key_heads: tuple[int, ...]
) -> Projections:
    """Returns projections of x to latents if a method sends these, otherwise `projections`, to keys and values.

    Args:
        key_heads: as in `AttentionSpec`.
    """
    latents = latents_of_projections(projections)
    if latents is None:
        return projections
    sizes = TokenSizes.of(latents.expansion().shape, latents.rotary_dim, projected_dtype(x))
    return latents if method.sends_latents(key_heads, sizes) else projections


def empty_projected_results(
    method: StagedMethod,
    x: Tensor,
    q: Tensor,
    v: Tensor,
    key_heads: tuple[int, ...],
    shard_tokens: int,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of a `ProjectedCall`, for q [..., D] and v [..., Dv]."""
    out, lse = method.empty_results(x.shape[:2], shard_tokens, key_heads, q, v.shape[3])
    local_lse = x.new_empty(out.shape[:3] if sinks is not None else (0,), dtype=accumulation_dtype(q.dtype))
    return [out, local_lse, lse]


# -- sinks -------------------------------------------------------------------------------------------------------------


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
