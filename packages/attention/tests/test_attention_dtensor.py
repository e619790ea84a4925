"""Placements that attention on DTensors accepts; the conformance suite compares its results."""

from collections.abc import Callable
from itertools import product

import torch
from split_states import Split
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from armillary.attention import AttentionMask, Ring, Ulysses, reference_attention
from armillary.core import CommLedger
from armillary.core.testing import mesh, relative_error
from armillary.core.testing.dtensors import place

B, D = 2, 16
TOKENS = Shard(1)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())


def every_placement() -> dict[str, dict[tuple[Placement, ...], str]]:
    """Errors of attention (q, k, v) and of projected attention (x) by placements over ring x tp; "" if accepted."""
    built = mesh(ring=2, tp=2)
    over, attend = built["ring", "tp"], Ring(built["ring"])
    layout, mask = attend.layout(8, kind="contiguous"), AttentionMask()
    messages: dict[str, dict[tuple[Placement, ...], str]] = {"q": {}, "x": {}}
    for placed in product(PLACEMENTS, repeat=2):
        q, x = (place(random(*shape), over, placed) for shape in ((B, 8, 4, D), (B, 8, 3 * D)))
        calls = {
            "q": lambda q=q: attend(q, q, q, mask=mask, layout=layout),
            "x": lambda x=x: attend.projected(x, Split(1, 1, D), mask=mask, layout=layout),
        }
        for name, call in calls.items():
            with CommLedger() as ledger:
                messages[name][placed] = refusal_of(call)
            assert not messages[name][placed] or ledger.bytes() == 0
    return messages


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def test_every_placement_is_accepted_or_refused_with_the_expected_one(worlds):
    placements = {"q": (Shard(0), Shard(2), Replicate()), "x": (Shard(0), Replicate())}
    for rank in worlds(4).run(every_placement):
        for name, of_pairs in rank.items():
            for (on_ring, on_tp), messages in of_pairs.items():
                expected = placements[name] if on_ring == TOKENS else (Shard(1),)
                accepted = on_ring == TOKENS and on_tp in placements[name]
                named = f"{name} is" in messages and all(repr(placement) in messages for placement in expected)
                assert (messages == "") == accepted and (accepted or named), (on_ring, on_tp)


def errors_without_layout(length: int, key_length: int) -> list[float | str]:
    """Errors of out and of the gradient of k for DTensors of `distribute_tensor`, on one axis and on two."""
    results = list[float | str]()
    for sizes, names in (({"ring": 4}, ("ring",)), ({"ring": 2, "ulysses": 2}, ("ring", "ulysses"))):
        built = mesh(**sizes)
        attend = Ring(built["ring"]) if len(names) == 1 else Ulysses(built["ulysses"], inner=Ring(built["ring"]))
        generator, mask = torch.Generator().manual_seed(1), AttentionMask(causal=length == key_length)
        q, k, v, upstream = (
            torch.randn(B, n, 4, D, generator=generator, dtype=torch.float64).requires_grad_()
            for n in (length, key_length, key_length, length)
        )
        expected = reference_attention(q, k, v, mask=mask)
        (expected_gradient,) = torch.autograd.grad(expected, k, upstream)
        parts = [distribute_tensor(x, built[names], [TOKENS] * len(names)) for x in (q, k, v)]
        try:
            out = attend(*parts, mask=mask).full_tensor()
        except ValueError as error:
            results.append(str(error))
            continue
        (gradient,) = torch.autograd.grad(out, parts[1], upstream)
        results += [relative_error(out, expected), relative_error(gradient.full_tensor(), expected_gradient)]
    return results


def test_without_a_layout_dtensors_are_in_sequence_order(worlds):
    for lengths in ((40, 40), (39, 39), (40, 60)):
        for errors in worlds(4).run(errors_without_layout, *lengths):
            assert len(errors) == 4 and all(isinstance(error, float) and error < 1e-12 for error in errors), errors
    for errors in worlds(4).run(errors_without_layout, 9, 9):  # cut as 3, 3, 3, 0 on one axis
        assert isinstance(errors[0], str) and "shard" in errors[0]
