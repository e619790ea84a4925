"""Relayout, shift, halo and short convolution in compiled graphs: results, gradients and bytes as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_token_moves import N, layouts

from armillary.core import Axis, CommLedger, halo, relayout, shift, short_convolution
from armillary.core.testing import mesh

DOCUMENTS = {"none": None, "documents": [0, 1, 3, 17, 37], "rows": [[0, 4, 37], [0, 20, 21, 37]]}


def functions(kind: str, ring, documents) -> dict[str, Callable]:
    source, target = layouts(2)[kind], layouts(2)["zigzag" if kind == "contiguous" else "contiguous"]
    options = {"layout": source, "axis": ring, "documents": documents}
    return {
        "relayout": lambda x, weight, bias: relayout(2 * x, source, target, ring).sin(),
        "turned": lambda x, weight, bias: relayout((2 * x).transpose(1, 2), source, target, ring, dim=2).sin(),
        "shift": lambda x, weight, bias: shift(2 * x, offset=2, fill=3.0, **options).sin(),
        "ahead": lambda x, weight, bias: shift(2 * x, offset=-1, **options).sin(),
        "halo": lambda x, weight, bias: torch.cat([y.sin() for y in halo(2 * x, left=3, right=1, **options)], 1),
        "convolution": lambda x, weight, bias: short_convolution(2 * x, weight, bias=bias, **options).sin(),
        "without bias": lambda x, weight, bias: short_convolution(2 * x, weight, **options).sin(),
    }


def compiled_and_eager() -> dict[str, bool]:
    """Compares functions compiled and eager, with rows of documents and layouts in turn."""
    ring, same = mesh(ring=2)["ring"], {}
    rank, generator = Axis.of(ring).rank, torch.Generator().manual_seed(1)
    full, *parameters = (
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in ((2, N, 3), (3, 4), (3,))
    )
    for names, rows, kind in (
        (("relayout", "turned", "shift", "ahead", "convolution"), "rows", "ragged"),
        (("halo", "without bias"), "documents", "zigzag"),
        (("shift", "convolution"), "none", "ragged"),
    ):
        chosen = [functions(kind, ring, DOCUMENTS[rows])[name] for name in names]

        def function(x, weight, bias, chosen=chosen) -> torch.Tensor:
            return torch.cat([each(x, weight, bias).flatten() for each in chosen])

        torch._dynamo.reset()
        results = []
        for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            with CommLedger() as ledger:
                out = call(layouts(2)[kind].take(full, rank), *parameters)
                grads = torch.autograd.grad(out.square().sum(), [full, *parameters], allow_unused=True)
            results.append(([out, *(y for y in grads if y is not None)], dict(ledger.entries)))
        (eager, eager_bytes), (compiled, compiled_bytes) = results
        close = all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(eager, compiled, strict=True))
        same[f"{names} {rows} {kind}"] = close and eager_bytes == compiled_bytes
    return same


def test_functions_are_in_the_graph(worlds):
    for same in worlds(2).run(compiled_and_eager, timeout=300):
        assert len(same) == 3 and all(same.values()), same


def labels() -> None:
    ring = mesh(ring=2)["ring"]
    layout = layouts(2)["zigzag"]
    ids = layout.take(torch.arange(2 * N).view(2, N), Axis.of(ring).rank)

    def next_ids(ids):
        return shift(ids + 1, layout, ring, -1, fill=-100)

    assert torch.equal(torch.compile(next_ids, backend="aot_eager", fullgraph=True)(ids), next_ids(ids))


def refusals() -> None:
    ring = mesh(ring=2)["ring"]
    layout = layouts(2)["zigzag"]
    x = layout.take(torch.zeros(2, N, 3), Axis.of(ring).rank)
    compiled = torch.compile(shift, backend="aot_eager", fullgraph=True)
    for words, call in {
        "boundaries": lambda: compiled(x, layout, ring, 1, documents=[0, 5]),
        "the shard has": lambda: compiled(x[:, 1:], layout, ring, 1),
        "documents": lambda: compiled(x, layout, ring, 1, documents=torch.tensor([0, N])),
    }.items():
        torch._dynamo.reset()
        with CommLedger() as ledger, pytest.raises(Exception, match=words):
            call()
        assert not ledger.messages()


def labels_and_refusals() -> None:
    labels()
    refusals()


def test_integers_are_shifted_and_wrong_arguments_refused_before_communication(worlds):
    worlds(2).run(labels_and_refusals)
