"""Layers with a state on sharded sequences, compared with token-by-token recurrences, in worlds of gloo ranks."""

from __future__ import annotations

import pytest
import torch
from states_oracle import worst_errors
from torch.nn import functional as F

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.states import gated_delta_rule, ssd

TOLERANCE = 1e-10
KINDS = ["delta", "channels", "ssd"]


@pytest.mark.parametrize(("ranks", "count"), [(1, 8), (2, 10), (3, 10), (4, 12)])
def test_random_cases_equal_the_recurrence(worlds, ranks, count):
    for errors in worlds(ranks).run(worst_errors, [*range(1000 * ranks, 1000 * ranks + count)]):
        assert not {seed: actual for seed, actual in errors.items() if not actual[0] < TOLERANCE}


def inputs_of(kind: str, length: int, dtype: torch.dtype = torch.float64, heads: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    if kind == "ssd":
        values = {"x": normal(2, length, heads, 5), "Bm": normal(2, length, 2, 6), "Cm": normal(2, length, 2, 6)}
        wide = {"dt": F.softplus(normal(2, length, heads)), "A": -normal(heads).abs()}
    else:
        q, k = (F.normalize(normal(2, length, 2, 6), dim=-1) for _ in range(2))
        values = {"q": q, "k": k, "v": normal(2, length, heads, 5), "beta": normal(2, length, heads).sigmoid()}
        wide = {"g": -normal(2, length, heads, *((6,) if kind == "channels" else ())).abs()}
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.to(dtype) for name, x in values.items()} | {name: x.to(wide_dtype) for name, x in wide.items()}


def local_inputs(inputs: dict[str, torch.Tensor], layout: SequenceLayout, rank: int) -> dict[str, torch.Tensor]:
    return {name: x if name == "A" else layout.take(x, rank) for name, x in inputs.items()}


def layer_of(kind: str):
    return ssd if kind == "ssd" else gated_delta_rule


@pytest.mark.parametrize("kind", KINDS)
def test_tree_equals_its_separate_sequences(kind):
    ends, parents = [0, 9, 14, 15, 40, 47, 52], [-1, 0, 1, 0, 3, 3]
    leaves, paths = [2, 4, 5], [[0, 1, 2], [0, 3, 4], [0, 3, 5]]
    inputs = inputs_of(kind, ends[-1])
    weights = torch.rand(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dout = torch.randn(2, ends[-1], 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradients(loss_of) -> list[torch.Tensor]:
        tensors = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        return [*torch.autograd.grad(loss_of(tensors), list(tensors.values()))]

    def tree_loss(tensors) -> torch.Tensor:
        out, _ = layer_of(kind)(**tensors, mask=AttentionMask.tree(ends, parents))
        weights_of_tokens = torch.zeros(ends[-1], dtype=torch.float64)
        for weight, path in zip(weights, paths, strict=True):
            for segment in path:
                weights_of_tokens[ends[segment] : ends[segment + 1]] += weight
        return (out * dout * weights_of_tokens.view(-1, 1, 1)).sum()

    def unshared_loss(tensors) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for weight, path in zip(weights, paths, strict=True):
            tokens = torch.cat([torch.arange(ends[s], ends[s + 1]) for s in path])
            sequence_inputs = {name: x if name == "A" else x[:, tokens] for name, x in tensors.items()}
            loss = loss + weight * (layer_of(kind)(**sequence_inputs)[0] * dout[:, tokens]).sum()
        return loss

    assert leaves == [path[-1] for path in paths]
    for tree, unshared in zip(gradients(tree_loss), gradients(unshared_loss), strict=True):
        assert relative_error(tree, unshared) < 1e-12


def dtypes(kind: str) -> None:
    ring = mesh(ring=2)["ring"]
    layout, rank = SequenceLayout.zigzag(40, 2), Axis.of(ring).rank
    narrow = inputs_of(kind, 40, torch.bfloat16)
    shape = (2, 4, 5, 6) if kind == "ssd" else (2, 4, 6, 5)
    initial = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    results = []
    for cast, autocast in (
        (lambda x: x, False),
        (lambda x: x, True),
        (torch.Tensor.float, False),
        (torch.Tensor.double, False),
    ):
        local = {name: cast(x).requires_grad_() for name, x in local_inputs(narrow, layout, rank).items()}
        state = cast(initial).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, final = layer_of(kind)(**local, layout=layout, axis=ring, initial_state=state)
        grads = torch.autograd.grad(
            (out, final), [*local.values(), state], (torch.ones_like(out), torch.ones_like(final))
        )
        assert all(grad.dtype == x.dtype for grad, x in zip(grads, [*local.values(), state], strict=True))
        results.append((out, final, *grads))
    narrow_out, narrow_final = results[0][:2]
    assert narrow_out.dtype == torch.bfloat16 and narrow_final.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))  # autocast has no effect
    # States and their gradients equal those of float32 inputs; outputs are rounded once.
    assert torch.equal(narrow_final, results[2][1]) and torch.equal(narrow_out, results[2][0].bfloat16())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(results[0], results[2], strict=True))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(results[2], results[3], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_bfloat16_inputs_are_float32(worlds, kind):
    worlds(2).run(dtypes, kind)


def poisoned(kind: str) -> None:
    """Fills uninitialized memory and a document of padding with NaN."""
    ring = mesh(ring=2)["ring"]
    layout, rank = SequenceLayout([[range(9), range(31, 40)], [range(9, 31)]]), Axis.of(ring).rank
    inputs = inputs_of(kind, 40)
    mask = AttentionMask(documents=[0, 6, 20, 40])
    clean = local_inputs(inputs, layout, rank)
    expected = layer_of(kind)(**clean, layout=layout, axis=ring, mask=mask)
    padded = {name: x if name == "A" else x.clone() for name, x in inputs.items()}
    for name, x in padded.items():
        if name != "A":
            x[:, :6] = torch.nan
    local = {name: x.requires_grad_() for name, x in local_inputs(padded, layout, rank).items()}
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory
    try:
        out, final = layer_of(kind)(**local, layout=layout, axis=ring, mask=mask)
        real = layout.positions(rank) >= 6
        dout = torch.zeros_like(out)
        dout[:, real] = 1
        names = [name for name in local if name != "A"]
        grads = torch.autograd.grad((out, final), [local[name] for name in names], (dout, torch.ones_like(final)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out[:, real], expected[0][:, real]) and torch.equal(final, expected[1])
    assert out[:, ~real].isnan().all()
    assert all(grad[:, real].isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_memory_and_padding_has_no_effect(worlds, kind):
    worlds(2).run(poisoned, kind)


def uses_of_results() -> None:
    """Each rank's loss uses other outputs or final states."""
    ring = mesh(ring=2)["ring"]
    layout, rank = SequenceLayout.contiguous(20, 2), Axis.of(ring).rank
    inputs = inputs_of("delta", 20)
    for used in ((0, 0), (1, 1), (0, 1), (1, 0)):
        local = {name: x.requires_grad_() for name, x in local_inputs(inputs, layout, rank).items()}
        initial = torch.zeros(2, 4, 6, 5, dtype=torch.float64, requires_grad=True)
        results = gated_delta_rule(**local, layout=layout, axis=ring, initial_state=initial)
        results[used[rank]].sum().backward()
        assert local["v"].grad is not None and initial.grad is not None
        assert bool(initial.grad.any()) == (rank == 0)
    initial.grad = None
    local = local_inputs(inputs, layout, rank)
    _, final = gated_delta_rule(**local, layout=layout, axis=ring, initial_state=initial)
    final.sum().backward()  # only the final state has a gradient
    assert initial.grad is not None


def test_losses_of_ranks_may_use_different_results(worlds):
    worlds(2).run(uses_of_results)


def test_one_rank_needs_neither_layout_nor_axis():
    inputs = inputs_of("delta", 30)
    plain = gated_delta_rule(**inputs)
    ring = mesh(ring=1)["ring"]
    on_mesh = gated_delta_rule(**inputs, layout=SequenceLayout.contiguous(30, 1), axis=ring)
    assert all(torch.equal(a, b) for a, b in zip(plain, on_mesh, strict=True))
    reordered = SequenceLayout([[range(17, 30), range(17)]])
    out, final = gated_delta_rule(**local_inputs(inputs, reordered, 0), layout=reordered)
    assert relative_error(out, reordered.take(plain[0], 0)) < 1e-12 and relative_error(final, plain[1]) < 1e-12
