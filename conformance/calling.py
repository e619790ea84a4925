"""The call of a case: under autocast, checkpointed, compiled, on DTensors, or from projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from conformance.case import Case
from conformance.placing import Placing
from conformance.tensors import CasePart, CaseSharding

Tensors = Mapping[str, Tensor]
Outcome = tuple[Tensor, ...]
"""(out,), or (out, lse)."""


class ConformingMethod(Protocol):
    """The interface of a tested method. Tensors are this rank's shards; the result is [B, T, H, Dv].

    The call also gets `key_layout`, `sinks`, `softcap` and `kernel` if the case has them. Some cases need more of a
    method: projected cases call `projected`, cases with drawn layouts read `shards` and `sequence_shards`, on DTensors
    also the axes of `sequence_method`, and cases with balanced layouts pass `layout` a mask.
    """

    @property
    def shard(self) -> int:
        """This rank's index in `layout`."""
        ...

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """Returns the layout of `length` tokens over all ranks of the method."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout,
        scale: float | None = None,
        return_lse: Any = False,
    ) -> Any:
        """Returns out, or (out, lse [B, T, H]) if `return_lse` is True."""
        ...


@dataclass(frozen=True)
class CaseCall:
    """A case on a method, as a function of this rank's tensors.

    The call runs as the case says: under autocast, in a checkpoint, compiled, on DTensors or from projections.
    """

    attend: ConformingMethod
    case: Case
    sharding: CaseSharding
    placing: Placing

    @property
    def part(self) -> CasePart:
        """This rank's part of the case."""
        return self.placing.part(self.attend.shard)

    def __call__(self, tensors: Tensors, with_lse: bool) -> Outcome:
        """Returns (out,) or (out, lse) for this rank's tensors; DTensors if the case has them."""
        case = self.case
        call = partial(self._projected, tensors) if case.projected else partial(self._attended, with_lse)
        call = torch.compile(call, backend="aot_eager", fullgraph=not case.projected) if case.compiled else call
        sinks = tensors.get("sinks")
        keys = ("k", "v") if case.latent is None else ("k_rotary", "v_latent")
        inputs = (tensors["x"],) if case.projected else (tensors["q"], *(tensors[name] for name in keys))
        with torch.autocast(inputs[0].device.type, dtype=case.autocast, enabled=case.autocast is not None):
            return _checkpointed(case.saving, call, *inputs, sinks, *([tensors["wkv"]] if case.latent else []))

    def _projected(self, tensors: Tensors, x: Tensor, sinks: Tensor | None) -> Outcome:
        linear = Linear(tensors["wq"], tensors["wk"], tensors["wv"], self.case, self.sharding.heads)
        return (cast(Any, self.attend).projected(x, linear, **self._options(sinks)),)

    def _attended(
        self, with_lse: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, expansion: Tensor | None = None
    ) -> Outcome:
        latents: dict[str, Any] = {} if expansion is None else {"expansion": expansion}
        result = self.attend(q, k, v, **self._options(sinks), **latents, return_lse=with_lse)
        outcome: Sequence[Tensor] = result if with_lse else (result,)
        # Compiled and reentrant calls pass zeros as the gradient of an unused lse, as if a loss depended on it.
        if self.case.compiled or self.case.saving == "reentrant":
            outcome = (outcome[0], *(lse.detach() for lse in outcome[1:]))
        return tuple(outcome)

    def _options(self, sinks: Tensor | None) -> dict[str, Any]:
        """Returns the keyword arguments of the case. Defaults are left out, so that a method need not accept all."""
        case = self.case
        mask = self.placing.mask(self.part)
        required: dict[str, Any] = {"mask": mask, "layout": self.sharding.layout, "scale": case.scale}
        optional: dict[str, Any] = {"sinks": sinks, "softcap": case.softcap, "kernel": case.kernel}
        optional["key_layout"] = self.sharding.key_layout if case.is_cross_attention else None
        return required | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class Linear:
    """Projections without bias: q = x wq^T, and likewise k and v. `parts` is the number of parts of the heads."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    case: Case
    parts: int = 1

    @property
    def heads(self) -> int:
        return self.case.heads // self.parts

    @property
    def key_heads(self) -> int:
        return self.case.kv_heads // self.parts

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return self._of(x, self.wq, heads, self.case.head_dim)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._of(x, self.wk, heads, self.case.head_dim), self._of(x, self.wv, heads, self.case.value_dim)

    def parameters(self) -> tuple[Tensor, ...]:
        return self.wq, self.wk, self.wv

    def _of(self, x: Tensor, weight: Tensor, heads: Sequence[int], dim: int) -> Tensor:
        rows = weight.unflatten(0, (-1, dim))[list(heads)].flatten(0, 1)
        return F.linear(x, rows).unflatten(2, (-1, dim))


def _checkpointed(saving: str, call: Callable[..., Outcome], *inputs: Tensor | None) -> Outcome:
    match saving:
        case "autograd":
            return call(*inputs)
        case "selective":
            contexts = partial(create_selective_checkpoint_contexts, _must_save)
            return checkpoint(call, *inputs, use_reentrant=False, context_fn=contexts)
        case _:
            return checkpoint(call, *inputs, use_reentrant=saving == "reentrant")


def _must_save(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = op is torch.ops.armillary.attention.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
