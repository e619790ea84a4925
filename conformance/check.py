"""Runs one case on this rank and compares the joined results with the oracle."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance.calling import CaseCall, ConformingMethod
from conformance.case import Case
from conformance.limits import ErrorAndLimit, judge
from conformance.memory import lay_out
from conformance.placing import Placing
from conformance.tensors import CasePart, CaseSharding, inputs


class RankResult(NamedTuple):
    """One rank's part of the results of a case, and a complaint: text about wrong dtypes, shapes or bits, or ""."""

    case: Case
    part: CasePart
    results: dict[str, Tensor]
    complaint: str


def check(
    attend: ConformingMethod, case: Case, *, device: str | torch.device = "cpu", dtensor_mesh: DeviceMesh | None = None
) -> None:
    """Runs `case` and asserts that every error is within its limit. All ranks of the world must call it.

    Args:
        dtensor_mesh: as in `errors`.

    Raises:
        AssertionError: names the case and each tensor with its error and its limit; the same on every rank.
    """
    tensor_errors = errors(attend, case, device=device, dtensor_mesh=dtensor_mesh)
    wrong = [
        f"{name} off by {x.error:.2g} (limit {x.limit:.2g})" for name, x in tensor_errors.items() if x.fraction > 1
    ]
    assert not wrong, f"{case}: {', '.join(wrong)}"


def errors(
    attend: ConformingMethod, case: Case, *, device: str | torch.device = "cpu", dtensor_mesh: DeviceMesh | None = None
) -> dict[str, ErrorAndLimit]:
    """Returns the errors and limits of out, lse and the needed gradients, joined from all shards.

    Errors are relative to the norm of the oracle's tensor; a NaN or an infinity makes them infinite. All ranks of the
    world must call it, or `attend_nothing`. Groups of ranks that run the method independently need cases with different
    seeds.

    Args:
        dtensor_mesh: mesh of DTensors: the method's axes, outer ones first, and those of `Case.beside`.

    Raises:
        AssertionError: a wrong dtype, shape or placement, an input that was written to, or runs or ranks that differ.
            The same on every rank, and raised after all communication, so that no rank waits for another.
    """
    if case.latent is not None:
        cast(Any, attend).send_latents = case.send_latents
    placing = Placing(case, dtensor_mesh)
    sharding = CaseSharding.of(attend, case, *placing.sizes())
    results = _gather_on_last(_run_twice(CaseCall(attend, case, sharding, placing), device))
    # The last rank judges all cases. It takes part in each, because methods run on the last ranks of the world.
    # Groups of ranks that run the method independently have different cases, all of which it judges.
    verdicts: list[tuple[Case, dict[str, ErrorAndLimit] | str]] = []
    for judged in dict.fromkeys(result.case for result in results if result is not None):
        judged_sharding = CaseSharding.of(attend, judged, *Placing(judged, dtensor_mesh).sizes())
        verdicts.append((judged, _judge_results(judged, judged_sharding, results)))
    verdict = next(verdict for judged, verdict in _broadcast_from_last(verdicts) if judged == case)
    assert isinstance(verdict, dict), verdict
    return verdict


def attend_nothing() -> None:
    """Takes part in the communication of `errors`, on a rank that does not run the case."""
    _gather_on_last(None)
    _broadcast_from_last(None)


def _gather_on_last(value: RankResult | None) -> list[RankResult | None]:
    """Returns the value of each rank of the world on the last rank, and an empty list on other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    last = dist.get_world_size() - 1
    values: list[RankResult | None] = [None] * (last + 1 if dist.get_rank() == last else 0)
    dist.gather_object(value, values or None, dst=last)
    return values


def _broadcast_from_last(value: Any) -> Any:
    """Returns the last rank's value on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_world_size() - 1)
    return values[0]


def _judge_results(
    case: Case, sharding: CaseSharding, results: Sequence[RankResult | None]
) -> dict[str, ErrorAndLimit] | str:
    """Returns the errors of the joined tensors, or a complaint."""
    case_results = [result for result in results if result is not None and result.case == case]
    if complaints := sorted({result.complaint for result in case_results if result.complaint}):
        return f"{case}: {'; '.join(complaints)}"
    parts = {result.part: result.results for result in case_results}
    for result in case_results:
        if differing := _differing(result.results, parts[result.part]):
            return f"{case}: {', '.join(differing)} differ between ranks that have the same {result.part}"
    names = list(case_results[0].results)
    return judge(case, {name: sharding.join(name, {at: x[name] for at, x in parts.items()}) for name in names})


def _run_twice(call: CaseCall, device: str | torch.device) -> RankResult:
    """Runs the case twice on this rank's shards, in memory filled with NaN."""
    case, part = call.case, call.part
    local = {name: call.sharding.take(name, x.to(device), part) for name, x in inputs(case).items()}
    strided_inputs = lay_out(local, case)
    with _uninitialized_as_nan(list(local.values())):
        first = _run(call, strided_inputs, call_between=True)
        second = _run(call, strided_inputs, call_between=False)
    complaints = [f"{name} was written to" for name, x in strided_inputs.items() if not torch.equal(x, local[name])]
    complaints += [text for name, x in first.items() if (text := _wrong_form(x, name, call, local))]
    complaints += [
        f"{name} differs between two runs, one with return_lse and another call before backward"
        for name in _differing(first, second)
    ]
    complaints += dict.fromkeys(call.placing.complaints)
    return RankResult(case, part, {name: x.cpu() for name, x in first.items()}, "; ".join(complaints))


def _run(call: CaseCall, strided_inputs: Mapping[str, Tensor], call_between: bool) -> dict[str, Tensor]:
    """Returns out and the gradients that the case needs; with `call_between` also lse, if the method has one.

    Args:
        call_between: True makes another call between forward and backward, as the next layer does, which must not
            change the saved tensors.
    """
    needs, placing = call.case.needs, call.placing
    inputs = {name: x for name, x in strided_inputs.items() if name != "dout"}
    leaves = {name: placing.place(name, x.detach()).requires_grad_(name[0] in needs) for name, x in inputs.items()}
    out, *lse = call(leaves, with_lse=call_between)
    outputs = {"out": out} | ({"lse": lse[0]} if lse else {})
    results = {name: placing.local(name, x).detach() for name, x in outputs.items()}
    if call_between:
        next_layer = {name: placing.place(name, x.detach().mul(-2)).requires_grad_() for name, x in inputs.items()}
        call(next_layer, with_lse=True)
    trained = {name: x for name, x in leaves.items() if x.requires_grad}
    if trained:
        out.backward(placing.place("out", strided_inputs["dout"].to(out.dtype)))
        results |= {f"d{name}": placing.local(name, cast(Tensor, x.grad), True) for name, x in trained.items()}
    return results


def _wrong_form(x: Tensor, name: str, call: CaseCall, local: Mapping[str, Tensor]) -> str:
    """Returns a complaint about a result's shape or dtype, or "". lse is float32 unless computed in float64."""
    case, dout = call.case, local["dout"]
    if name in ("out", "lse"):
        wide = torch.promote_types(case.compute_dtype, torch.float32)
        shape, dtype = (dout.shape, case.compute_dtype) if name == "out" else (dout.shape[:3], wide)
    else:
        shape, dtype = local[name[1:]].shape, case.dtype
    if x.dtype != dtype:
        return f"{name} is {x.dtype}; it must be {dtype} for inputs in {case.dtype}"
    return "" if x.shape == shape else f"{name} has shape {tuple(x.shape)}; it must be {tuple(shape)}"


def _differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that are in both mappings and differ in a bit."""
    names = [name for name in first if name in second]
    return [name for name in names if not torch.equal(first[name].nan_to_num(), second[name].nan_to_num())]


@contextmanager
def _uninitialized_as_nan(like: Sequence[Tensor]) -> Generator[None]:
    """Context in which uninitialized memory is NaN: results of `torch.empty`, and freed blocks of these sizes."""
    blocks = [torch.full_like(x, torch.nan, dtype=d) for x in like for d in (x.dtype, torch.float32) for _ in range(3)]
    del blocks
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # makes torch.empty fill its result
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
