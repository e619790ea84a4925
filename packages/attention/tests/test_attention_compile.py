"""torch.compile: one graph that contains attention, with the same bits as eager mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from armillary.attention import AttentionMask, Local, Method, Slice, Ulysses, UPipe, build_attention
from armillary.attention.internal import ProjectionParts
from armillary.attention.kernels import Dense
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import pack, register_as_tensor, unpack
from armillary.core.testing import mesh
from conformance import Case
from conformance.calling import Linear

N, H, K, D = 22, 4, 2, 8
MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=(3, 0)),
    AttentionMask(documents=[0, 5, N]),
    AttentionMask(documents=[0, 5, 11, N]),
    AttentionMask(documents=[[0, 3, N], [0, N]]),
]
METHODS = [
    ("ring", {"ring": 2}, 2, [MASKS[2], MASKS[5]]),
    ("ulysses", {"ulysses": 2}, 1, [MASKS[4]]),
    ("upipe", {"ulysses": 2}, 2, [MASKS[5]]),
]
"""Methods that save local tensors, that save tensors after an all-to-all (with a shared key head), and that run stages;
with key heads and masks."""
SINKS = [(H,), (3, H)]


def equals_eager(
    attend: Method,
    mask: AttentionMask,
    layout: SequenceLayout,
    compiled,
    sinks: tuple[int, ...] = (),
    key_heads: int = K,
) -> bool:
    """Returns whether out and all gradients are the same bits compiled and in eager mode.

    Args:
        sinks: shape of the sinks; () for none.
    """
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(2, N, heads, D, generator=generator) for heads in (H, key_heads, key_heads, H)]
    *inputs, dout = (layout.take(x, attend.shard) for x in full)
    leaves = [x.requires_grad_() for x in (*inputs, torch.randn(sinks, generator=generator))]
    results: list[list[Tensor]] = []
    for function in (eager, compiled):
        out = function(attend, *leaves[:3], leaves[3] if sinks else None, mask, layout)
        results.append([out, *torch.autograd.grad(out, leaves[: 4 if sinks else 3], dout)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def eager(attend, q, k, v, sinks, mask, layout) -> Tensor:
    return attend(2 * q, k, v, mask=mask, layout=layout, sinks=sinks).sin()


def compile_method(
    name: str, axes: Mapping[str, int], key_heads: int, masks: Sequence[AttentionMask], sinks: Sequence[tuple[int, ...]]
) -> list[bool]:
    torch._dynamo.reset()
    attend = build_attention(name, mesh(**axes))
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    layout = attend.layout(N)
    same = [equals_eager(attend, mask, layout, compiled, (), key_heads) for mask in masks]
    return [*same, *(equals_eager(attend, MASKS[0], layout, compiled, shape, key_heads) for shape in sinks)]


def compile_methods() -> list[list[bool]]:
    return [compile_method(*arguments, [SINKS[i % 2]]) for i, arguments in enumerate(METHODS)]


def test_methods_are_in_the_graph(worlds):
    for rank in worlds(2).run(compile_methods, timeout=300):
        for (name, *_), same in zip(METHODS, rank, strict=True):
            assert all(same), (name, same)


def graphs_of_lengths(name: str, axes: Mapping[str, int]) -> tuple[bool, int]:
    """Returns (whether calls equal eager ones at several lengths, the number of graphs)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attend, columns = build_attention(name, mesh(**axes)), Columns()

    def call(x: Tensor, layout: SequenceLayout) -> Tensor:
        if name == "upipe":
            return attend.projected(x, columns, mask=MASKS[0], layout=layout)
        k, v = columns.kv(x, range(K))
        return attend(columns.q(x, range(H)), k, v, mask=MASKS[0], layout=layout)

    compiled, same = torch.compile(call, fullgraph=True, backend="aot_eager"), list[bool]()
    for length, kind in ((22, "zigzag"), (27, "zigzag"), (28, "contiguous"), (29, "balanced"), (40, "zigzag")):
        layout = attend.layout(length, kind)
        x = torch.randn(2, layout.sizes[attend.shard], 6, requires_grad=True)
        results = [
            [out, *torch.autograd.grad(out.sin().sum(), [x, *columns.parameters()])]
            for out in (call(x, layout), compiled(x, layout))
        ]
        same += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return all(same), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def graphs_of_methods() -> list[tuple[bool, int]]:
    return [graphs_of_lengths("ulysses", {"ulysses": 2}), graphs_of_lengths("upipe", {"ulysses": 2})]


def test_new_layouts_reuse_the_graph(worlds):
    for rank in worlds(2).run(graphs_of_methods, timeout=300):
        assert all(same and graphs <= 3 for same, graphs in rank), rank


def masks_of_all_kinds(parts: int) -> list[AttentionMask]:
    """Returns a mask of each kind with a number of parts."""
    ends, runs = [*range(parts), N], [range(a, a + 2) for a in range(0, 2 * parts, 2)]
    tree = AttentionMask.tree(ends, [-1, *[0] * (parts - 1)])
    prefix = AttentionMask.prefix(ends, [1] * parts)
    return [
        *(tree, prefix, AttentionMask.chunked(parts), AttentionMask.image_spans(runs, [0, N - 1, N])),
        AttentionMask.of_slices([Slice(run, range(run.stop)) for run in runs]),
        AttentionMask.blocks(torch.ones(-(-N // parts), -(-N // parts), dtype=torch.bool), parts),
        AttentionMask.rows([tree, prefix]),
    ]


def test_new_documents_and_masks_of_all_kinds_share_graphs():
    """One graph for each value of `causal`, and one more for other lengths of the mask's tensor."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters
    graphs.clear()
    attend, layout = Local(), SequenceLayout.contiguous(N, 1)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for first in range(1, 4):
        assert equals_eager(attend, AttentionMask(documents=[0, first, N]), layout, compiled)
    assert graphs["stats"]["unique_graphs"] == 1
    for cuts in range(3, 12, 2):
        assert equals_eager(attend, AttentionMask(documents=[*range(cuts), N]), layout, compiled)
    assert graphs["stats"]["unique_graphs"] == 2  # the second accepts any number of documents
    for parts in (2, 3, 5):
        for mask in masks_of_all_kinds(parts):
            assert equals_eager(attend, mask, layout, compiled), mask
    assert graphs["stats"]["unique_graphs"] <= 4


class Columns(nn.Module):
    """Projections as a module, and the parts from which a graph rebuilds them. Values have head dim D - 1."""

    heads, key_heads = H, K

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, H * D), nn.Linear(6, K * D)
        self.ticket = register_as_tensor(self)

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return self.query(x).unflatten(-1, (H, D))[:, :, list(heads)]

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        k = self.key(x).unflatten(-1, (K, D))[:, :, list(heads)]
        return k, 2 * k[..., 1:]

    def parts(self) -> ProjectionParts:
        return ProjectionParts(self.ticket, D, D - 1, [], list(self.parameters()))

    def projections_of(self, tensors: Sequence[Tensor]) -> Columns:
        return self


def same_bits(call: Callable[..., Tensor], leaves: Sequence[Tensor], *arguments: Tensor) -> bool:
    """Returns whether out and the gradients of the leaves are the same bits in eager mode and in one graph."""
    results = list[list[Tensor]]()
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = run(*arguments)
        results.append([out, *torch.autograd.grad(out.sin(), leaves, torch.ones_like(out))])
    return all(torch.equal(local(a), local(b)) for a, b in zip(*results, strict=True))


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("shape", [(H,), (3, H)])
def test_sinks_of_projections_in_stages_are_in_the_graph(shape):
    torch._dynamo.reset()
    attend, columns = UPipe(Axis.alone("ulysses"), heads_per_stage=2), Columns()
    x, sinks = torch.randn(2, 7, 6, requires_grad=True), torch.randn(shape, requires_grad=True)

    def call(x: Tensor, sinks: Tensor) -> Tensor:
        return attend.projected(x, columns, mask=MASKS[0], sinks=sinks)

    assert same_bits(call, [x, sinks, *columns.parameters()], x, sinks)


def projected_dtensors() -> bool:
    """Returns whether results from DTensors of hidden states and weights are the same bits in one graph."""
    torch._dynamo.reset()
    over = mesh(ulysses=2)["ulysses"]
    attend, case = Ulysses(over), Case(heads=H, kv_heads=K, head_dim=D, value_dim=D)
    layout, generator = attend.layout(11, "contiguous"), torch.Generator().manual_seed(0)
    shapes = [(2, 11, 6), *((heads * D, 6) for heads in (H, K, K))]
    full, placements = [torch.randn(shape, generator=generator) for shape in shapes], [Shard(1), *[Replicate()] * 3]
    leaves = [distribute_tensor(x, over, [p]).requires_grad_() for x, p in zip(full, placements, strict=True)]

    def call(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        return attend.projected(x, Linear(wq, wk, wv, case), mask=MASKS[0], layout=layout)

    return same_bits(call, leaves, *leaves)


def test_dtensors_of_hidden_states_are_in_the_graph(worlds):
    assert all(worlds(2).run(projected_dtensors))


def test_wrong_arguments_raise_in_and_outside_of_graphs():
    torch._dynamo.reset()
    stages, columns = UPipe(Axis.alone("ulysses"), heads_per_stage=2), Columns()
    x, q, k = torch.zeros(2, 7, 6), torch.zeros(2, 7, H, D), torch.zeros(2, 7, K, D)

    def of(q: Tensor, mask: AttentionMask = MASKS[0], **options: object) -> Callable[[Tensor], Tensor]:
        return lambda sinks: Local()(q, k, k, mask=mask, sinks=sinks, **options)

    for call, sinks, words in [
        (of(q), torch.zeros(3, 1), r"sinks.* \(3, 1\)"),
        (lambda sinks: stages.projected(x, columns, mask=MASKS[0], sinks=sinks), torch.zeros(3), r"sinks.* \(3,\)"),
        (of(q, softcap=0.0, kernel="dense"), torch.zeros(H), "softcap 0.0"),
        (of(q[:, :, :3]), torch.zeros(3), "3 query.*2"),
        (of(q, AttentionMask(documents=[0, 5])), torch.zeros(H), "5.*7"),
    ]:
        with pytest.raises(ValueError, match=words):
            torch.compile(call, backend="aot_eager")(sinks)
        with pytest.raises(Exception, match=f"{words}|Observed exception"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(sinks)


def test_copies_of_a_method_are_independent():
    attend = Local()
    for other in (copy.copy(attend), copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        assert other.registered_id != attend.registered_id


def test_masks_and_layouts_survive_packing_for_the_op():
    for mask in MASKS:
        assert unpack(pack(mask)) == [mask]
    for layout in (SequenceLayout.zigzag(23, 4), SequenceLayout.striped(23, 4), SequenceLayout.striped(23, 2, 3)):
        assert SequenceLayout.read(layout.text) == layout
        assert unpack(pack(layout, 1, MASKS[3], None)) == [layout, 1, MASKS[3], None]
        assert torch.equal(pickle.loads(pickle.dumps(layout)).numbers, layout.numbers)


def test_a_compiled_call_uses_its_scale_and_softcap():
    q, k, v = torch.randn(3, 1, 6, 2, 8, generator=torch.Generator().manual_seed(0))
    for options in ({"scale": 0.7, "softcap": 0.5}, {"scale": -0.4}, {"scale": 0.0, "kernel": "dense"}):
        call = partial(Local(), mask=MASKS[0], **options)
        with torch.autocast("cpu", torch.bfloat16):
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(q, k, v), call(q, k, v)), options


def other_heads() -> None:
    """Runs a second model through the same code, for which torch makes symbolic sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for heads, key_heads, dim in ((4, 2, 8), (8, 4, 16), (12, 4, 24)):
        attend = Ulysses(mesh(ulysses=2)["ulysses"], inner=Local())
        q, k = torch.randn(1, 3, heads, dim), torch.randn(1, 3, key_heads, dim)
        layout = attend.layout(6)
        actual = compiled(attend, q, k, k, None, MASKS[0], layout)
        assert torch.equal(actual, eager(attend, q, k, k, None, MASKS[0], layout))


def test_models_with_other_heads_compile_in_turn(worlds):
    worlds(2).run(other_heads)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "in one graph"])
def test_lse_may_be_returned_and_has_no_gradient(compiled):
    torch._dynamo.reset()
    attend, q = Local(), torch.randn(1, 6, 2, 8, requires_grad=True)

    def call(q):
        return attend(q, q, q, mask=MASKS[0], return_lse=True)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    dout = torch.randn(1, 6, 2, 8)
    (expected,) = torch.autograd.grad(attend(q, q, q, mask=MASKS[0]), q, dout)
    out, _ = run(q)
    assert torch.equal(torch.autograd.grad(out, q, dout)[0], expected)
    out, lse = run(q)
    with pytest.raises((ValueError, RuntimeError), match="lse"):
        torch.autograd.grad((out, lse), q, (dout, torch.ones_like(lse)))


def test_unregistered_kernel_runs_outside_of_graphs():
    class Other(Dense):
        pass

    torch._dynamo.reset()
    attend, q, other = Local(), torch.randn(1, 4, 2, 8), Other()

    def call(q) -> Tensor:
        return attend(q, q, q, mask=MASKS[0], kernel=other)

    with pytest.raises(Exception, match=r"takes kernels of|Observed exception"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    assert torch.equal(torch.compile(call, backend="aot_eager")(q), call(q))  # after a graph break
