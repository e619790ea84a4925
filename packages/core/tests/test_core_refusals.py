"""The calls that core refuses: each row of a table has a call and the words that its ValueError must contain."""

import math
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from armillary.core import (
    Axis,
    CommLedger,
    LogSumExpPartial,
    Segments,
    SequenceLayout,
    all_gather,
    attention_balance,
    build_mesh,
    clip_gradients,
    distribute_sequence,
    gather_sequence,
    halo,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    relayout,
    seq_to_head,
    sequence_from_local,
    shift,
    short_convolution,
    start_process_group,
    sum_gradients,
)
from armillary.core.logsumexp_partial import pack_partial
from armillary.core.testing import Dispatched, mesh, value_errors
from armillary.core.testing.dtensors import place

Table = list[tuple[Callable[[], object], *tuple[str, ...]]]

# -- on one rank ------------------------------------------------------------------------------------------------------

Layout = SequenceLayout
EIGHT = Layout.contiguous(8, 2)
X, LSE = torch.zeros(2, 8, 3), torch.zeros(2, 8)
MASK = SimpleNamespace(slices=lambda length: (), segments=lambda length: (Segments((0, 3, length), (-1, 0)),))
BESIDE_MASKS = ({"causal": False}, {"window": (1, 0)}, {"documents": [0, 8]})
LEDGER = CommLedger()

ONE_RANK: Table = [
    # layouts by a formula
    *[(lambda n=n: Layout.contiguous(n, 2), f"length={n!r}") for n in (8.0, "8", True)],
    *[(lambda n=n: Layout.zigzag(8, n), f"shards={n!r}") for n in (None, math.nan)],
    (lambda: Layout.zigzag(8, 0), " 0"),
    (lambda: Layout.zigzag(3, 4), "3 ", "4 "),
    (lambda: Layout.striped(8, 2, stripe=1.5), "stripe=1.5"),
    (lambda: Layout.striped(9, 4, stripe=0), "stripe", "0"),
    (lambda: Layout.striped(9, 4, stripe=4), "shard 3 of 4 "),
    # balanced layouts
    (lambda: Layout.balanced(8, 2, causal="no"), "causal='no'"),
    (lambda: Layout.balanced(8, 2, window=4), "window 4", "(left, right)"),
    (lambda: Layout.balanced(8, 2, window=(-1, 0)), "window (-1, 0)"),
    (lambda: Layout.balanced(8, 2, documents=[[0, 8], 5]), "[[0, 8], 5]"),
    (lambda: Layout.balanced(8, 2, documents=[0, 3.7, 8]), "[0, 3.7, 8]"),
    (lambda: Layout.balanced(8, 2, documents=[0, 5]), "[0, 5]", "8"),
    (lambda: Layout.balanced(8, 2, documents=[0, 5, 5, 8]), "[0, 5, 5, 8]"),
    (lambda: Layout.balanced(8, 2, documents=[[0, 8], []]), "[]"),
    *[(lambda x=x: Layout.balanced(8, 2, mask=MASK, **x), "mask=", *x) for x in BESIDE_MASKS],
    (lambda: Layout.balanced(8, 2, mask="causal"), "mask", "str"),
    (lambda: Layout.balanced(8, 2, balanced_by="values"), "balanced_by", "'values'"),
    *[(lambda x=x: Layout.balanced(8, 2, send_cost=x), "send_cost", repr(x)) for x in (-1, math.nan, math.inf, "much")],
    (lambda: attention_balance(None), "layout", "NoneType"),
    (lambda: attention_balance(EIGHT, mask=MASK, causal=False), "mask=", "causal"),
    # layouts of spans
    (lambda: Layout(8), "spans 8"),
    (lambda: Layout([]), "shard"),
    (lambda: Layout([range(8)]), "span 0"),
    (lambda: Layout([["0:8"]]), "span '0:8'"),
    (lambda: Layout([[range(2)], [range(1, 4)]]), "range(1, 4)"),
    (lambda: Layout([[range(2)], [range(3, 5)]]), "position 2 of 5"),
    (lambda: Layout([[range(1, 3)]]), "0", "1"),
    (lambda: Layout([[range(3, 0, -1)]]), "backwards"),
    (lambda: Layout([[range(2**70)]]), "2^63 - 1"),
    (lambda: Layout.read("0-8"), "'0-8'"),
    (lambda: Layout.read(None), "None"),
    (lambda: Layout.read("0:99999999999999999999999"), "2^63 - 1"),
    # methods of a layout
    (lambda: EIGHT.spans(2), "shard 2", "2"),
    (lambda: EIGHT.spans(1.0), "shard=1.0"),
    (lambda: EIGHT.take(X, 0, dim=3), "(2, 8, 3)", "3"),
    (lambda: EIGHT.take(X, 0, dim=1.0), "dim=1.0"),
    (lambda: EIGHT.take(X, 0, dim=0), "dim 0", "(2, 8, 3)", "8"),
    (lambda: EIGHT.take(X.numpy(), 0), "ndarray"),
    (lambda: EIGHT.join(None), "parts", "NoneType"),
    (lambda: EIGHT.join([X], dim=0), "parts"),
    (lambda: EIGHT.join([X, None]), "NoneType"),
    (lambda: EIGHT.join([X[:, :4], X[:, 4:].double()]), "parts", "torch.float32"),
    (lambda: EIGHT.join([X[:, :3]] * 2), "(3, 3)", "(4, 4)"),
    (lambda: EIGHT.refine(0), "0"),
    (lambda: EIGHT.refine(5), "4 ", "5", "10"),
    (lambda: Layout.contiguous(8, 4).coarsen(3), "4 ", "3"),
    # the ledger
    (lambda: LEDGER.bytes(kind="p2q"), "kind='p2q'", "p2p, all_to_all, all_gather, reduce_scatter"),
    (lambda: LEDGER.bytes(phase="backwards"), "phase='backwards'", "forward, backward"),
    (lambda: LEDGER.bytes(axis=0), "axis=0"),
    # partial results
    (lambda: pack_partial(X.clone().requires_grad_(), LSE), "gradient", "merge_scatter(out, lse, axis)"),
    (lambda: pack_partial(X, LSE.clone().requires_grad_()), "gradient", "merge_scatter(out, lse, axis)"),
    (lambda: pack_partial(X, LSE[:, :3]), "lse", "(2, 8)"),
    (lambda: pack_partial(X, LSE.long()), "floating"),
    (lambda: pack_partial([1.0], LSE), "out", "list"),
    # models and process groups
    (lambda: sum_gradients(None), "None"),
    (lambda: sum_gradients(nn.Linear), "model"),
    (lambda: sum_gradients([nn.Linear(1, 1)]), "model"),
    (lambda: clip_gradients(nn.Linear(2, 2), 1.0), "Linear", "gradient"),
    (lambda: start_process_group("gpu"), "'gpu'", "cpu, cuda"),
    (lambda: start_process_group("cpu", timeout=60), "timeout=60"),
]

NAMES = [f"{number} {words[0]}" for number, (_, *words) in enumerate(ONE_RANK)]


@pytest.mark.parametrize(("call", "words"), [(call, words) for call, *words in ONE_RANK], ids=NAMES)
def test_refusals_on_one_rank(call, words):
    (message,) = value_errors([call])
    assert all(word in message for word in words), message
    assert not torch.distributed.is_initialized()


# -- on several ranks -------------------------------------------------------------------------------------------------


def two_ranks() -> Table:
    ring = mesh(ring=2)["ring"]
    return [*meshes(), *primitives(Axis.of(ring)), *neighbours(ring), *models()]


def meshes() -> Table:
    def build(device_type="cpu", ring=2, **options) -> Callable[[], object]:
        return lambda: build_mesh(device_type, ring=ring, **options)

    return [
        (build("gpu"), "'gpu'", "cpu, cuda"),
        (build(None), "None"),
        *[(build(ring=n), f"axis ring={n!r}") for n in (2.0, True, "2", 0)],
        (build(ring=2, ulysses=3), "ring 2 x ulysses 3", "6 ", "2 "),
        *[(build(timeout=x), f"timeout={x!r}") for x in (60, None, timedelta(0))],
        (build(high_priority=["sequence"]), "'sequence'", "shard, nodes, devices, ring, ulysses, tp"),
        (build(max_ctas=0), "max_ctas=0"),
        (lambda: Axis.of(None), "NoneType"),
        (lambda: Axis.of(mesh(ring=2)["ring", "ulysses"]), "2 (ring, ulysses)", "mesh['ring']"),
    ]


def primitives(axis: Axis) -> Table:
    x, lse = torch.zeros(2, 4, 6, 3), torch.zeros(2, 4, 6)
    return [
        (lambda: all_gather(None, axis), "x ", "NoneType"),
        (lambda: all_gather(np.zeros((2, 4)), axis), "x ", "ndarray", "torch.as_tensor"),
        (lambda: all_gather(x, axis, dim=1.0), "dim=1.0"),
        (lambda: all_gather(x, axis, dim=4), "x (2, 4, 6, 3)", "dim 4", "0..3"),
        (lambda: all_gather(x, axis, sizes=[4.0, 4.0]), "sizes=4.0"),
        (lambda: all_gather(x, axis, sizes=[4]), "2 "),
        (lambda: all_gather(x, axis, sizes=[-1, 5]), "sizes=-1", "0"),
        (lambda: all_gather(x, "ring"), "str"),
        (lambda: all_gather(x, axis.group), "ProcessGroup", "DeviceMesh.from_group"),
        (lambda: reduce_scatter(x, axis, sizes=(2, 3)), "5 tokens", "dim 1", "(2, 3)"),
        (lambda: seq_to_head(x[0], axis), "x (4, 6, 3)", "4 dims"),
        (lambda: seq_to_head(x, axis, sizes=(4, 4, 4)), "sizes (4, 4, 4)", "2 ", "'ring'"),
        (lambda: seq_to_head(x, axis, sizes=(5, 5)), "x (2, 4, 6, 3)", "5 tokens", "(5, 5)"),
        (lambda: seq_to_head(x, axis, heads=[range(3)]), "heads [range(0, 3)]", "2 "),
        (lambda: seq_to_head(x, axis, heads=[[0], [1]]), "heads", "2 "),
        (lambda: seq_to_head(x, axis, heads=[range(3, 6), range(3)]), "heads", "0"),
        (lambda: seq_to_head(x, axis, heads=[range(2), range(3, 6)]), "heads", "gaps"),
        (lambda: seq_to_head(x, axis, heads=[range(3), range(3, 5)]), "end at 5", "6 heads"),
        (lambda: head_to_seq(x[:, :3], axis), "3 tokens", "2 ", "sizes="),
        (lambda: head_to_seq(x, axis, heads=[range(5), range(5, 10)]), "6 heads", "rank"),
        (lambda: merge_scatter(None, lse, axis), "out ", "NoneType"),
        (lambda: merge_scatter(x, None, axis), "lse ", "NoneType"),
        (lambda: merge_scatter(x[0, 0, 0], x[0, 0, 0], axis), "out (3,)"),
        (lambda: merge_scatter(x, lse[:, :3], axis), "lse (2, 3, 6)", "(2, 4, 6)"),
        (lambda: merge_scatter(x.bfloat16(), lse.bfloat16(), axis), "lse", "torch.float32"),
    ]


def neighbours(ring) -> Table:
    x = torch.zeros(2, 4, 3)
    of_tokens, of_channels = (DTensor.from_local(x, ring, [Shard(dim)]) for dim in (1, 2))
    uneven = Layout([[range(5)], [range(5, 8)]])
    return [
        (lambda: shift(x, Layout.contiguous(8, 4), ring, 1), "4 shards"),
        (lambda: shift(x[:, 1:], EIGHT, ring, 1), "x (2, 3, 3)", "4 tokens"),
        (lambda: shift(x, EIGHT, ring, 1, dim=3), "dim 3"),
        (lambda: shift(x, EIGHT, ring, -1, mask=MASK), "offset"),
        (lambda: shift(x, EIGHT, ring, 1, mask=object()), "mask", "object"),
        (lambda: shift(x, EIGHT, ring, 1, [0, 9]), "document", "9"),
        (lambda: shift(x[:1], EIGHT, ring, 1, [[0, 8], [0, 3, 8]]), "2 rows"),
        (lambda: shift(of_channels, EIGHT, ring, 1), "Shard(dim=2)", "Shard(dim=1)"),
        (lambda: halo(x, EIGHT, ring, 1, 1, mask=MASK), "right"),
        (lambda: halo(x, EIGHT, ring, -1), "left=-1"),
        (lambda: halo(of_tokens, EIGHT, ring, 1), "DTensor", "to_local"),
        (lambda: relayout(x, EIGHT, Layout.contiguous(9, 2), ring), "target", "9"),
        (lambda: relayout(of_tokens, EIGHT, uneven, ring), "(5, 3)", "(4, 4)"),
        (lambda: short_convolution(x, torch.zeros(4, 4), EIGHT, ring), "weight (4, 4)"),
        (lambda: short_convolution(x, torch.zeros(3, 0), EIGHT, ring), "weight (3, 0)"),
        (lambda: short_convolution(x, None, EIGHT, ring), "weight", "NoneType"),
        (lambda: short_convolution(x, torch.zeros(3, 4), EIGHT, ring, torch.zeros(4)), "bias (4,)"),
    ]


def models() -> Table:
    plain, partly, hooked = (nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3)) for _ in range(3))
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (2,)))
    hooked = DistributedDataParallel(hooked)
    sum_gradients(hooked)
    return [
        (lambda: sum_gradients(plain), "Sequential", "all_reduce"),
        (lambda: sum_gradients(partly), "1.weight"),
        (lambda: sum_gradients(hooked), "communication hook"),
    ]


def eight_ranks() -> Table:
    return [*dtensors(), *sequences(), *partial_sums()]


def dtensors() -> Table:
    built, shape = mesh(ring=2, ulysses=2, tp=2), (2, 8, 8, 3)
    three, ring, ulysses = built["ring", "ulysses", "tp"], built["ring"], built["ulysses"]
    others, placed = mesh(shard=2, ulysses=4)["ulysses"], (Shard(1), Shard(1), Shard(2))

    def of(*placements, shape=shape) -> DTensor:
        return distribute_tensor(torch.zeros(shape), three, placements, src_data_rank=None)

    x = of(*placed)
    pending = DTensor.from_local(torch.zeros(2, 4, 4, 3), three, [Shard(1), Shard(1), Partial()])
    of_sums = [Replicate(), Partial(), Replicate()]
    out, lse = (DTensor.from_local(torch.zeros(sizes), three, of_sums) for sizes in (shape, shape[:3]))

    def uneven(placement) -> DTensor:
        return place(torch.zeros(2, 5, 5, 3), three, (Replicate(), placement, Replicate()))

    return [
        (lambda: seq_to_head(of(Shard(1), Replicate(), Shard(2)), ulysses), "x is Replicate()", "be Shard(dim=1)"),
        (lambda: head_to_seq(x, ulysses), "x is Shard(dim=1) on axis 'ulysses'", "[2, 8, 8, 3]", "be Shard(dim=2)"),
        (lambda: all_gather(of(Shard(1), Shard(0), Shard(2)), ulysses), "x is Shard(dim=0) on axis 'ulysses'"),
        (lambda: seq_to_head(pending, ulysses), "x is Partial(sum) on axis 'tp'"),
        (lambda: seq_to_head(x, ring), "x is Shard(dim=1) on axis 'ulysses'", "over axis 'ring'", "Shard(dim=2) or"),
        (lambda: seq_to_head(x, built["shard"]), "axis 'shard'"),
        (lambda: seq_to_head(x, others), "axis 'ulysses'", "other ranks"),
        (lambda: seq_to_head(x, ulysses, heads=[range(1), range(1, 4)]), "heads (1, 3)", "4 as (2, 2)"),
        (lambda: seq_to_head(of(*placed, shape=(2, 8, 6, 3)), ulysses), "6 heads"),
        (lambda: seq_to_head(uneven(Shard(1)), ulysses, sizes=(2, 3)), "sizes (2, 3)", "5 as (3, 2)"),
        (lambda: reduce_scatter(uneven(Partial()), ulysses, sizes=(2, 3)), "sizes (2, 3)", "5 as (3, 2)"),
        (lambda: merge_scatter(out, lse, ulysses), "LogSumExpPartial(packed=False)"),
        (lambda: merge_scatter(out, lse.to_local(), ulysses), "out DTensor, lse local"),
    ]


def sequences() -> Table:
    built = mesh(ring=4, ulysses=2)
    ring, both, ids = built["ring"], built["ring", "ulysses"], torch.zeros(2, 16, 3)
    layout, ten, two = Layout.zigzag(16, 4), Layout.zigzag(10, 4), Layout.zigzag(16, 2)
    x, square = distribute_sequence(ids, layout, ring), DTensor.from_local(torch.zeros(16, 16), ring, [Replicate()])
    uneven = Layout([[range(1)], [range(1, 2)], [range(2, 3)], [range(3, 16)]])
    return [
        (lambda: distribute_sequence(ids[:, :10], ten, ring), "(3, 3, 2, 2)", "'ring'", "(3, 3, 3, 1)"),
        (lambda: distribute_sequence(ids, two, ring), "2 shards", "axis ring has 4 ranks"),
        (lambda: distribute_sequence(ids, two, both), "2 shards", "ring x ulysses has 4 x 2 ranks"),
        (lambda: distribute_sequence(ids, layout, ring, dim=0), "(2, 16, 3) has 2 tokens", "16"),
        (lambda: distribute_sequence(ids, layout, ring, dim=3), "dim 3", "0..2"),
        (lambda: distribute_sequence(ids.numpy(), layout, ring), "x is a ndarray"),
        (lambda: distribute_sequence(x, layout, ring), "x is a DTensor"),
        (lambda: distribute_sequence(ids, [4] * 4, ring), "layout is a list", "SequenceLayout"),
        (lambda: distribute_sequence(ids, layout, None), "mesh is a NoneType", "DeviceMesh"),
        (lambda: distribute_sequence(ids, layout, both, axes=["ulysses", "ring"]), "('ulysses', 'ring')"),
        (lambda: distribute_sequence(ids, layout, both, axes=["cp"]), "('cp',)", "('ring', 'ulysses')"),
        (lambda: distribute_sequence(ids, layout, both, axes=[]), "()", "('ring', 'ulysses')"),
        (lambda: sequence_from_local(ids[:, :3], ten, ring), "(3, 3, 2, 2)", "'ring'", "(3, 3, 3, 1)"),
        (lambda: sequence_from_local(ids[:, :5], layout, ring), "(2, 5, 3) has 5 tokens", "has 4"),
        (lambda: sequence_from_local(ids[:, :4], layout, ring, rows=["shard"]), "rows", "'shard'", "'ring'"),
        (lambda: gather_sequence(ids, layout), "x is a Tensor", "DTensor"),
        (lambda: gather_sequence(x, Layout.zigzag(8, 4)), "DTensor", "8 tokens"),
        (lambda: gather_sequence(x, layout, dim=0), "2 tokens", "16"),
        (lambda: gather_sequence(square, layout), "dim="),
        (lambda: gather_sequence(x, uneven), "(1, 1, 1, 13)", "(4, 4, 4, 4)"),
    ]  # fmt: skip


def partial_sums() -> Table:
    """Redistributions of partial attention results that torch computes wrongly."""
    built, packed = mesh(ring=4, tp=2), pack_partial(torch.zeros(2, 11, 6, 4), torch.zeros(2, 11, 6))
    ring, both, merging = built["ring"], built["ring", "tp"], LogSumExpPartial()

    def of(*placements, x=packed) -> DTensor:
        return DTensor.from_local(x, both if len(placements) == 2 else ring, placements)

    return [
        (lambda: of(merging, x=packed.clone().requires_grad_()).full_tensor(), "gradient", "merge_scatter(out, lse"),
        (lambda: of(merging).requires_grad_().redistribute(placements=[Shard(1)]), "gradient"),
        (lambda: of(LogSumExpPartial(packed=False)).full_tensor(), "out or lse alone", "merge_scatter"),
        (lambda: of(merging, Shard(3)).full_tensor(), "last dim"),
        (lambda: of(merging).redistribute(placements=[Shard(-1)]), "last dim"),
        (lambda: of(merging, x=packed.bfloat16()).full_tensor(), "torch.bfloat16"),
        (lambda: of(merging, x=packed.long()).full_tensor(), "torch.int64"),
        (lambda: of(merging, x=packed[..., :1]).redistribute(placements=[Shard(0)]), "not a packed"),
        (lambda: distribute_tensor(packed, ring, [merging], src_data_rank=None), "from_local"),
        (lambda: of(merging, Partial("sum")).full_tensor(), "Partial"),
    ]


def missing_words(table: Callable[[], Table]) -> list[tuple[str, str]]:
    """Returns the words that errors lack, each with the error; asserts that no call communicates."""
    rows = table()
    with Dispatched() as dispatched:
        messages = value_errors([call for call, *_ in rows])
    assert not dispatched.sent
    pairs = [(word, message) for (_, *words), message in zip(rows, messages, strict=True) for word in words]
    return [(word, message) for word, message in pairs if word not in message]


@pytest.mark.parametrize(("ranks", "table"), [(2, two_ranks), (8, eight_ranks)])
def test_refusals_on_every_rank(worlds, ranks, table):
    assert worlds(ranks).run(missing_words, table) == [[]] * ranks


# -- values that are accepted -----------------------------------------------------------------------------------------


def test_integers_of_numpy_and_tensors_are_accepted():
    assert Layout.zigzag(np.int64(8), torch.tensor(2)) == Layout.zigzag(8, 2)
    assert Layout.striped(8, 2, stripe=np.int32(2)) == Layout.striped(8, 2, stripe=2)
    assert EIGHT.refine(torch.tensor(2)) == EIGHT.refine(2) and EIGHT.spans(np.int64(1)) == EIGHT.spans(1)
    assert Layout.balanced(8, 2, documents=np.array([0, 3, 8])) == Layout.balanced(8, 2, documents=[0, 3, 8])
