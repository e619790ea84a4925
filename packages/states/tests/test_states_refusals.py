"""The calls that layers with a state refuse: rows of a call and the words that its ValueError must contain."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, value_errors
from armillary.states import gated_delta_rule, halo_comm_plan, relayout_comm_plan, ssd, state_comm_plan

Table = list[tuple[Callable[[], object], *tuple[str, ...]]]
N = 8
SIZES = {"heads": 2, "key_dim": 4, "value_dim": 4}
OF_ROWS = {"batch": 3, "mask": AttentionMask(documents=[[0, N], [0, 5, N]])}


def one_rank() -> Table:
    return [
        (lambda: state_comm_plan("mamba", SequenceLayout.zigzag(N, 1), **SIZES), "layer"),
        (lambda: state_comm_plan("ssd", SequenceLayout.zigzag(N, 4), **SIZES, **OF_ROWS), "2 rows", "3"),
        (lambda: halo_comm_plan(SequenceLayout.zigzag(N, 4), 3, 4, torch.float32, **OF_ROWS), "2 rows", "3"),
        (lambda: relayout_comm_plan(SequenceLayout.zigzag(N, 1), SequenceLayout.zigzag(16, 4), 4), "length"),
    ]


def two_ranks() -> Table:
    ring, layout = mesh(ring=2)["ring"], SequenceLayout.contiguous(20, 2)
    q, v, g = (torch.zeros(2, 10, *sizes, dtype=torch.float64) for sizes in ((2, 6), (4, 5), (4,)))

    def delta(**wrong) -> Callable[[], object]:
        arguments = {"q": q, "k": q, "v": v, "g": g, "beta": g, "layout": layout, "axis": ring} | wrong
        return lambda: gated_delta_rule(**arguments)

    def mamba(**wrong) -> Callable[[], object]:
        arguments = {"x": v, "Bm": q, "Cm": q, "dt": g, "A": g[0, 0], "layout": layout, "axis": ring} | wrong
        return lambda: ssd(**arguments)

    three = q[:, :, :1].repeat(1, 1, 3, 1)
    return [
        (delta(layout=SequenceLayout.striped(20, 2)), "relayout"),
        (delta(layout=SequenceLayout.contiguous(20, 4)), "4 shards"),
        (delta(axis=None), "2 shards"),
        (delta(layout=None), "layout=None"),
        (delta(layout=SequenceLayout.contiguous(18, 2)), "10 tokens"),
        (delta(mask=AttentionMask(window=(4, 0))), "window"),
        (delta(mask=object()), "mask", "object"),
        (delta(mask=AttentionMask(documents=[[0, 20]] * 3)), "3 rows"),
        (delta(q=q[..., :4]), "q "),
        (delta(q=q[:, :4], k=q[:, :4]), "k "),
        (delta(q=three, k=three), "k has 3 heads"),
        (delta(k=DTensor.from_local(q, ring, [Shard(1)])), "k", "to_local"),
        (delta(v=[1.0]), "v is a list"),
        (delta(g=g[..., :3]), "g "),
        (delta(beta=g.long()), "beta "),
        (delta(initial_state=torch.zeros(2, 4, 5, 6)), "initial_state"),
        (delta(scale=math.nan), "scale"),
        (delta(kernel="fla"), "kernel 'fla'"),
        (delta(kernel="mamba_ssm"), "mamba_ssm"),
        (mamba(mask=AttentionMask(causal=False)), "causal"),
        (mamba(mask=AttentionMask.prefix([0, 20], [3])), "Prefix"),
        (mamba(dt=g[..., :1]), "dt "),
        (mamba(A=g[0, 0, :1]), "A "),
        (mamba(Cm=q[..., :1]), "Cm "),
        (mamba(kernel="flash"), "kernel='flash'"),
    ]


def four_ranks() -> Table:
    over, layout = mesh(ring=2, tp=2)["ring", "tp"], SequenceLayout.contiguous(24, 2)

    def tokens(*placements) -> dict[str, DTensor]:
        sizes = {"q": (2, 6), "k": (2, 6), "v": (4, 5), "g": (4,), "beta": (4,)}
        full = {name: torch.zeros(2, 12, *size, dtype=torch.float64) for name, size in sizes.items()}
        return {name: DTensor.from_local(x, over, placements, run_check=False) for name, x in full.items()}

    def delta(inputs: dict[str, DTensor], layout=layout, axis=over["ring"], **wrong) -> Callable[[], object]:
        return lambda: gated_delta_rule(**inputs | wrong, layout=layout, axis=axis)

    good = tokens(Shard(1), Replicate())
    state = DTensor.from_local(torch.zeros(2, 4, 6, 5, dtype=torch.float64), over, [Shard(1), Replicate()])
    return [
        (delta(good, k=good["k"].to_local()), "k local", "to_local"),
        (delta(good, k=tokens(Shard(1), Shard(2))["k"]), "placed alike"),
        (delta(tokens(Replicate(), Replicate())), "Shard(dim=1)"),
        (delta(tokens(Shard(1), Partial())), "q is Partial(sum) on axis 'tp'"),
        (delta(good, layout=SequenceLayout([[range(10)], [range(10, 24)]])), "(10, 14)"),
        (delta(good, initial_state=state), "initial_state"),
        (delta(good, axis=mesh(ring=2, tp=2)["ulysses"]), "axis 'ulysses'"),
    ]


def missing_words(table: Callable[[], Table]) -> list[tuple[str, str]]:
    """Returns the words that errors lack, each with the error; asserts that no call communicates."""
    rows = table()
    messages = value_errors([refused for refused, *_ in rows])
    pairs = [(word, message) for (_, *words), message in zip(rows, messages, strict=True) for word in words]
    return [(word, message) for word, message in pairs if word not in message]


@pytest.mark.parametrize(("ranks", "table"), [(1, one_rank), (2, two_ranks), (4, four_ranks)])
def test_refusals_on_every_rank(worlds, ranks, table):
    assert worlds(ranks).run(missing_words, table) == [[]] * ranks
