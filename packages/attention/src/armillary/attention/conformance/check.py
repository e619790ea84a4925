"""Running one case on this rank, and judging what came of it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from armillary.attention.conformance.case import Case
from armillary.attention.conformance.expected import Sharding, as_returned, error, expected, inputs, limits
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout


class Method(Protocol):
    """What the suite needs of a method. Tensors are this rank's shards; the result is [B, T, H, Dv].

    It is also given `key_layout`, `sinks` and `softcap`, where a case has them.
    """

    @property
    def shard(self) -> int:
        """This rank's index in `layout`."""
        ...

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """The layout over all ranks of the method."""
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
        """out, or (out, lse [B, T, H]) with `return_lse`, a bool."""
        ...


def sharding_of(attend: Method, case: Case) -> Sharding:
    """Who has what of the case's tensors."""
    layout = attend.layout(case.length, kind=case.kind)
    return Sharding(layout, attend.layout(case.keys, kind=case.key_kind or case.kind))


def check(attend: Method, case: Case, *, device: str | torch.device = "cpu") -> None:
    """Runs `case` on this rank and asserts that everything is as exact as the dtype allows. All ranks must call it.

    Raises:
        AssertionError: naming the case, and each tensor with its error and its limit.
    """
    found = errors(attend, case, device=device)
    allowed = limits(case, sharding_of(attend, case))
    wrong = [
        f"{name} off by {found[name]:.2g} (limit {allowed[name]:.2g})" for name in found if found[name] > allowed[name]
    ]
    assert not wrong, f"{case}: {', '.join(wrong)}"


def errors(attend: Method, case: Case, *, device: str | torch.device = "cpu") -> dict[str, float]:
    """Relative errors of this rank's out, lse and gradients (dq, dk, dv, dsinks, as far as needed).

    Each is relative to what the oracle has on this shard; dsinks is the share of this rank's queries. Any NaN, or an
    infinity of its own, makes it infinite.

    Raises:
        AssertionError: a wrong dtype or shape, inputs written to, or two runs that differ. Only after all
            communication, so that the ranks stay in step.
    """
    sharding, shard = sharding_of(attend, case), attend.shard
    local = {name: sharding.take(name, x.to(device), shard) for name, x in inputs(case).items()}
    laid = _lay_out(local, case)
    with _poisoned(list(local.values())):
        first = _run(attend, case, sharding, laid, disturb=True)
        second = _run(attend, case, sharding, laid, disturb=False)
    for name, x in laid.items():
        assert torch.equal(x, local[name]), f"{case}: {name} was written to"
    wanted = {name: sharding.take(name, x, shard) for name, x in expected(case).items()}
    for name, x in first.items():
        _assert_form(x, as_returned(name, wanted[name]), case, name)
    for name, x in second.items():
        same = torch.equal(x.nan_to_num(), first[name].nan_to_num())
        assert same, f"{case}: {name} differs between two runs, one with return_lse and another call before backward"
    return {name: error(x.cpu(), wanted[name], expected(case)[name]) for name, x in first.items()}


def _run(
    attend: Method, case: Case, sharding: Sharding, laid: Mapping[str, Tensor], disturb: bool
) -> dict[str, Tensor]:
    """Forward and backward: out and the gradients that the case needs; with `disturb` also lse.

    `disturb` makes another call in between, as the next layer does: what backward will use must survive it."""
    leaves = {name: x.detach().requires_grad_(name[0] in case.needs) for name, x in laid.items() if name != "dout"}
    given = _arguments(case, sharding)

    def call(tensors: Mapping[str, Tensor]) -> Any:
        sinks: dict[str, Any] = {"sinks": tensors["sinks"]} if case.sinks else {}
        return attend(tensors["q"], tensors["k"], tensors["v"], **given, **sinks, return_lse=disturb)

    results: dict[str, Tensor] = {}
    if disturb:
        out, lse = call(leaves)
        results |= {"out": out.detach(), "lse": lse.detach()}
        call({name: x.detach().mul(-2).requires_grad_() for name, x in leaves.items()})
    else:
        out = call(leaves)
        results["out"] = out.detach()
    needed = {name: x for name, x in leaves.items() if x.requires_grad}
    if needed:
        gradients = torch.autograd.grad(out, list(needed.values()), laid["dout"])
        results |= {f"d{name}": gradient for name, gradient in zip(needed, gradients, strict=True)}
    return results


def _arguments(case: Case, sharding: Sharding) -> dict[str, Any]:
    """What the case asks for besides tensors; only what it asks for, so that a method need not know the rest."""
    given: dict[str, Any] = {"mask": case.mask, "layout": sharding.layout, "scale": case.scale}
    if case.crosses:
        given["key_layout"] = sharding.key_layout
    if case.softcap is not None:
        given["softcap"] = case.softcap
    return given


def _lay_out(local: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The same values in the memory that the case asks for: views whose storage is larger or in another order."""
    copies = {name: x.clone() for name, x in local.items()}
    if case.memory == "transposed":
        return copies | {
            name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in local.items() if x.ndim > 1
        }
    if case.memory == "plain":
        return copies
    together = [name for name in "qkv" if local[name].shape[1] == local["k"].shape[1]]
    packed = torch.cat([local[name].flatten(2) for name in together], dim=-1)
    ends = list(accumulate(local[name].shape[2] * local[name].shape[3] for name in together))
    views = torch.tensor_split(packed, ends[:-1], dim=-1)
    return copies | {name: x.unflatten(2, local[name].shape[2:]) for name, x in zip(together, views, strict=True)}


@contextmanager
def _poisoned(like: Sequence[Tensor]) -> Generator[None]:
    """NaN in memory that nobody has written to: in what `torch.empty` returns, and in freed blocks of these sizes."""
    stale = [torch.full_like(x, torch.nan, dtype=d) for x in like for d in (x.dtype, torch.float32) for _ in range(3)]
    del stale
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # makes torch.empty fill what it returns
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _assert_form(x: Tensor, wanted: Tensor, case: Case, name: str) -> None:
    """Right shape, and the inputs' dtype; for lse float32 unless they are float64."""
    dtype = torch.float32 if name == "lse" and case.dtype != torch.float64 else case.dtype
    assert x.dtype == dtype, f"{case}: {name} is {x.dtype}; it must be {dtype} for inputs in {case.dtype}"
    shapes = tuple(x.shape), tuple(wanted.shape)
    assert x.shape == wanted.shape, f"{case}: {name} has shape {shapes[0]}; it must be {shapes[1]}"
