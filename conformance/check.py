"""Running one case on this rank, and judging on all ranks what came of it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance.calling import Calling, ConformingMethod
from conformance.case import Case
from conformance.limits import Off, judge
from conformance.memory import lay_out
from conformance.placing import Placing
from conformance.tensors import CasePart, CaseSharding, inputs


class Ran(NamedTuple):
    """What one rank has of a case: its part of the results, and what is wrong with it besides."""

    case: Case
    part: CasePart
    results: dict[str, Tensor]
    complaint: str


def check(
    attend: ConformingMethod, case: Case, *, device: str | torch.device = "cpu", over: DeviceMesh | None = None
) -> None:
    """Runs `case` and asserts that everything is as exact as the dtype allows. All ranks of the world must call it.

    Args:
        over: as in `errors`.

    Raises:
        AssertionError: naming the case, and each tensor with its error and its limit; on every rank alike.
    """
    off = errors(attend, case, device=device, over=over)
    wrong = [f"{name} off by {x.error:.2g} (limit {x.limit:.2g})" for name, x in off.items() if x.fraction > 1]
    assert not wrong, f"{case}: {', '.join(wrong)}"


def errors(
    attend: ConformingMethod, case: Case, *, device: str | torch.device = "cpu", over: DeviceMesh | None = None
) -> dict[str, Off]:
    """How far off out, lse and the gradients are (as far as needed), and may be: of all shards, put together again.

    Each is relative to the norm of what the oracle has. Any NaN, or an infinity of its own, makes it infinite. All
    ranks of the world must call it, or `attend_nothing`: replicas with seeds of their own, so that they are told apart.

    Args:
        over: the mesh that DTensors are over: the method's axes, outer ones first, and those of `Case.beside`.

    Raises:
        AssertionError: a wrong dtype or shape, inputs written to, or two runs that differ. Only after all
            communication, so that the ranks stay in step, and on every rank alike.
    """
    placing = Placing(case, over)
    sharding = CaseSharding.of(attend, case, *placing.sizes())
    mine = _ran(Calling(attend, case, sharding, placing), device)
    every = everyone(mine)
    speaker = next(rank for rank, ran in enumerate(every) if ran is not None and ran.case == case)
    verdict = everyone(_judged(case, sharding, every) if _rank() == speaker else None)[speaker]
    assert isinstance(verdict, dict), verdict
    return cast(dict[str, Off], verdict)


def attend_nothing() -> None:
    """What a rank does that has no part in a case, while others are in `errors`."""
    everyone(None)
    everyone(None)


def everyone(mine: Any) -> list[Any]:
    """What each rank of the world passes, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _judged(case: Case, sharding: CaseSharding, every: Sequence[Ran | None]) -> dict[str, Off] | str:
    """How far off the whole tensors are; or what is wrong besides."""
    ran = [ran for ran in every if ran is not None and ran.case == case]
    if complaints := sorted({each.complaint for each in ran if each.complaint}):
        return f"{case}: {'; '.join(complaints)}"
    parts = {each.part: each.results for each in ran}
    for each in ran:
        if differing := _differing(each.results, parts[each.part]):
            return f"{case}: {', '.join(differing)} differ between ranks that have the same {each.part}"
    names = list(ran[0].results)
    return judge(case, {name: sharding.join(name, {at: x[name] for at, x in parts.items()}) for name in names})


def _ran(calling: Calling, device: str | torch.device) -> Ran:
    """Runs the case twice on this rank's shards, in memory that nobody wrote to before."""
    case, part = calling.case, calling.part
    local = {name: calling.sharding.take(name, x.to(device), part) for name, x in inputs(case).items()}
    laid = lay_out(local, case)
    with _poisoned(list(local.values())):
        first = _run(calling, laid, disturb=True)
        second = _run(calling, laid, disturb=False)
    complaints = [f"{name} was written to" for name, x in laid.items() if not torch.equal(x, local[name])]
    complaints += [text for name, x in first.items() if (text := _form(x, name, calling, local))]
    complaints += [
        f"{name} differs between two runs, one with return_lse and another call before backward"
        for name in _differing(first, second)
    ]
    complaints += dict.fromkeys(calling.placing.complaints)
    return Ran(case, part, {name: x.cpu() for name, x in first.items()}, "; ".join(complaints))


def _run(calling: Calling, laid: Mapping[str, Tensor], disturb: bool) -> dict[str, Tensor]:
    """Forward and backward: out and the gradients that the case needs; with `disturb` also lse, where there is one.

    `disturb` makes another call in between, as the next layer does: what backward will use must survive it."""
    needs, placing = calling.case.needs, calling.placing
    given = {name: x for name, x in laid.items() if name != "dout"}
    leaves = {name: placing.place(name, x.detach()).requires_grad_(name[0] in needs) for name, x in given.items()}
    out, *lse = calling(leaves, with_lse=disturb)
    found = {"out": out} | ({"lse": lse[0]} if lse else {})
    results = {name: placing.local(name, x).detach() for name, x in found.items()}
    if disturb:
        others = {name: placing.place(name, x.detach().mul(-2)).requires_grad_() for name, x in given.items()}
        calling(others, with_lse=True)
    needed = {name: x for name, x in leaves.items() if x.requires_grad}
    if needed:
        out.backward(placing.place("out", laid["dout"].to(out.dtype)))
        results |= {f"d{name}": placing.local(name, cast(Tensor, x.grad), True) for name, x in needed.items()}
    return results


def _form(x: Tensor, name: str, calling: Calling, local: Mapping[str, Tensor]) -> str:
    """What is wrong with a result's shape and dtype: lse is float32 unless computed in float64."""
    case, dout = calling.case, local["dout"]
    if name in ("out", "lse"):
        wide = torch.promote_types(case.computed, torch.float32)
        shape, dtype = (dout.shape, case.computed) if name == "out" else (dout.shape[:3], wide)
    else:
        shape, dtype = local[name[1:]].shape, case.dtype
    if x.dtype != dtype:
        return f"{name} is {x.dtype}; it must be {dtype} for inputs in {case.dtype}"
    return "" if x.shape == shape else f"{name} has shape {tuple(x.shape)}; it must be {tuple(shape)}"


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Which tensors are not the same bits, of those in both."""
    both = [name for name in one if name in other]
    return [name for name in both if not torch.equal(one[name].nan_to_num(), other[name].nan_to_num())]


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
