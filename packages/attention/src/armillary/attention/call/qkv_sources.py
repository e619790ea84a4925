"""Sources of q, k and v, a few heads at a time, for methods that work in stages. They also sum the gradients.

`Finished` has the tensors; `Projected` computes them from hidden states, by the projections of a model, whenever a
stage asks, in forward and again in backward. A method asks its source for all that it sends and attends with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.recompute import GradientSums, RNGReplay, autocast_enabled, capture_autocast
from armillary.attention.tiling.latents import Expansion
from armillary.core import accumulation_dtype
from armillary.core.internal import at_tokens, chunks

Heads = Sequence[int]
"""Indices of query heads or of key/value heads."""
Project = Callable[["Projections", Tensor], Sequence[Tensor]]
"""Computes some heads of q, or of k and v, from projections and x."""

# -- projections of a model -------------------------------------------------------------------------------------------


class Projections(Protocol):
    """Projects local hidden states x [B, T, E] to heads, including norm, bias, RoPE and LoRA.

    A method may request any heads in any order, so that not all heads need exist at once.
    """

    @property
    def heads(self) -> int:
        """Query heads, H."""
        ...

    @property
    def key_heads(self) -> int:
        """Key/value heads, K."""
        ...

    def q(self, x: Tensor, heads: Heads) -> Tensor:
        """Returns q [B, T, len(heads), D]."""
        ...

    def kv(self, x: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        """Returns k [B, T, len(heads), D] and v [B, T, len(heads), Dv]."""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """Returns the parameters that q and kv use. Called whenever they are needed, because FSDP swaps parameters."""
        ...


@runtime_checkable
class TokenProjections(Projections, Protocol):
    """Projections that can project some tokens alone, so that no intermediate exists for all tokens at once."""

    def of_tokens(self, tokens: slice) -> Self:
        """Returns the same projections for `x[:, tokens]`."""
        ...


class CacheableProjections(Projections, Protocol):
    """Projections with a key for the dims and dtypes of q, k and v, so that equal calls are checked once."""

    def cache_key(self) -> Hashable | None:
        """Returns a key such that projections with equal keys give equal dims, dtypes and errors for equal x.

        It does not depend on values of tensors. None if there is no such key.
        """
        ...


class LatentProjections(Projections, Protocol):
    """Projections to rotary keys and latents, from which attention expands keys and values (`tiling/latents.py`).

    `kv(x, (0,))` returns a rotary key [B, T, 1, Dr] and a latent [B, T, 1, L] of each token.
    """

    @property
    def key_rows(self) -> int:
        """D - Dr, the rows of `expansion` for keys."""
        ...

    @property
    def rotary_dim(self) -> int:
        """Dr."""
        ...

    def expansion(self) -> Tensor:
        """Returns the weight [K, D - Dr + Dv, L] of the expansion, of which autograd knows the parameters."""
        ...


class ExpandsLatents(Projections, Protocol):
    """Projections whose `kv` expands latents, and which can leave that to attention, so that latents are sent."""

    def latents(self) -> LatentProjections | None:
        """Returns projections to the latents; None if the expansion is more than a product with a weight."""
        ...


def latents_of_projections(projections: Projections) -> LatentProjections | None:
    """Returns `latents()` of `ExpandsLatents`; None for other projections."""
    # Not by `isinstance`, which dynamo cannot trace for a Protocol.
    return cast(ExpandsLatents, projections).latents() if hasattr(projections, "latents") else None


class CollectsGradients(Projections, Protocol):
    """Projections that can add the weight gradients of some heads and tokens to sums, without a full-size temporary."""

    def collecting(self, totals: GradientSums) -> Self:
        """Returns projections whose backward adds weight gradients to `totals` instead of returning them."""
        ...


class ProjectionParts(NamedTuple):
    """Everything from which a compiled graph rebuilds projections, in types that an op takes.

    Args:
        projector: registered number of the `Projector`, as a tensor.
        head_dim, value_dim: D and Dv.
        tensors: the argument of `Projector.projections_of`.
        parameters: those of `Projections.parameters()` that require a gradient, each once, in order; of a DTensor the
            local part.
    """

    projector: Tensor
    head_dim: int
    value_dim: int
    tensors: list[Tensor]
    parameters: list[Tensor]


@runtime_checkable
class Traceable(Protocol):
    """Projections that a compiled graph can rebuild from parts."""

    def parts(self) -> ProjectionParts | None:
        """Returns the parts from which a `Projector` rebuilds equal projections; None if it cannot."""
        ...


class Projector(Protocol):
    """A module that makes projections. It must be registered (`register_as_tensor`) before a graph is traced."""

    def projections_of(self, tensors: Sequence[Tensor]) -> Projections:
        """Returns projections that use `tensors` and the module's current parameters."""
        ...


@torch.no_grad()
def one_token(x: Tensor, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one head of q, k and v, from which dims and dtypes are read.

    Of one token, if the projections are `TokenProjections`; otherwise of all.
    """
    first = slice(0, 1)
    if isinstance(projections, TokenProjections):
        x, projections = x[:, first], projections.of_tokens(first)
    with capture_autocast(x.device.type)():
        return projections.q(x, range(1)), *projections.kv(x, range(1))


# -- sources ----------------------------------------------------------------------------------------------------------


class QKVSource(Protocol):
    """q, k and v of the local tokens, a few heads at a time."""

    @property
    def device_type(self) -> str:
        """Device type of the tensors, such as "cpu"."""
        ...

    def q(self, heads: Heads) -> Tensor:
        """Returns q [B, T, len(heads), D]."""
        ...

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Returns k [B, T, len(heads), D] and v [B, T, len(heads), Dv]."""
        ...

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        """Adds the gradient of `q(heads)`, given as consecutive parts [B, T, h, D] of its heads."""
        ...

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of `kv(heads)`."""
        ...


@dataclass
class Finished(QKVSource):
    """Existing tensors q [B, T, H, D], k [B, S, K, D] and v [B, S, K, Dv], and their gradients."""

    tensors: tuple[Tensor, Tensor, Tensor]
    grads: tuple[Tensor, ...] = ()

    @property
    def device_type(self) -> str:
        return self.tensors[0].device.type

    def q(self, heads: Heads) -> Tensor:
        return select_heads(self.tensors[0], heads)

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return select_heads(self.tensors[1], heads), select_heads(self.tensors[2], heads)

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        write_heads(self.gradients()[0], heads, dq)

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        for total, grad in zip(self.gradients()[1:], (dk, dv), strict=True):
            update_heads(total, heads, grad, Tensor.add_)

    def gradients(self) -> tuple[Tensor, ...]:
        """Returns (dq, dk, dv). dk and dv are in the accumulation dtype: several stages may add to a shared head."""
        if not self.grads:
            # Each query head is in one stage only. So its dq is written once, and needs neither zeros nor a wide dtype.
            q, k, v = self.tensors
            self.grads = (
                torch.empty_like(q),
                *(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (k, v)),
            )
        return self.grads


@dataclass
class Projected(QKVSource):
    """Projects q, k and v from x on request, in forward and again in backward. Saves only x.

    Projections run in the autocast state in which this object was created.

    Args:
        x: [B, T, E], the local tokens.
        piece: number of tokens to project at once, if the projections are `TokenProjections`; None: as in `chunks`.
        dx: the gradient of x, to which `add_q` and `add_kv` add in place; None if it is not needed.
        totals: sums of the gradients of the current parameters. FSDP replaces parameters between forward and backward.
        draws: random states of the projections (for dropout), which backward replays.
    """

    x: Tensor
    projections: Projections
    piece: int | None = None
    dx: Tensor | None = None
    totals: GradientSums = field(default_factory=GradientSums)
    draws: RNGReplay = field(default_factory=RNGReplay)

    def __post_init__(self) -> None:
        self.autocast: Callable[[], AbstractContextManager[Any]] = capture_autocast(self.device_type)

    @property
    def device_type(self) -> str:
        return self.x.device.type

    @cached_property
    def expansion(self) -> Expansion | None:
        """The expansion of `kv`, if the projections are `LatentProjections`; `add_kv` adds its gradient to `totals`."""
        if not hasattr(self.projections, "expansion"):
            return None
        weight, is_backward = self._weight().detach(), self.dx is not None or bool(self.totals.parameters)
        grad = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if is_backward else None
        return Expansion(weight, cast(LatentProjections, self.projections).key_rows, grad)

    def q(self, heads: Heads) -> Tensor:
        (q,) = self._project(("q", *heads), lambda projections, x: (projections.q(x, heads),))
        return q

    def kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        k, v = self._project(("kv", *heads), lambda projections, x: projections.kv(x, heads))
        return k, v

    def add_q(self, heads: Heads, dq: Sequence[Tensor]) -> None:
        is_subset = len(heads) < self.projections.heads
        self._add(("q", *heads), lambda projections, x: (projections.q(x, heads),), [dq], is_subset)

    def add_kv(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        is_subset = len(heads) < self.projections.key_heads
        self._add(("kv", *heads), lambda projections, x: projections.kv(x, heads), [(dk,), (dv,)], is_subset)
        if self.expansion is None or self.expansion.weight_grad is None:
            return
        # Latents, whose gradients come once, after those of all keys and values: the weight's gradient is complete.
        weight, parameters = self._weight(), self.totals.parameters
        if weight.requires_grad and parameters:
            grad = self.expansion.weight_grad.to(weight.dtype)
            self.totals.add(torch.autograd.grad(weight, parameters, grad, allow_unused=True))

    @torch.enable_grad()
    def _weight(self) -> Tensor:
        """Returns the weight of the expansion, in the dtype of the projected tensors."""
        with self.autocast():
            return cast(LatentProjections, self.projections).expansion().to(projected_dtype(self.x))

    @torch.no_grad()
    def _project(self, name: Hashable, project: Project) -> Sequence[Tensor]:
        """Projects all tokens piece by piece, so that no intermediate exists for all tokens at once.

        Args:
            name: names the call of `project` in `draws`.
        """
        pieces, results = self._pieces(), list[Tensor]()
        for tokens, projections in pieces:
            with self.autocast(), self.draws.at((name, tokens.start), self.x.device):
                heads = project(projections, at_tokens(self.x, tokens))
            if len(pieces) == 1:
                return heads
            results = results or [y.new_empty((y.shape[0], self.x.shape[1], *y.shape[2:])) for y in heads]
            for result, y in zip(results, heads, strict=True):
                result[:, tokens] = y
        return results

    def _add(self, name: Hashable, project: Project, grads: Sequence[Sequence[Tensor]], is_subset: bool) -> None:
        """Differentiates `project`: adds the gradients of x and of the parameters to `dx` and `totals`.

        Args:
            name: as in the `_project` of forward.
            grads: for each projected tensor, its gradient as consecutive parts of its heads.
            is_subset: True if these are not all heads, so that other calls add to the same parameters.
        """
        pieces = self._pieces() if self.dx is not None or self.totals.parameters else []
        for tokens, projections in pieces:
            # Autograd would allocate a gradient of the full weight for each stage and piece. Projections that can
            # collect add to `totals` in place instead.
            if (is_subset or len(pieces) > 1) and hasattr(projections, "collecting"):
                projections = cast(CollectsGradients, projections).collecting(self.totals)
            # 1. Project again, now with autograd, in the autocast state of forward and with its random numbers.
            x = at_tokens(self.x, tokens).detach().requires_grad_(self.dx is not None)
            with torch.enable_grad(), self.autocast(), self.draws.at((name, tokens.start), x.device):
                heads = project(projections, x)
            # 2. Differentiate this piece before the next one is projected, so that one piece's graph exists at a time.
            dheads = [concatenate([at_tokens(addend, tokens) for addend in addends]) for addends in grads]
            outputs = [(y, dy.to(y.dtype)) for y, dy in zip(heads, dheads, strict=True) if y.requires_grad]
            if outputs:
                heads, dheads = zip(*outputs, strict=True)
                parameters = self.totals.parameters
                inputs = [*parameters, *([] if self.dx is None else [x])]
                input_grads: list[Tensor | None] = list(torch.autograd.grad(heads, inputs, dheads, allow_unused=True))
                self.totals.add(input_grads[: len(parameters)])
                if self.dx is not None and input_grads[-1] is not None:
                    at_tokens(self.dx, tokens).add_(input_grads[-1])
                del input_grads
            del heads, dheads, outputs

    def _pieces(self) -> list[tuple[slice, Projections]]:
        """Returns the tokens of each piece, with its projections: one piece unless these are `TokenProjections`."""
        pieces = chunks(self.x.shape[1], self.piece)
        if isinstance(self.projections, TokenProjections) and len(pieces) > 1:
            return [(tokens, self.projections.of_tokens(tokens)) for tokens in pieces]
        return [(slice(0, self.x.shape[1]), self.projections)]


def projected_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of projections of x: autocast's dtype, unless autocast is off or x is float64."""
    if not autocast_enabled(x) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


# -- heads of a tensor ------------------------------------------------------------------------------------------------


def select_heads(x: Tensor, heads: Heads, dim: int = 2) -> Tensor:
    """Returns some heads of x along `dim`: a view if they rise in equal steps, otherwise a copy."""
    return concatenate([_view(x, run, dim) for run in head_slices(tuple(heads))], dim)


def write_heads(x: Tensor, heads: Heads, tensors: Sequence[Tensor]) -> None:
    """Overwrites some heads of x [B, T, H, D].

    Args:
        tensors: their values, as consecutive parts [B, T, h, D].
    """
    start = 0
    for tensor in tensors:
        update_heads(x, heads[start : start + tensor.shape[2]], tensor, Tensor.copy_)
        start += tensor.shape[2]


def update_heads(x: Tensor, heads: Heads, values: Tensor, op: Callable[[Tensor, Tensor], object], dim: int = 2) -> None:
    """Applies `op` to some heads of x in place.

    Args:
        op: `Tensor.copy_` or `Tensor.add_`.
    """
    start = 0
    for run in head_slices(tuple(heads)):
        target = _view(x, run, dim)
        op(target, values if target.shape[dim] == values.shape[dim] else values.narrow(dim, start, target.shape[dim]))
        start += target.shape[dim]


def concatenate(tensors: list[Tensor], dim: int = 2) -> Tensor:
    """Concatenates tensors [B, T, h, D] along `dim`. Returns a single tensor itself instead of a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _view(x: Tensor, run: slice, dim: int) -> Tensor:
    return x if run == slice(0, x.shape[dim], 1) else x[(slice(None),) * dim + (run,)]


@lru_cache(maxsize=1024)
def head_slices(heads: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns slices with positive steps that select the heads in order; one empty slice for no heads."""
    # Slices, because indexing with a list would copy the list to the GPU and wait for it.
    if not heads:
        return (slice(0, 0, 1),)
    start = heads[0]
    step = max(1, heads[1] - start) if len(heads) > 1 else 1
    stop = next((i for i in range(1, len(heads)) if heads[i] != start + i * step), len(heads))
    first = slice(start, heads[stop - 1] + 1, step)
    return (first, *head_slices(heads[stop:])) if stop < len(heads) else (first,)
