"""Arguments that core refuses by value or type before any communication, with the accepted values."""

import math
from datetime import timedelta

import numpy as np
import pytest
import torch

from armillary.core import (
    Axis,
    CommLedger,
    SequenceLayout,
    all_gather,
    attention_balance,
    build_mesh,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
    start_process_group,
)
from armillary.core.testing import mesh

EIGHT = SequenceLayout.contiguous(8, 2)
X = torch.zeros(2, 8, 3)

LAYOUTS = [
    (lambda: SequenceLayout.contiguous(8.0, 2), r"length=8.0"),
    (lambda: SequenceLayout.contiguous("8", 2), "length='8'"),
    (lambda: SequenceLayout.contiguous(8, None), "shards=None"),
    (lambda: SequenceLayout.contiguous(True, True), "length=True"),
    (lambda: SequenceLayout.zigzag(torch.tensor(8.0), 2), r"length=tensor 8.0"),
    (lambda: SequenceLayout.zigzag(8, math.nan), "shards=nan"),
    (lambda: SequenceLayout.zigzag(8, 0), " 0"),
    (lambda: SequenceLayout.zigzag(8, -2), "-2"),
    (lambda: SequenceLayout.striped(8, 2, stripe=1.5), r"stripe=1.5"),
    (lambda: SequenceLayout.striped(8, 2, stripe=True), "stripe=True"),
    (lambda: SequenceLayout.balanced(8, 2.0), r"shards=2.0"),
    (lambda: SequenceLayout.balanced(8, 2, causal="no"), "causal='no'"),
    (lambda: SequenceLayout.balanced(8, 2, window=4), r"window 4.*\(left, right\)"),
    (
        lambda: SequenceLayout.balanced(8, 2, documents=[[0, 8], 5]),
        r"8\], 5\].*0 .*8",
    ),
    (lambda: SequenceLayout.balanced(8, 2, documents=[0, 3.7, 8]), r"0 .*8"),
    (lambda: attention_balance(EIGHT, window=(1.0, 0)), r"window \(1.0, 0\)"),
    (lambda: SequenceLayout(8), "spans 8"),
    (lambda: SequenceLayout([range(8)]), "span 0"),
    (lambda: SequenceLayout([[(0, 8)]]), r"span \(0, 8\)"),
    (lambda: SequenceLayout([["0:8"]]), "span '0:8'"),
    (lambda: SequenceLayout.read("0-8"), "'0-8'"),
    (lambda: SequenceLayout.read(""), "''"),
    (lambda: SequenceLayout.read(None), "None"),
    (lambda: EIGHT.spans(2), r"shard 2.*2"),
    (lambda: EIGHT.spans(1.0), r"shard=1.0"),
    (lambda: EIGHT.positions(True), "shard=True"),
    (lambda: EIGHT.positions("0"), "shard='0'"),
    (lambda: EIGHT.take(X, 0, dim=3), r"\(2, 8, 3\).*3.*2"),
    (lambda: EIGHT.take(X, 0, dim=1.0), r"dim=1.0"),
    (lambda: EIGHT.take(X, 0, dim=0), r"dim 0.*\(2, 8, 3\).*2 .*8"),
    (lambda: EIGHT.take(X.numpy(), 0), "got ndarray"),
    (lambda: EIGHT.join([X], dim=0), "parts have"),
    (lambda: EIGHT.join(None), r"parts .*NoneType"),
    (lambda: EIGHT.join([X[:, :4], X[:, 4:].double()]), "parts .* 3 dims in torch.float32"),
    (lambda: SequenceLayout([[range(2**70)]]), r"2\^63 - 1"),
    (lambda: SequenceLayout.read("0:99999999999999999999999"), r"2\^63 - 1"),
    (lambda: attention_balance(None), r"layout .*NoneType"),
    (lambda: attention_balance(EIGHT, of_keys="no"), "of_keys='no'"),
    (lambda: EIGHT.join([X, None]), "got NoneType"),
    (lambda: EIGHT.refine(2.0), r"n=2.0"),
    (lambda: EIGHT.refine(0), "cannot cut shards"),
    (lambda: EIGHT.coarsen("2"), "n='2'"),
]


@pytest.mark.parametrize(("make", "message"), LAYOUTS, ids=[message[:40] for _, message in LAYOUTS])
def test_invalid_layouts_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_integers_of_numpy_and_tensors_are_accepted():
    assert SequenceLayout.zigzag(np.int64(8), torch.tensor(2)) == SequenceLayout.zigzag(8, 2)
    assert SequenceLayout.striped(8, 2, stripe=np.int32(2)) == SequenceLayout.striped(8, 2, stripe=2)
    assert EIGHT.refine(torch.tensor(2)) == EIGHT.refine(2) and EIGHT.spans(np.int64(1)) == EIGHT.spans(1)
    documents = np.array([0, 3, 8])
    assert SequenceLayout.balanced(8, 2, documents=documents) == SequenceLayout.balanced(8, 2, documents=[0, 3, 8])


LEDGER = [
    ({"kind": "p2q"}, r"kind='p2q'.*p2p, all_to_all, all_gather, reduce_scatter"),
    ({"kind": 3}, r"kind=3.*p2p"),
    ({"phase": "backwards"}, r"phase='backwards'.*forward, backward"),
    ({"axis": 0}, "axis=0"),
    ({"axis": Axis.alone("ring")}, "the name of an axis is needed"),
]


@pytest.mark.parametrize(("filters", "message"), LEDGER)
def test_ledger_refuses_unknown_kinds_and_phases(filters, message):
    ledger = CommLedger()
    for ask in (ledger.bytes, ledger.messages):
        with pytest.raises(ValueError, match=message):
            ask(**filters)


# -- meshes on an existing process group, and primitives --------------------------------------------------------------

MESHES = [
    ({"device_type": "gpu"}, r"'gpu'.*cpu, cuda"),
    ({"device_type": None}, "None"),
    ({"device_type": torch.device("cpu")}, "device"),
    ({"ring": 2.0}, r"axis ring=2.0"),
    ({"ring": True}, "axis ring=True"),
    ({"ring": "2"}, "axis ring='2'"),
    ({"ring": 0}, "axis ring=0"),
    ({"ring": -2}, "axis ring=-2"),
    ({"ring": 3}, r"3 .*2 "),
    ({"timeout": 60}, "timeout=60"),
    ({"timeout": timedelta(0)}, "timedelta"),
    ({"timeout": None}, "timeout=None"),
]
HEADS = torch.zeros(1, 4, 2, 3)
PRIMITIVES = [
    (lambda axis: all_gather(None, axis), r"x .*NoneType"),
    (lambda axis: all_gather(np.zeros((2, 4)), axis), "x is a ndarray; a tensor is needed; .*torch.as_tensor"),
    (lambda axis: all_gather(HEADS, axis, dim=1.0), r"dim=1.0"),
    (lambda axis: all_gather(HEADS, axis, dim=4), r"x \(1, 4, 2, 3\).*4"),
    (lambda axis: all_gather(HEADS, axis, sizes=[4.0, 4.0]), r"sizes=4.0"),
    (lambda axis: all_gather(HEADS, axis, sizes=[4]), "2 "),
    (lambda axis: all_gather(HEADS, axis, sizes=[-1, 5]), "sizes=-1: .* 0"),
    (lambda axis: reduce_scatter(HEADS, axis, sizes=[True, 3]), "sizes=True"),
    (lambda axis: reduce_scatter([1.0], axis), r"x .*list"),
    (lambda axis: seq_to_head(HEADS[0], axis), "4 dims"),
    (lambda axis: seq_to_head(None, axis), r"x .*NoneType"),
    (lambda axis: seq_to_head(HEADS, axis, heads=[[0], [1]]), "2 "),
    (lambda axis: head_to_seq(HEADS, axis, sizes=["2", 2]), "sizes='2'"),
    (lambda axis: merge_scatter(HEADS, HEADS[..., 0], axis, sizes=[2.0, 2]), r"sizes=2.0"),
    (lambda axis: merge_scatter(HEADS[0, 0, 0], HEADS[0, 0, 0], axis), r"out \(3,\)"),
    (lambda axis: merge_scatter(HEADS, None, axis), r"lse .*NoneType"),
    (lambda axis: merge_scatter(None, HEADS, axis), r"out .*NoneType"),
    (lambda axis: all_gather(HEADS, "ring"), "str"),
    (lambda axis: all_gather(HEADS, axis.group), r"ProcessGroup .*DeviceMesh.from_group"),
    (lambda axis: Axis.of(None), "NoneType"),
]


def errors_of_invalid_meshes() -> list[str]:
    axis, actual = Axis.of(mesh(ring=2)["ring"]), list[str]()
    calls = [lambda options=options: build_mesh(**{"device_type": "cpu", "ring": 2} | options) for options, _ in MESHES]
    calls += [lambda make=make: make(axis) for make, _ in PRIMITIVES]
    for call in calls:
        try:
            with CommLedger() as ledger:
                call()
            actual.append("accepted")
        except ValueError as error:
            actual.append(str(error) if ledger.bytes() == 0 else "sent something")
    return actual


def test_invalid_meshes_and_arguments_of_primitives_raise(worlds):
    messages = [message for _, message in (*MESHES, *PRIMITIVES)]
    for errors in worlds(2).run(errors_of_invalid_meshes):
        for text, message in zip(errors, messages, strict=True):
            with pytest.raises(ValueError, match=message):
                raise ValueError(text)


def test_refused_arguments_start_no_group():
    for wrong in ({"device_type": "gpu"}, {"device_type": "cpu", "timeout": 60}):
        with pytest.raises(ValueError):
            start_process_group(**wrong)
    assert not torch.distributed.is_initialized()
