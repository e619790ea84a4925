"""Layers with a state in compiled graphs and on DTensors: results and gradients equal local eager calls."""

from __future__ import annotations

import pytest
import torch
from states_oracle import each
from test_states import KINDS, inputs_of, layer_of, local_inputs
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from armillary.attention import AttentionMask
from armillary.core import Axis, CommLedger, SequenceLayout, halo, shift, short_convolution
from armillary.core.testing import mesh, relative_error
from armillary.states import gated_delta_rule, ssd

LENGTH = 24
MASKS = {
    "none": None,
    "documents": AttentionMask(documents=[0, 10, LENGTH]),
    "rows": AttentionMask(documents=[[0, 5, LENGTH], [0, 14, 20, LENGTH]]),
    "tree": AttentionMask.tree([0, 7, 12, 15, LENGTH], [-1, 0, 0, 2]),
}
COMPILED = {"delta": "tree", "channels": "rows", "ssd": "none"}
"""Masks of the compiled layers of each kind: the rule of a kind does not depend on the mask."""
TOKENS = (Shard(1), Shard(2))


def state_of(kind: str) -> torch.Tensor:
    shape = (2, 4, 5, 6) if kind == "ssd" else (2, 4, 6, 5)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def is_same(function, compiled, tensors: list[torch.Tensor], *arguments: object) -> bool:
    """Compares results, gradients and sent bytes of a compiled call with those of an eager one."""
    results = []
    for call in (function, compiled):
        with CommLedger() as ledger:
            out = call(*tensors, *arguments)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors, allow_unused=True), ledger.entries))
    *pairs, (eager_bytes, compiled_bytes) = zip(*results, strict=True)
    return eager_bytes == compiled_bytes and all(a is b is None or relative_error(b, a) < 1e-12 for a, b in pairs)


def compiled_layers() -> dict[str, bool]:
    torch._dynamo.reset()
    ring = mesh(ring=2)["ring"]
    same, layouts = {}, [SequenceLayout.zigzag(LENGTH, 2), SequenceLayout([[range(5), range(20, 24)], [range(5, 20)]])]
    for i, (kind, name) in enumerate(COMPILED.items()):
        layout, inputs = layouts[i % 2], inputs_of(kind, LENGTH)
        options = {"layout": layout, "axis": ring, "mask": MASKS[name]}

        def block(initial, *tensors, kind=kind, names=(*inputs,), options=options) -> torch.Tensor:
            doubled = {name: 2 * x for name, x in zip(names, tensors, strict=True)}
            out, final = layer_of(kind)(**doubled, **options, initial_state=initial)
            return torch.cat([out.flatten(), final.sin().flatten()])

        local = local_inputs(inputs, layout, Axis.of(ring).rank).values()
        tensors = [x.requires_grad_() for x in (state_of(kind), *local)]
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        same[f"{kind} {name}"] = is_same(block, compiled, tensors)
    return same


def test_layers_are_in_the_graph(worlds):
    for same in worlds(2).run(compiled_layers, timeout=300):
        assert len(same) == 3 and all(same.values()), same


def test_one_graph_of_layers_on_one_rank_serves_all_documents():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    inputs = inputs_of("delta", LENGTH)

    def block(*tensors) -> torch.Tensor:
        *tensors, mask = tensors
        return gated_delta_rule(**dict(zip(inputs, tensors, strict=True)), mask=mask)[0].sin()

    compiled, tensors = torch.compile(block, backend="aot_eager", fullgraph=True), [*inputs.values()]
    for first in range(1, 4):
        mask = AttentionMask(documents=[0, first, LENGTH])
        assert is_same(block, compiled, [x.requires_grad_() for x in tensors], mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    without_autograd = [x.detach() for x in tensors]
    assert torch.equal(compiled(*without_autograd, mask), block(*without_autograd, mask))


def test_wrong_arguments_raise_when_the_graph_runs():
    inputs = inputs_of("ssd", LENGTH)
    compiled = torch.compile(ssd, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"documents.* 20"):
        compiled(**inputs, mask=AttentionMask(documents=[0, 20]))
    with pytest.raises(ValueError, match="dt "):
        compiled(**inputs | {"dt": inputs["dt"][:, :5]})


def distributed(kind: str) -> dict[str, float]:
    """Compares a layer on DTensors over ring x tp with local calls on the heads of the tp rank."""
    both = mesh(ring=2, tp=2)["ring", "tp"]
    ring, tp = both["ring"], both["tp"]
    layout, rank = SequenceLayout.zigzag(LENGTH, 2), Axis.of(ring).rank
    inputs, initial, layer = inputs_of(kind, LENGTH), state_of(kind), layer_of(kind)
    mask = MASKS["documents"]
    heads = {name: x.chunk(2, 0 if name == "A" else 2)[tp.get_local_rank()] for name, x in inputs.items()}
    local_tensors = {name: x.clone().requires_grad_() for name, x in local_inputs(heads, layout, rank).items()}
    own_state = initial.chunk(2, 1)[tp.get_local_rank()].clone().requires_grad_()

    def loss_of(out, final, weight) -> torch.Tensor:
        return (out * out).sum() + (final * final).sum() * weight

    out, final = layer(**local_tensors, layout=layout, axis=ring, mask=mask, initial_state=own_state)
    # Only rank 0's loss has the final state.
    grads = torch.autograd.grad(loss_of(out, final, rank == 0), [*local_tensors.values(), own_state])
    local = dict(zip((*local_tensors, "initial_state"), grads, strict=True))

    placements = {"A": (Replicate(), Shard(0)), "initial_state": (Replicate(), Shard(1))}
    shapes = {name: x.shape for name, x in inputs.items()} | {"initial_state": initial.shape}
    leaves = {
        name: DTensor.from_local(
            x.detach(), both, placements.get(name, TOKENS), shape=shapes[name], stride=stride_of(shapes[name])
        ).requires_grad_()
        for name, x in (local_tensors | {"initial_state": own_state}).items()
    }
    d_out, d_final = layer(**leaves, layout=layout, axis=ring, mask=mask)
    assert d_out.placements == (Shard(1), Shard(2)) and d_final.placements == (Replicate(), Shard(1))
    assert d_out.shape == (2, LENGTH, 4, 5) and d_final.shape == initial.shape
    d_grads = torch.autograd.grad(loss_of(d_out, d_final, 1), list(leaves.values()))
    errors = {"out": relative_error(d_out.to_local(), out), "final": relative_error(d_final.to_local(), final)}
    for name, grad in zip(leaves, d_grads, strict=True):
        expected = (Partial(), *placements[name][1:]) if name in placements else (Shard(1), Shard(2))
        assert grad.placements == expected, (name, grad)
        errors[name] = relative_error(grad.to_local(), local[name])
    return errors


def stride_of(shape) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def test_dtensors_of_tokens_and_heads(worlds):
    for rank in worlds(4).run(each, distributed, [(kind,) for kind in KINDS]):
        for errors in rank:
            assert max(errors.values()) < 1e-12, errors


def convolutions_and_shifts() -> dict[str, bool]:
    """Compiles functions of core with documents and trees, halos with trees; one graph serves all documents."""
    ring = mesh(ring=2)["ring"]
    layout, rank = SequenceLayout.zigzag(LENGTH, 2), Axis.of(ring).rank
    generator = torch.Generator().manual_seed(0)
    local_x = layout.take(torch.randn(2, LENGTH, 3, dtype=torch.float64, generator=generator), rank).requires_grad_()
    weight = torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()

    def both(x, weight, mask) -> torch.Tensor:
        return short_convolution(x, weight, layout, ring, mask=mask) * shift(x, layout, ring, 1, mask=mask).sin()

    def halos(x, weight, mask) -> torch.Tensor:
        return torch.cat([run.flatten(0, 1).sin() for run in halo(x, layout, ring, 3, mask=mask)])

    same = {}
    for function in (both, halos):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        documents = {str(end): AttentionMask(documents=[0, end, LENGTH]) for end in (3, 12, 20)}
        for name, mask in ((documents if function is both else {}) | {"tree": MASKS["tree"]}).items():
            same[f"{function.__name__} {name}"] = is_same(function, compiled, [local_x, weight], mask)
            if name == "20" and function is both:
                same["one graph"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return same


def test_convolutions_and_shifts_of_masks_are_in_the_graph(worlds):
    for same in worlds(2).run(convolutions_and_shifts, timeout=300):
        assert all(same.values()), same
