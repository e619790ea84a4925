"""The conformance suite on every method in every composition; and tests of the suite on methods with planted errors."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from math import prod
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.attention import AttentionMask, AttentionSpec, Local, Method, Saved, Ulysses, reference_attention
from armillary.attention.reference import visible_pairs
from armillary.attention.tiling.merge import Merge, Sum
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import mesh
from conformance import (
    GRADIENTS,
    KINDS,
    LAYOUTS,
    MASKS,
    MEMORY,
    METHODS,
    SAVING,
    Case,
    Composition,
    cases,
    check,
    compositions,
    drawn,
    errors,
    product_cases,
    with_every_kind,
)
from conformance.case import PATTERNS, mask_kinds
from conformance.command import main
from conformance.memory import TENSOR_LAYOUTS, Memory
from conformance.report import KINDS_OF_CASES
from conformance.run import Verdict, judge
from conformance.tensors import drawn_layout, drawn_sizes

of = Composition.of
THOROUGH = [of("local"), of("ring-queries", ring=2)]
"""Compositions that run the pairwise-covering sample."""
HEADS = [of(f"{a}+{b}", ring=2, ulysses=2) for a in ("ulysses", "upipe") for b in ("token_ring", "all_gather")]
BRIEF = {
    1: [of("ring", ring=1), of("ulysses", ulysses=1), of("upipe", ulysses=1)],
    2: [of("ring-keys", ring=2), of("token_ring", ring=2), of("all_gather", ring=2), of("ulysses", ulysses=2)],
    4: [
        *(of("usp", ring=2, ulysses=2), of("ring-keys", ring=4), of("token_ring", ring=4), of("ulysses", ulysses=4)),
        *(of("wallfacer-2-queries", ring=4), of("ring+token_ring", nodes=2, devices=2)),
    ],
}
"""By ranks: compositions that run a brief sample with each setting once, another sample for each composition.

Four ranks run every third case, and all of them under the mark `long`; fewer ranks run each setting.
"""
PARTLY = {
    4: [
        *(of("all_gather", ring=4), of("wallfacer-1", ring=4), of("wallfacer-2", ring=4), of("upipe", ulysses=4)),
        *(of("wallfacer-2-p2p", ring=4), of("wallfacer-2-keys", ring=4), of("ring-queries", ring=2, tp=2)),
        *(*HEADS, of("upipe+ring", ring=2, ulysses=2), of("ring+ring", nodes=2, devices=2)),
        *(
            of("upipe+ring+token_ring", nodes=2, devices=1, ulysses=2),
            of("ulysses+ring+ring", nodes=1, devices=2, ulysses=2),
        ),
    ],
    8: [
        *(of("ring", ring=8), of("wallfacer-2-queries", ring=8), of("usp", ring=2, ulysses=4)),
        *(of("ulysses+wallfacer", ring=4, ulysses=2), of("upipe+wallfacer", ring=4, ulysses=2)),
        *(of("wallfacer-2", shard=2, ring=4), of("ring+token_ring", nodes=2, devices=4)),
        *(of("ring+ring", nodes=4, devices=2), of("ulysses+ring+token_ring", nodes=2, devices=2, ulysses=2)),
        of("upipe+ring+ring", nodes=2, devices=2, ulysses=2),
    ],
    16: [of("wallfacer-4-keys", ring=16), of("wallfacer-4-queries", ring=16)],
}
"""By ranks: compositions that run a fifth of a brief sample, or a sixth on more than four ranks."""
Chosen = tuple[Composition, int, int]
"""(composition, number of its brief sample, every how many cases one runs)."""


def calls(brief_step: int = 3, step: int = 5) -> Iterator[list[Chosen]]:
    """Yields the compositions of one call: about half of those with equal ranks.

    Args:
        brief_step: compositions of `BRIEF` on four ranks run one case in this many.
        step: those of `PARTLY` likewise, on more than four ranks one in one more.
    """
    number = 0
    for ranked in (BRIEF, PARTLY):
        for ranks, some in ranked.items():
            every = step + (ranks > 4) if ranked is PARTLY else brief_step if ranks == 4 else 1
            chosen = [(one, i, every) for i, one in enumerate(some, number)]
            number += len(some)
            yield from (chosen[::2], chosen[1::2]) if ranks < 16 else (chosen,)


def part_of_brief(number: int, every: int) -> list[Case]:
    """Returns one in `every` cases of a brief sample; one of them has every kind of mask, one per row."""
    chosen = cases(brief=number)[number % every :: every]
    replaced = next((case for case in chosen if case.mask.per_row), chosen[0])
    return [with_every_kind(case) if case is replaced else case for case in chosen]


EIGHT = [
    *(of("wallfacer-2-queries", ring=8), of("ring+token_ring", nodes=2, devices=4)),
    of("upipe+ring+ring", nodes=2, devices=2, ulysses=2),
]
"""Compositions on eight ranks that have no counterpart on four: rings of teams, a larger ring in a node, three axes."""


def marked() -> list[Any]:
    """Adds `EIGHT` to the calls on up to four ranks, and marked with `long` all calls on four ranks or more in full."""
    every = list(calls())
    eight = [part for some in every for part in some if part[0] in EIGHT]
    more = [pytest.param(some, marks=pytest.mark.long) for some in calls(1, 3) if some[0][0].ranks >= 4]
    return [*(some for some in every if some[0][0].ranks <= 4), eight, *more]


def through(composition: Composition) -> Any:
    """Marks compositions of several ranks with `long`: `BRIEF` has their settings, random cases have pairs."""
    return pytest.param(composition, marks=[pytest.mark.long] * (composition.ranks > 1))


def named(axes: dict[str, int]) -> str:
    return "-".join(f"{name}{size}" for name, size in axes.items()) or "local"


def build(axes: dict[str, int]):
    """Builds this rank's method over these axes."""
    if "ulysses" in axes:
        return of("usp" if "ring" in axes else "ulysses", **axes).build()
    return of("ring" if axes else "local", **axes).build()


def failures_of(attend, chosen, seeds: int = 0) -> list[str]:
    """Returns the errors of failing cases. Ranks stay synchronized after a failed check, so the next case can run."""
    failed = []
    for case in chosen:
        try:
            check(attend, replace(case, seed=case.seed + seeds))
        except AssertionError as failure:
            failed.append(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {failure}")
    return failed


def conform(some: list[tuple[Composition, list[Case]]]) -> list[str]:
    """Runs cases; ranks that differ only on outer axes have different data, like replicas."""
    failed = list[str]()
    for composition, chosen in some:
        axes = mesh(**dict(composition.axes))
        replica = 10 * axes["shard"].get_local_rank() + axes["tp"].get_local_rank()
        failures = failures_of(composition.build(), chosen, seeds=100_000 * replica)
        failed += [f"{composition}: {failure}" for failure in failures]
    return failed


@pytest.mark.parametrize("composition", map(through, THOROUGH), ids=str)
def test_all_pairs_of_settings(worlds, composition):
    assert worlds(composition.ranks).run(conform, [(composition, cases())]) == [[]] * composition.ranks


@pytest.mark.parametrize("some", marked(), ids=lambda some: " ".join(str(composition) for composition, *_ in some))
def test_every_setting_once(worlds, some):
    ranks, chosen = some[0][0].ranks, [(composition, part_of_brief(*part)) for composition, *part in some]
    assert worlds(ranks).run(conform, chosen) == [[]] * ranks


def test_every_composition_runs_every_kind_of_mask():
    every = [*(part_of_brief(*part) for _, *part in chain(*calls())), *(cases() for _ in THOROUGH)]
    assert {len(set[str]().union(*(mask_kinds(case.mask) for case in chosen))) for chosen in every} == {len(PATTERNS)}


def test_suite_has_all_registered_methods():
    actual = {composition.method for composition in chain(THOROUGH, *BRIEF.values(), *PARTLY.values())}
    assert actual | {"wallfacer"} >= set(METHODS)


# -- several sinks per head -------------------------------------------------------------------------------------------

SINKS = Case(sinks=3, heads=8, kv_heads=2, batch=2, length=37)
WITH_SINKS = [
    SINKS,
    replace(SINKS, projected=True, needs="sxw"),
    replace(SINKS, sinks=2, needs="s", mask=AttentionMask(causal=False, window=(5, 2)), dtype=torch.bfloat16),
]


def every_method(ranks: int, all_cases: bool) -> list[str]:
    """Runs all cases on all compositions, or one case on each method that is not composed of others."""
    some = [one for one in compositions(list(METHODS), [ranks]) if dict(one.axes).get("ulysses", 1) <= 8]
    some = [one for one in some if all_cases or "+" not in one.method]
    chosen = [WITH_SINKS if all_cases else [WITH_SINKS[i % len(WITH_SINKS)]] for i in range(len(some))]
    return conform(list(zip(some, chosen, strict=True)))


@pytest.mark.parametrize(
    ("ranks", "all_cases"),
    [(1, True), (4, False), *(pytest.param(ranks, True, marks=pytest.mark.long) for ranks in (2, 4, 8))],
)
def test_each_of_several_sinks_per_head_has_its_gradient(worlds, ranks, all_cases):
    assert worlds(ranks).run(every_method, ranks, all_cases) == [[]] * ranks


# -- random cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [range(16), pytest.param(range(16, 60), marks=pytest.mark.long)], ids=str)
def test_random_cases_conform(worlds, indices):
    """On sub-meshes of eight ranks: strides, autocast, checkpoints, projections, random layouts and masks."""
    trials = [trial for trial in (drawn(0, index) for index in indices) if not trial.case.dtensor]
    verdicts = worlds(8).run(judge, trials)[-1]
    failed = [(trial, verdict) for trial, verdict in zip(trials, verdicts, strict=True) if verdict.failure]
    assert not failed


def test_random_dtensors_conform(worlds):
    """DTensors of q, k and v and of hidden states, with rows and heads sharded or not, mostly uneven shards."""
    every = [trial for trial in (drawn(26, index) for index in range(160)) if trial.case.dtensor]
    trials = [trial for trial in every if trial.composition.ranks <= 4 and not trial.case.compiled]
    assert all(any(map(of, trials)) for kind, of in KINDS_OF_CASES.items() if "dtensors" in kind)
    verdicts = worlds(4).run(judge, trials)[-1]
    failed = [(trial, verdict) for trial, verdict in zip(trials, verdicts, strict=True) if verdict.failure]
    assert not failed


def test_a_case_depends_only_on_seed_and_index():
    trials = [drawn(3, index) for index in range(400)]
    assert trials[::-1] == [drawn(3, index) for index in reversed(range(400))]
    assert drawn(4, 7) != drawn(3, 7) and len({str(trial.case) for trial in trials}) == 400
    assert {trial.composition.method for trial in trials} == {
        method for method in METHODS if any(list(METHODS[method].meshes(ranks)) for ranks in range(1, 9))
    }
    assert {trial.composition.ranks for trial in trials} == set(range(1, 9))


WAYS = {
    "saving": SAVING,
    "memory": MEMORY,
    "gradient": GRADIENTS,
    "kind": LAYOUTS,
    "autocast": (None, torch.bfloat16, torch.float16),
    "beside": ("", "b", "h", "bh"),
    "sinks": (0, 1, 3),
    **dict.fromkeys(("compiled", "dtensor", "weights", "projected"), (False, True)),
}


def test_every_kind_of_mask_is_drawn_in_every_way():
    """About half of the masks are plain; the other kinds occur with all settings, one in a hundred compiled."""
    indices = range(600), range(99, 6000, 100)
    actual, compiled = ([drawn(6, index) for index in chosen] for chosen in indices)
    assert 0.4 < sum(trial.case.mask.pattern is not None for trial in actual) / len(actual) < 0.6
    for name in PATTERNS.values():
        of_kind = [trial for trial in (*actual, *compiled) if name in mask_kinds(trial.case.mask)]
        assert len({trial.composition.method for trial in of_kind}) > 12, name
        assert {trial.case.mask.window is None for trial in of_kind} == {True, False}, name
        for way, levels in WAYS.items() - {("beside", WAYS["beside"])}:
            assert {getattr(trial.case, way) for trial in of_kind} == set(levels), (name, way)


def test_every_way_of_calling_is_drawn():
    actual = [drawn(5, index).case for index in range(400)]
    for name, levels in WAYS.items():
        assert {getattr(case, name) for case in actual} == set(levels)


@pytest.mark.parametrize("how", TENSOR_LAYOUTS)
@pytest.mark.parametrize("name", ["q", "dout", "x"])
def test_memory_changes_strides_and_no_values(how, name):
    shape = (2, 7, 3) if name == "x" else (2, 7, 4, 3)
    for seed in range(10):
        memory = Memory.of(Case(memory=how, gradient=how, seed=seed), name, len(shape))
        x = memory.values(torch.randn(shape))
        laid = memory.strided_copy(x)
        assert torch.equal(laid, x)
        assert how == "plain" or not laid.is_contiguous()
        assert how != "permuted" or laid.stride(-1) != 1
        assert how != "sliced" or laid.storage_offset()
        assert how != "expanded" or 0 in laid.stride()


@pytest.mark.parametrize("kind", ["uneven", "spans"])
@pytest.mark.parametrize(("length", "shards", "least"), [(1, 1, 1), (6, 3, 2), (29, 4, 2), (64, 5, 1)])
def test_random_layouts_are_partitions_without_empty_shards(kind, length, shards, least):
    for seed in range(20):
        random = Random(seed)
        layout = drawn_layout(random, drawn_sizes(random, length, shards, least), kind)
        assert (layout.length, layout.shards) == (length, shards) and min(layout.sizes) >= least
        assert kind == "spans" or all(len(layout.spans(shard)) == 1 for shard in range(shards))


# -- adding a method needs one new file -------------------------------------------------------------------------------


class Summed(Method):
    """The simplest method: every rank gathers all keys, by a sum over ranks."""

    def __init__(self, axis) -> None:
        self.axis = Axis.of(axis)
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q, k, v, spec: AttentionSpec):
        merged = Merge.of(q, v)
        for shard, (keys, values) in enumerate(self._gather(k, v, spec)):
            spec.block(self.shard, shard).forward(q, keys, values, merged)
        out, lse = merged.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout, saved: Saved, spec: AttentionSpec):
        dq, local_grads = Sum.like(saved.q), []
        for shard, (k, v) in enumerate(self._gather(saved.k, saved.v, spec)):
            dk, dv = Sum.like(k), Sum.like(v)
            spec.block(self.shard, shard).backward(dout, *saved._replace(k=k, v=v), dq, dk, dv)
            for gradient in (dk.value().contiguous(), dv.value().contiguous()):
                dist.all_reduce(gradient, group=self.axis.group)
                local_grads += [gradient] * (shard == self.shard)
        return dq.value(), *local_grads

    def _gather(self, k, v, spec: AttentionSpec):
        for shard, tokens in enumerate(spec.key_layout.sizes):
            both = [x.new_zeros(x.shape[0], tokens, *x.shape[2:]) for x in (k, v)]
            for x, local in zip(both, (k, v), strict=True):
                x.copy_(local) if shard == self.shard else None
                dist.all_reduce(x, group=self.axis.group)
            yield both


def summed(axes: dict[str, int], brief: int) -> list[str]:
    attend = Summed(mesh(**axes)["ring"])
    return failures_of(Ulysses(mesh(**axes)["ulysses"], attend) if "ulysses" in axes else attend, cases(brief=brief))


@pytest.mark.parametrize(("axes", "brief"), [({"ring": 2}, 1), ({"ring": 2, "ulysses": 2}, 2)])
def test_method_of_this_file_conforms_alone_and_inside_ulysses(worlds, axes, brief):
    assert worlds(prod(axes.values())).run(summed, axes, brief) == [[]] * prod(axes.values())


# -- rules for every method -------------------------------------------------------------------------------------------


def gradients_of_lse(all_axes: list[dict[str, int]]) -> list[str]:
    return [gradient_of_lse(axes) for axes in all_axes]


def gradient_of_lse(axes: dict[str, int]) -> str:
    attend = build(axes)
    layout = attend.layout(8, kind="contiguous")
    q, k, v = (torch.randn(1, layout.sizes[attend.shard], 4, 8, requires_grad=True) for _ in range(3))
    _, lse = attend(q, k, v, mask=AttentionMask(), layout=layout, return_lse=True)
    try:
        lse.sum().backward()
    except (ValueError, RuntimeError) as refused:
        return str(refused)
    return "accepted"


def test_gradients_of_lse_raise(worlds):
    for rank in (gradients_of_lse([{}]), *worlds(2).run(gradients_of_lse, [{"ring": 2}, {"ulysses": 2}])):
        for message in rank:
            assert "lse" in message or "does not require grad" in message, message


def with_either_layout(axes: dict[str, int]) -> bool:
    """Returns whether a layout over the sequence axis and one over all ranks give the same bits."""
    attend = build(axes)
    fine = attend.layout(37, kind="zigzag")
    q, k, v = (
        fine.take(torch.randn(2, 37, heads, 8, generator=torch.Generator().manual_seed(heads)), attend.shard)
        for heads in (8, 2, 2)
    )
    outs = [attend(q, k, v, mask=AttentionMask(), layout=x) for x in (fine, fine.coarsen(axes["ulysses"]))]
    return torch.equal(*outs)


@pytest.mark.parametrize("axes", [{"ulysses": 2}, {"ring": 2, "ulysses": 2}], ids=named)
def test_a_layout_of_the_sequence_axis_is_accepted(worlds, axes):
    assert all(worlds(prod(axes.values())).run(with_either_layout, axes))


def test_layouts_of_methods_cover_their_ranks(worlds):
    every = compositions(list(METHODS), [4])
    for composition, *answers in zip(every, *worlds(4).run(layouts_and_shards, every), strict=True):
        layouts, shards = zip(*answers, strict=True)
        assert sorted(shards) == list(range(4)) and set(layouts) == {layouts[0]}, composition
        if "wallfacer" not in composition.method:
            axes = Counter(dict(composition.axes))
            ring = (axes["ring"] or 1) * (axes["nodes"] or 1) * (axes["devices"] or 1)
            expected = SequenceLayout.striped(53, ring).refine(axes["ulysses"] or 1)
            assert layouts[0] == expected, composition


class Balanced:
    """A method whose layouts are always balanced for a mask."""

    def __init__(self, attend: Method, mask: AttentionMask) -> None:
        self.attend, self.shard, self.mask = attend, attend.shard, mask

    def layout(self, length: int, kind: str) -> SequenceLayout:
        return self.attend.layout(length, "balanced", self.mask)

    def __call__(self, *args, **kwargs):
        return self.attend(*args, **kwargs)


def each_conforms_balanced() -> list[tuple[bool, list[str]]]:
    return [conform_balanced(composition, i % 3) for i, composition in enumerate(BALANCED)]


def conform_balanced(composition: Composition, number: int) -> tuple[bool, list[str]]:
    """Returns whether the layout is zigzag or contiguous, and failures under one of three masks."""
    documents = (0, 3, 60, 61, 97), (0, 40, 50, 97)
    masks = AttentionMask(documents=documents[0]), AttentionMask(documents=documents), AttentionMask(window=(9, 0))
    case = Case(batch=2, length=97, heads=4, kv_heads=2, mask=masks[number], dtype=torch.float64)
    method = composition.build()
    layout = method.layout(97, "balanced", masks[0])
    simple = layout in [method.layout(97, kind) for kind in ("zigzag", "contiguous")]
    return simple, failures_of(Balanced(method, case.mask), [case])


BALANCED = [
    *(of("ring-keys", ring=4), of("token_ring", ring=4), of("wallfacer-2-queries", ring=4), of("ulysses", ulysses=4)),
    *(of("usp", ring=2, ulysses=2), of("upipe+all_gather", ring=2, ulysses=2)),
]
"""Every sequence method, and both head methods; random cases have the others."""


def test_balanced_layouts_are_exact(worlds):
    for composition, *answers in zip(BALANCED, *worlds(4).run(each_conforms_balanced), strict=True):
        simple, failures = zip(*answers, strict=True)
        assert not [failure for rank in failures for failure in rank], composition
        # One shard has one layout; for two shards a simple layout may be the best one.
        ring = dict(composition.axes).get("ring", 1)
        assert ring == 2 or set(simple) == {ring == 1}, composition


def layouts_and_shards(every: list[Composition]) -> list[tuple[SequenceLayout, int]]:
    methods = [composition.build() for composition in every]
    return [(attend.layout(53, kind="striped"), attend.shard) for attend in methods]


# -- tests of the suite -----------------------------------------------------------------------------------------------


class Toy:
    """Attention on one rank in plain torch, over two halves of the keys, merged. `flaw` plants an error."""

    shard = 0

    def __init__(self, flaw: str = "") -> None:
        self.flaw = flaw

    def layout(self, length: int, kind: str) -> SequenceLayout:
        return getattr(SequenceLayout, kind)(length, 1)

    def __call__(self, q, k, v, *, mask, layout, scale=None, return_lse=False):
        scale = q.shape[3] ** -0.5 if scale is None or self.flaw == "scale ignored" else scale
        out, lse = ToyFunction.apply(q, k, v, mask, scale, self.flaw)
        return (out, lse) if return_lse else out


class ToyFunction(torch.autograd.Function):
    scratch: torch.Tensor

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, flaw):
        mask = replace(mask, causal=False) if flaw == "causal ignored" else mask
        qs, ks, vs = q_and_spread_keys(q, k, v, flaw)
        i, half = torch.arange(q.shape[1]), q.shape[1] // 2
        halves = [slice(half), slice(half, None)]
        parts = [part(qs, ks[:, :, s], vs[:, :, s], pairs(mask, i, i[s], len(q)), scale) for s in halves]
        (one, lse_one), (two, lse_two) = parts
        lse = torch.logaddexp(lse_one, lse_two)
        weights = [(x - lse).exp().nan_to_num() for x in (lse_one, lse_two)]
        if flaw == "bare exp in the merge":
            weights = [x.exp() / (lse_one.exp() + lse_two.exp()) for x in (lse_one, lse_two)]
        if flaw == "lse ignored in the merge":
            weights = [0.5, 0.5]
        out = one * weights[0] + two * weights[1]
        if flaw == "unwritten memory":
            out += torch.empty_like(out) * 0
        if flaw == "not repeatable":
            out *= 1 + 4 * torch.rand(()).item() * torch.finfo(out.dtype).eps
        if flaw == "inputs written to":
            q.mul_(2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given, ToyFunction.scratch = (mask, scale, flaw), lse
        lse = lse.squeeze(-1).transpose(1, 2)
        lse = {"lse in base 2": lse * 1.4427, "lse through bfloat16": lse.bfloat16().to(lse.dtype)}.get(flaw, lse)
        ctx.mark_non_differentiable(lse)
        out = out.transpose(1, 2)
        return (out if flaw == "out in float32" else out.to(q.dtype)), lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        mask, scale, flaw = ctx.given
        qs, ks, vs = q_and_spread_keys(q, k, v, flaw)
        lse = ToyFunction.scratch if flaw == "scratch shared by calls" else lse
        i, dout = torch.arange(q.shape[1]), dout.transpose(1, 2).to(qs.dtype)
        p = (qs @ ks.mT * scale - lse).exp().masked_fill(~pairs(mask, i, i, len(q)), 0)
        delta = 0 if flaw == "delta forgotten" else (dout * out).sum(-1, keepdim=True)
        ds = p * (dout @ vs.mT - delta) * scale
        dq, dk, dv = ds @ ks, ds.mT @ qs, p.mT @ dout
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
        if flaw == "dk a thousandth too large":
            dk *= 1.001
        if flaw == "dk returned as dk + dv":
            dk += dv
        if flaw == "dq through bfloat16":
            dq = dq.bfloat16()
        if flaw == "dv of the last key lost":
            dv[:, :, -1] = 0
        return *(x.transpose(1, 2).to(q.dtype) for x in (dq, dk, dv)), None, None, None


def q_and_spread_keys(q, k, v, flaw: str = "") -> list[torch.Tensor]:
    """Returns q, k and v [B, H, T, D] in at least float32, with keys repeated for their query heads."""
    group, wide = q.shape[2] // k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q, k, v))
    if flaw == "key heads taken in turn":
        return [q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)]
    return [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]


def pairs(mask, i, j, batch) -> torch.Tensor:
    return visible_pairs(mask, i, j, batch)[:, None]


def part(q, k, v, visible, scale) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    return (logits - lse).exp().nan_to_num() @ v, lse


PLAIN = {"keys": ["own"], "sinks": [0], "softcaps": [None]}  # settings that the planted methods support


def test_a_right_method_passes():
    assert not failures_of(Toy(), cases(**PLAIN))


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("dk a thousandth too large", r"float64 .*: dk off by 0\.001 \(limit 1e-10\)$"),
        ("dk returned as dk + dv", r"float32 .*: dk off by \S+ \(limit 2e-06\)$"),
        ("dq through bfloat16", r"float32 .*: dq off by 0\.0\d+ \(limit 2e-06\)$"),
        ("dv of the last key lost", r"bfloat16 .*: dv off by "),
        ("delta forgotten", r"bfloat16 .*: dq off by .*, dk off by "),
        ("lse ignored in the merge", r"bfloat16 causal .*: out off by .*, dq off by .*, dk off by "),
        ("bare exp in the merge", r"shift=1000 .*: out off by inf "),
        ("lse in base 2", r"bfloat16 .*: lse off by 0\.44 "),
        ("lse through bfloat16", r"bfloat16 .*: lse off by 0\.00\d+ \(limit 0\.0001\)$"),
        ("causal ignored", r"bfloat16 causal .*: out off by "),
        ("scale ignored", r"bfloat16 .*scale=0\.\d+.*: out off by "),
        ("key heads taken in turn", r"H8 K2 .* bfloat16.*: out off by "),
        ("unwritten memory", r"bfloat16.*: out off by inf "),
        ("not repeatable", r"float64.*: out differs between two runs"),
        ("scratch shared by calls", r"bfloat16.*: (out|dq) "),
        ("inputs written to", r"bfloat16.*: q was written to"),
        ("out in float32", r"bfloat16.*: out is torch\.float32; it must be torch\.bfloat16"),
    ],
)
def test_a_wrong_method_is_caught_and_named(flaw, says):
    failed = list[str]()
    for case in cases(masks=["full", "causal"], value_dims=(0,), **PLAIN):
        failed += failures_of(Toy(flaw), [case])
        if failed and re.search(says, failed[-1]):
            break
    assert failed and re.search(says, failed[-1]), failed


class Tampered:
    """Calls a right method with changed arguments."""

    def __init__(self, attend: Method, flaw: str) -> None:
        self.attend, self.flaw, self.shard, self.layout = attend, flaw, attend.shard, attend.layout

    def __call__(self, q, k, v, *, sinks=None, softcap=None, key_layout=None, **options):
        if sinks is not None and self.flaw == "sinks ignored":
            sinks = sinks * 0 - torch.inf
        if sinks is not None and self.flaw == "dsinks twice as large":
            sinks = sinks + (sinks - sinks.detach())
        if self.flaw == "softcap ignored":
            softcap = None
        if self.flaw == "layout of the keys ignored" and k.shape[1] == q.shape[1]:
            key_layout = None
        return self.attend(q, k, v, sinks=sinks, softcap=softcap, key_layout=key_layout, **options)


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("sinks ignored", r"float32 .* sinks .*: out off by .*, dsinks off by "),
        ("sinks ignored", r"float32 .* sinks=3 .*: out off by .*, dsinks off by "),
        ("dsinks twice as large", r"bfloat16 .* sinks=3 .*: dsinks off by 1 \(limit 0\.0\d+\)$"),
        ("softcap ignored", r"bfloat16 .* softcap=1\.5 .*: out off by "),
    ],
)
def test_a_method_that_ignores_an_argument_is_caught(flaw, says):
    failed = failures_of(Tampered(Local(), flaw), [case for brief in range(3) for case in cases(brief=brief)])
    assert any(re.search(says, failure) for failure in failed), failed
    assert all(" sinks" in failure or " softcap=" in failure for failure in failed)


def tampered_rings() -> tuple[list[str], list[str]]:
    return tampered_ring(""), tampered_ring("layout of the keys ignored")


def tampered_ring(flaw: str) -> list[str]:
    chosen = [Case(mask=AttentionMask(documents=(0, 11, 40)), length=40, key_kind=kind) for kind in KINDS]
    return failures_of(Tampered(of("ring", ring=4).build(), flaw), chosen)


def test_suite_catches_methods_that_assume_equal_query_and_key_layouts(worlds):
    for right, failed in worlds(4).run(tampered_rings):
        assert not right
        assert len(failed) == 2 and all("zigzag keys=40," in failure for failure in failed)


class Everything:
    """Attention of every rank over the full sequence, gathered by a sum over ranks. `flaw` plants an error."""

    def __init__(self, flaw: str = "") -> None:
        self.flaw, self.shard = flaw, dist.get_rank()

    def layout(self, length: int, kind: str) -> SequenceLayout:
        return getattr(SequenceLayout, kind)(length, dist.get_world_size())

    def __call__(self, q, k, v, *, mask, layout, scale=None, return_lse=False):
        shard = self.shard if self.flaw != "wrong shard" else (self.shard + 1) % layout.shards
        out, lse = EverythingFunction.apply(q, k, v, mask, layout, shard, scale, self.flaw)
        return (out, lse) if return_lse else out


class EverythingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, layout, shard, scale, flaw):
        ctx.given, ctx.inputs = (layout, shard, flaw), [gathered(x, layout, shard).requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            ctx.out, lse = reference_attention(*ctx.inputs, mask=mask, scale=scale, return_lse=True)
        ctx.mark_non_differentiable(lse := layout.take(lse, shard).detach())
        return layout.take(ctx.out, shard).detach(), lse

    @staticmethod
    def backward(ctx, dout, _):
        layout, shard, flaw = ctx.given
        dout = gathered(dout, layout, shard, alone=flaw == "others' queries forgotten")
        gradients = torch.autograd.grad(ctx.out, ctx.inputs, dout)
        return *(layout.take(x, shard) for x in gradients), None, None, None, None, None


def gathered(x, layout, shard, alone: bool = False) -> torch.Tensor:
    """Returns the global tensor from the shards of all ranks; if `alone`, zeros in place of the other ranks' shards."""
    full = x.new_zeros(x.shape[0], layout.length, *x.shape[2:]).index_copy(1, layout.positions(shard), x)
    if not alone:
        dist.all_reduce(full)
    return full


def everything(flaw: str = "") -> list[str]:
    few = {"masks": ["full", "causal"], "lengths": [24, 64], "heads": [(8, 2)], "value_dims": [0], **PLAIN}
    chosen = cases(dtypes=[torch.float64, torch.float32], brief=0, **few)
    return failures_of(Everything(flaw), chosen)


def confused() -> list[list[str]]:
    return [everything(flaw) for flaw in ("", "others' queries forgotten", "wrong shard")]


def test_shards_are_compared_with_their_part_and_swapped_ranks_are_caught(worlds):
    for right, alone, shifted in worlds(4).run(confused):
        assert not right
        assert any("dk off by" in failure for failure in alone)
        assert any("out off by" in failure for failure in shifted)


# -- limits -----------------------------------------------------------------------------------------------------------

THREE_TOKENS = Case(
    batch=1,
    length=24,
    heads=8,
    kv_heads=8,
    head_dim=8,
    value_dim=8,
    dtype=torch.bfloat16,
    mask=AttentionMask(documents=(0, 1, 8, 14, 24)),
    kind="contiguous",
    scale=0.53,
    seed=182,
)
"""Three tokens per shard on eight ranks: a single shard's error exceeds flash attention's on the full sequence."""


def test_shards_of_a_few_tokens_are_judged_together(worlds):
    assert worlds(8).run(searched, [of("ring", ring=8), of("token_ring", ring=8)], THREE_TOKENS) == [[]] * 8


def searched(some: list[Composition], case: Case) -> list[str]:
    return [message for composition in some for message in failures_of(composition.build(), [case])]


ONE_KEY = AttentionMask(window=(0, 0))
"""Every query sees one key: dq and dk are differences of equal numbers."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cancelling_sums_are_judged_by_their_addends(dtype):
    case = Case(dtype=dtype, mask=ONE_KEY, kind="contiguous")
    check(Local(), case)
    (failed,) = failures_of(Toy("delta forgotten"), [case])
    assert re.search(r": dq off by 1 \(.*, dk off by 1 \(", failed)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 4.0])
def test_limits_scale_with_inputs(scale):
    case = Case(dtype=torch.float32, scale=scale, kind="contiguous")
    check(Toy(), case)
    (failed,) = failures_of(Toy("dv of the last key lost"), [case])
    assert "dv off by" in failed


# -- the sample -------------------------------------------------------------------------------------------------------


def settings_of(case: Case) -> dict:
    """Returns the setting of each factor in a case."""
    mask = case.mask
    return {
        "mask": (type(mask.pattern), mask.causal, mask.window is not None, mask.documents is not None, mask.per_row),
        "heads": (case.heads, case.kv_heads),
        "wider": case.value_dim - case.head_dim,
        "keys": case.is_cross_attention,
        "scale": case.scale is None,
        **{name: getattr(case, name) for name in ("batch", "length", "head_dim", "dtype", "kind", "memory")},
        **{name: getattr(case, name) for name in ("sinks", "softcap")},
    }


def test_sample_has_all_pairs_of_settings():
    actual = [settings_of(case) for case in cases()]
    levels = {factor: {each[factor] for each in actual if each["head_dim"] <= 40} for factor in actual[0]}
    met = {(f, each[f], g, each[g]) for each in actual for f, g in combinations(levels, 2)}
    assert met >= {(f, a, g, b) for f, g in combinations(levels, 2) for a in levels[f] for b in levels[g]}
    assert {factor: len(levels[factor]) for factor in ("mask", "heads", "dtype", "kind", "keys", "sinks")} == {
        "mask": len(MASKS),
        "heads": 5,
        "dtype": 3,
        "kind": 3,
        "keys": 2,
        "sinks": 3,
    }
    assert {case.head_dim for case in cases()} >= {8, 64, 128, 256}
    assert {(case.keys > case.length) - (case.keys < case.length) for case in cases()} == {-1, 0, 1}


@pytest.mark.parametrize("number", range(4))
def test_a_brief_sample_has_each_setting_once(number):
    def levels(chosen):
        return {(factor, setting) for case in chosen for factor, setting in settings_of(case).items()}

    large = {("head_dim", dim) for dim in (64, 128, 256)}
    patterns = {(name, setting) for name, setting in levels(cases()) if name == "mask" and setting[0] is not type(None)}
    this, *following = (levels(cases(brief=number + i)) for i in range(3))
    assert this >= levels(cases()) - large - patterns and this.union(*following) >= patterns
    assert len(cases(brief=number)) < 13


def test_cases_are_reproducible_and_distinct():
    for chosen in (cases(), [*cases(brief=1), *cases(brief=2)], list(product_cases(1, [torch.float64]))):
        assert len(set(chosen)) == len({str(case) for case in chosen}) == len(chosen)
    assert cases() == cases() and cases(brief=3) == cases(brief=3) and len(cases()) < 90
    assert list(product_cases(2)) == list(product_cases(2)) != list(product_cases(3))


def test_the_product_has_every_mask_layout_heads_and_dtype():
    settings = [settings_of(case) for case in product_cases()]
    assert (
        len({(each["mask"], each["kind"], each["heads"], each["dtype"]) for each in settings}) == len(MASKS) * 3 * 5 * 3
    )


def test_errors_are_measured_for_the_tensors_of_a_case():
    assert set(errors(Toy(), Case(needs="kv"))) == {"out", "lse", "dk", "dv"}
    assert set(errors(Toy(), Case(needs=""))) == {"out", "lse"}
    assert set(errors(Local(), Case(sinks=1, needs="s"))) == {"out", "lse", "dsinks"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_reports_its_cases(tmp_path, capsys):
    file = tmp_path / "result.json"
    arguments = ["--ranks", "2", "--method", "ring-keys", "ulysses", "--random", "80", "--kind", "strided"]
    assert main([*arguments, "--json", str(file)]) == 0
    messages, actual = capsys.readouterr().out, json.loads(file.read_text())
    ran = sum(row["cases"] for row in actual["rows"])
    assert (
        ran == actual["tried"]["cases"] == actual["tried"]["strided"] > 1
        and f"[{ran}/{ran}] 0 failed" in messages
        and f"{ran} cases, 0 failed" in messages
    )
    assert all(0 < row["worst"] < 1 for row in actual["rows"]) and not actual["failures"]


def test_the_command_names_failures_and_returns_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("conformance.run.judge", judge_badly)
    assert main(["--seed", "7", "--case", "0", "1", "2"]) == 1
    messages = capsys.readouterr().out
    assert "3 cases, 3 failed" in messages
    assert re.search(
        rf"^FAILED --seed 7 --case 0: {drawn(7, 0).composition}: B\d.*: dq off by 3 \(limit 1\)$", messages, re.M
    )
    assert re.search(r"^FAILED --seed 7 --case 1: .*: RuntimeError: no$", messages, re.M)


def judge_badly(chunk, device):
    """Raises on one rank for the second case."""
    if dist.get_rank() and any(trial.number == 1 for trial in chunk):
        raise RuntimeError("no")
    return [Verdict(3.0, "dq", "dq off by 3 (limit 1)") for _ in chunk]


# -- forwarded tokens with gaps ---------------------------------------------------------------------------------------

GAPS = [
    Case(mask=AttentionMask(False, (3, 3)), length=64, heads=4),
    Case(mask=AttentionMask(documents=(0, 3, 9, 10, 24, 37, 41, 42, 58, 64)), kind="striped", heads=4, length=64),
    Case(mask=AttentionMask(False, documents=((0, 12, 52, 64), (0, 11, 53, 64))), length=64, heads=4, value_dim=24),
]
"""A later rank sees some tokens of a shard, but none between them: see `test_attention_bytes.py`."""


def through_gaps(names: list[str]) -> list[str]:
    return conform([(of(name, ring=4), GAPS) for name in names])


def test_tokens_forwarded_with_gaps(worlds):
    names = ["ring-keys", "ring-queries", "token_ring", "wallfacer-1"]
    assert worlds(4).run(through_gaps, names) == [[]] * 4
