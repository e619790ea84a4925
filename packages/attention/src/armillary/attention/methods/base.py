"""What an attention method is, and what calling one does.

A method is a pair of plain functions, forward and backward, over local tensors. Calling it checks the call and runs the
pair through the one op that autograd sees (`autograd.py`). To add a method, write one file with a subclass, with what
it sends and computes (`comm_plan`) and allocates beside it, and with its entry (`entry.py`); and give it a line in
`registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Literal, Self, cast, overload

import torch
from torch import Tensor

from armillary.attention import compiled
from armillary.attention.autograd import (
    attend_compiled,
    attend_projected,
    attend_projected_compiled,
    check_transforms,
    eager,
)
from armillary.attention.calls import AttendsInStages, AttentionCall, head_sinks
from armillary.attention.checks import are_plain, as_autocast, autocasts, check_hidden, check_tensors, in_one_dtype
from armillary.attention.compiled import Traceable
from armillary.attention.kernels import Inputs, Kernel, Scores, choose_kernel
from armillary.attention.kernels.inputs import is_deterministic
from armillary.attention.layouts import layout_of, sequence_layout
from armillary.attention.mask import AttentionMask
from armillary.attention.projections import KnowsResults, Projections, one_token
from armillary.attention.recent import Recent
from armillary.attention.spec import AttentionOptions, AttentionSpec, Saved, key_heads_of
from armillary.core import Axis, SequenceLayout, compat


class Method(ABC):
    """Exact attention over a sequence that is sharded over the ranks of one or two mesh axes."""

    shards: int
    """Ranks that hold a part of the sequence each."""
    shard: int
    """Which of those parts this rank holds."""
    sequence_shards: int
    """Ranks on the sequence axis (P): as many as shards, but where a head axis divides the shards further."""
    redistributes_inputs: bool = False
    """Whether `forward` saves tensors other than the q, k, v, out and lse of this rank's own tokens."""
    projects_in_stages: bool = False
    """Whether `projected` makes q, k and v a few heads at a time, and again in backward."""
    head_axis: Axis | None = None
    """The axis that divides the heads, where there is one."""
    kernel: str | Kernel | None = None
    """The kernel of calls that name none, or its name; None: the first that takes the inputs."""

    number: int
    """By which a compiled graph finds the method."""
    _specs: Recent[tuple[tuple[Hashable, ...], AttentionOptions], AttentionSpec]
    """Calls that were checked before, by what was checked."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        method = super().__new__(cls)
        method.number = compiled.number(method)
        method._specs = Recent()
        return method

    def __getstate__(self) -> dict[str, Any]:
        """All but what it is known by, and what it knows: a copy is another method."""
        return {name: value for name, value in vars(self).items() if name not in ("number", "_specs")}

    @property
    def sequence_method(self) -> Method:
        """The method on the sequence axis alone: another one, where there is a head axis around it."""
        return self

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that the method works on, outermost first: those of its `inner` method, then its own `axis`."""
        inner: Method | None = getattr(self, "inner", None)
        axis: Axis | None = getattr(self, "axis", None)
        return (() if inner is None else inner.axes) + (() if axis is None else (axis,))

    def layout(self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None) -> SequenceLayout:
        """The layout over all ranks of the method, for the loader: "zigzag", "contiguous", "striped" or "balanced".

        Args:
            mask: what a balanced layout is balanced for; by default, causal.
        """
        return layout_of(kind, length, self.sequence_shards, mask)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        """out [B, T, H, Dv] of this rank's queries, and what `backward` needs."""

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> Any:
        """Starts sending q before there are keys: by default there is nothing to do.

        What it returns goes to `forward_prefetched`; called, it waits for what was sent.

        Args:
            key_heads, layout: as in `AttentionSpec`.
        """
        return None

    def forward_prefetched(
        self, started: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Saved]:
        """`forward`, where `prefetch_queries` has been called with q already."""
        return self.forward(q, k, v, spec)

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens, from dout [B, T, H, Dv]; in its dtype or wider, and nobody else's."""

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:  # noqa: B027 - most methods take any shapes
        """Refuses shapes that this method cannot do, with a `ValueError`; called before any communication."""

    def heads(self, heads: range) -> range:
        """Which of these query heads this rank attends with: all, unless a head axis divides them."""
        return heads

    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor:
        """lse [B, T, H] of this rank's queries."""
        return saved.lse

    def saved_like(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Saved:
        """Empty tensors shaped as what `forward` saves; for those that `redistributes_inputs`."""
        raise TypeError(f"{type(self).__name__} moves tensors and must say what it saves")

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        key_layout: SequenceLayout | None = None,
        kernel: str | Kernel | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        key_layout: SequenceLayout | None = None,
        kernel: str | Kernel | None = None,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        key_layout: SequenceLayout | None = None,
        kernel: str | Kernel | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over all keys of the sequence that the mask lets them see.

        Args:
            q: [B, T, H, D], this rank's tokens.
            k, v: [B, S, K, D] and [B, S, K, Dv]; K divides H; query head h uses key/value head h // (H / K). S = T, but
                for cross-attention.
            mask: in global positions.
            layout: how the sequence is sharded: over all ranks of the method, or over its sequence axis alone. May be
                left out where there is one shard.
            scale: of the scores, any finite number; 1 / sqrt(D) unless given.
            sinks: [H] or [S, H], one or S learned scores per head that take part in the softmax and have value 0
                (gpt-oss; MagiAttention's have S). Their gradient is this rank's share, to be summed over ranks as that
                of any parameter.
            softcap: c of c * tanh(score / c), where a kernel has it; finite and above 0.
            key_layout: how the keys are sharded, for cross-attention: as many shards as `layout`.
            kernel: a kernel, or the name of one, such as "dense"; by default the first that takes the inputs.
            return_lse: also return the log-sum-exp of the scores; it has no gradient, and backward refuses one.

        Returns:
            out [B, T, H, Dv] in the inputs' dtype; with `return_lse`, also lse [B, T, H] in the accumulation dtype. A
            query that sees no key gives 0 and lse = -inf.

        Under autocast, inputs of one dtype are computed in it: none of this is on autocast's lists. Inputs of several
        are cast to autocast's dtype, but for float64, as `scaled_dot_product_attention` casts them.

        There is no forward-mode AD, and no transform of torch.func (grad, vjp, jvp, vmap) reaches into this.

        Raises:
            ValueError: shapes, dtypes, layout or mask do not fit together, or no kernel takes them; an argument of
                another type; tensors that torch.func or forward-mode AD follows. Raised before any communication.
        """
        plain = are_plain(q, k, v, sinks)
        options = AttentionOptions(mask, layout, key_layout, scale, softcap, kernel, return_lse).checked()
        if not plain and any(given is not None and compat.is_dtensor(given) for given in (q, k, v, sinks)):
            from armillary.attention.parallel import attend_dtensors

            return attend_dtensors(self, q, k, v, sinks, options)
        if not q.dtype == k.dtype == v.dtype:
            q, k, v = as_autocast(q, k, v)
        if torch.compiler.is_compiling():
            out, lse = attend_compiled(self, q, k, v, sinks, options)
        else:
            call = AttentionCall(self, self.check_call(q, k, v, sinks, options), return_lse)
            out, lse, *_ = eager()(call, None, head_sinks(sinks), q, k, v)
        return (out, lse) if return_lse else out

    def projected(
        self,
        x: Tensor,
        projections: Projections,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        kernel: str | Kernel | None = None,
    ) -> Tensor:
        """Self-attention from hidden states: as calling the method with the projected q, k and v.

        A method that moves queries starts to as soon as they are there, and they travel while keys are multiplied.

        Args:
            x: [B, T, E], this rank's tokens; or a DTensor [B, N, E], see `parallel.project_dtensors`.
            projections: from x to q, k and v. All else as in `__call__`.

        Under autocast projections run as they do elsewhere, and what follows them does not; but q, k and v must have
        one dtype.

        Returns:
            out [B, T, H, Dv].

        Raises:
            ValueError: as `__call__`.
        """
        options = AttentionOptions(mask, layout, None, scale, softcap, kernel).checked()
        check_hidden(x, projections, sinks)
        if compat.is_dtensor(x) or (sinks is not None and compat.is_dtensor(sinks)):
            from armillary.attention.parallel import project_dtensors

            return project_dtensors(self, x, projections, sinks, options)
        if not torch.compiler.is_compiling():
            return self.project(x, projections, self.check_projected(x, projections, sinks, options), sinks)
        if not self.projects_in_stages:
            q, (k, v) = projections.q(x, range(projections.heads)), projections.kv(x, range(projections.key_heads))
            return attend_compiled(self, *in_one_dtype(q, k, v), sinks, options)[0]
        parts = projections.parts() if isinstance(projections, Traceable) else None
        if parts is not None:
            heads = projections.heads, projections.key_heads
            return attend_projected_compiled(self, x, heads, parts, sinks, options)
        from armillary.attention.untraced import project_untraced

        return project_untraced(self, x, projections, sinks, options)

    def project(self, x: Tensor, projections: Projections, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """Returns `projected(x, ...)` for a call that has been checked."""
        sinks = head_sinks(sinks)
        if self.projects_in_stages:
            return attend_projected(cast(AttendsInStages, self), spec, x, projections, sinks)
        q = projections.q(x, range(projections.heads))
        check_transforms(q)
        started = self.prefetch_queries(q.detach(), spec.key_heads, spec.layout)
        k, v = projections.kv(x, range(projections.key_heads))
        call = AttentionCall(self, spec, False, [] if started is None else [started])
        out, *_ = eager()(call, None, sinks, q, k, v)
        while call.started:  # the op has not run: a checkpoint had its results
            call.started.pop()()
        return out

    # -- what is checked before anything is sent ----------------------------------------------------------------------

    def check_call(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
    ) -> AttentionSpec:
        """The call, all of it checked. Of the tensors, only shapes, dtypes and devices are looked at.

        Calls that are alike in all of these give the same spec, which is found faster.
        """
        if options.kernel is None:
            options = options._replace(kernel=self.kernel)
        key = kind_of(q, k, v, sinks)
        return self._once(key, options, lambda: self._checked(q, k, v, sinks, options))

    def _once(
        self, key: tuple[Hashable, ...], options: AttentionOptions, check: Callable[[], AttentionSpec]
    ) -> AttentionSpec:
        """What `check` gives, found once for a key and options, of which masks are not looked into."""
        try:
            hash(key)
        except TypeError:  # sizes are symbolic
            return check()
        asked = (key, options)
        return self._specs.get(asked) or self._specs.add(asked, check(), options.mask)

    def _checked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
        inputs: Inputs | None = None,
    ) -> AttentionSpec:
        """`check_call`, where `inputs` may say what q, k and v stand for."""
        check_tensors(q, k, v, sinks)
        self.check(q, k, v)
        own = (self.shard, self.shards, self.sequence_shards)
        layout = sequence_layout(options.layout, q.shape[1], *own)
        key_layout = sequence_layout(options.key_layout or layout, k.shape[1], *own)
        options.mask.check(layout.length, key_layout.length, q.shape[0])
        scale = q.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
        return AttentionSpec(
            options.mask,
            layout,
            key_layout,
            Scores(scale, options.softcap),
            key_heads_of(q.shape[2], k.shape[2]),
            choose_kernel(inputs or Inputs.of(q, v, options.softcap, options.mask), options.kernel),
        )

    def call_for(
        self,
        x: Tensor,
        projections: Projections,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        kernel: str | Kernel | None = None,
    ) -> AttentionSpec:
        """The call that `projected` makes with these arguments, checked. Computes no more than one head of a token.

        Calls that are alike share one, as in `check_call`, where projections say what theirs follow from.
        """
        options = AttentionOptions(mask, layout, None, scale, softcap, kernel).checked()
        check_hidden(x, projections, sinks)
        if compat.is_dtensor(x):
            raise ValueError("x is a DTensor; a call is checked for what this rank has of it, x.to_local()")
        return self.check_projected(x, projections, sinks, options)

    def check_projected(
        self, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
    ) -> AttentionSpec:
        """`check_call`, of what the projections of x will be: of what they are made of, where they can say that."""
        kernel = self.kernel if options.kernel is None else options.kernel
        options = options._replace(kernel=kernel)
        made_of = cast(KnowsResults, projections).made_of() if hasattr(projections, "made_of") else None
        if made_of is None:
            return self._check_projected(x, projections, sinks, options)
        lowered = torch.get_autocast_dtype(x.device.type) if autocasts(x) else None
        key = ("projected", made_of, lowered, *kind_of(x, sinks))
        return self._once(key, options, lambda: self._check_projected(x, projections, sinks, options))

    def _check_projected(
        self, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
    ) -> AttentionSpec:
        q, k, v = one_token(x, projections)
        inputs = Inputs.of(q, v, options.softcap, options.mask)
        q = torch.empty((*x.shape[:2], projections.heads, q.shape[3]), dtype=q.dtype, device="meta")
        k, v = (
            torch.empty((*x.shape[:2], projections.key_heads, y.shape[3]), dtype=y.dtype, device="meta") for y in (k, v)
        )
        return self._checked(q, k, v, sinks, options, inputs)


def kind_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """All that a check looks at: of each tensor, and of torch's settings."""
    return is_deterministic(), *[x if x is None else (x.shape, x.dtype, x.device) for x in tensors]
