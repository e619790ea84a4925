"""The conformance suite on every method in every composition; and tests of the suite on methods with planted errors."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from checked import failures_of

from armillary.attention import AttentionMask, Local, Method
from armillary.core import SequenceLayout
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
    Trial,
    cases,
    check,
    compositions,
    drawn,
    product_cases,
    with_every_kind,
)
from conformance.case import PATTERNS, mask_kinds
from conformance.draw import KINDS_OF_CASES
from conformance.memory import TENSOR_LAYOUTS, Memory
from conformance.run import judge

of = Composition.of
SAMPLED = {
    "one": (2, [of("ring", ring=1), of("ulysses", ulysses=1), of("upipe", ulysses=1)]),
    "two": (2, [*(of(name, ring=2) for name in ("ring-keys", "token_ring", "all_gather")), of("ulysses", ulysses=2)]),
    "four": (
        3,
        [
            *(of("usp", ring=2, ulysses=2), of("ring-keys", ring=4), of("token_ring", ring=4)),
            of("ulysses", ulysses=4),
            *(of("wallfacer-2-queries", ring=4), of("ring+token_ring", nodes=2, devices=2)),
        ],
    ),
    "four, in other ways": (
        6,
        [
            *(of("all_gather", ring=4), of("wallfacer-1", ring=4), of("wallfacer-2", ring=4), of("upipe", ulysses=4)),
            *(of("wallfacer-2-p2p", ring=4), of("wallfacer-2-keys", ring=4), of("ring-queries", ring=2, tp=2)),
            *(of("ulysses+token_ring", ring=2, ulysses=2), of("upipe+all_gather", ring=2, ulysses=2)),
            *(of("upipe+ring", ring=2, ulysses=2), of("ring+ring", nodes=2, devices=2)),
            *(of("upipe+ring+token_ring", nodes=2, devices=1, ulysses=2),),
            *(of("ulysses+ring+ring", nodes=1, devices=2, ulysses=2),),
        ],
    ),
    "eight": (
        6,
        [
            *(of("wallfacer-2-queries", ring=8), of("ring+token_ring", nodes=2, devices=4)),
            *(of("ulysses+wallfacer", ring=4, ulysses=2), of("upipe+ring+ring", nodes=2, devices=2, ulysses=2)),
        ],
    ),
}
"""Compositions, each with a brief sample of its own, in which each setting occurs once; and every how many cases run.

Those on eight ranks have no counterpart on four: rings of teams, a larger ring in a node, three axes.
"""
CHOSEN = [composition for _, some in SAMPLED.values() for composition in some]


def part_of_brief(composition: Composition, every: int) -> list[Case]:
    """Returns one in `every` cases of a brief sample; one of them has every kind of mask, one per row."""
    number = CHOSEN.index(composition)
    chosen = cases(brief=number, kinds=(*KINDS, "balanced"))[number % every :: every]
    replaced = next((case for case in chosen if case.mask.per_row), chosen[0])
    return [with_every_kind(case) if case is replaced else case for case in chosen]


def conform(some: list[tuple[Composition, list[Case]]]) -> list[str]:
    """Runs cases; ranks that differ only on outer axes have different data, like replicas."""
    failed = list[str]()
    for composition, chosen in some:
        axes = mesh(**dict(composition.axes))
        replica = 10 * axes["shard"].get_local_rank() + axes["tp"].get_local_rank()
        failures = failures_of(composition.build(), chosen, seeds=100_000 * replica)
        failed += [f"{composition}: {failure}" for failure in failures]
    return failed


def test_all_pairs_of_settings():
    assert not failures_of(Local(), cases())


@pytest.mark.parametrize("name", SAMPLED)
def test_every_setting_once(worlds, name):
    every, some = SAMPLED[name]
    chosen = [(composition, part_of_brief(composition, every)) for composition in some]
    for _, with_all_kinds in chosen:
        assert len(set[str]().union(*(mask_kinds(case.mask) for case in with_all_kinds))) == len(PATTERNS)
    assert worlds(some[0].ranks).run(conform, chosen) == [[]] * some[0].ranks


# -- random cases -----------------------------------------------------------------------------------------------------


def wrong(worlds, ranks: int, trials: list) -> list:
    verdicts = worlds(ranks).run(judge, trials)[-1]
    return [(trial, verdict) for trial, verdict in zip(trials, verdicts, strict=True) if verdict.failure]


def test_random_cases_conform(worlds):
    """On sub-meshes of eight ranks: strides, autocast, checkpoints, projections, random layouts and masks."""
    assert not wrong(worlds, 8, [trial for trial in (drawn(0, index) for index in range(16)) if not trial.case.dtensor])


def test_random_dtensors_conform(worlds):
    """DTensors of q, k and v and of hidden states, with rows and heads sharded or not, mostly uneven shards."""
    every = [trial for trial in (drawn(26, index) for index in range(160)) if trial.case.dtensor]
    trials = [trial for trial in every if trial.composition.ranks <= 4 and not trial.case.compiled]
    placed = Case(dtensor=True, weights=True, kv_heads=4, length=22, kind="contiguous")
    trials.append(Trial(of("ring-keys", ring=2, tp=2), replace(placed, beside="h", projected=True)))
    trials.append(Trial(of("ulysses", ulysses=2), replace(placed, compiled=True)))
    assert all(any(map(of, trials)) for kind, of in KINDS_OF_CASES.items() if "dtensors" in kind)
    assert not wrong(worlds, 4, trials)


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


def test_random_cases_are_reproducible_and_of_every_method_and_kind():
    trials = [drawn(5, index) for index in range(400)]
    assert trials[::-1] == [drawn(5, index) for index in reversed(range(400))]
    assert drawn(4, 7) != drawn(5, 7) and len({str(trial.case) for trial in trials}) == 400
    for name, levels in WAYS.items():
        assert {getattr(trial.case, name) for trial in trials} == set(levels), name
    assert {kind for trial in trials for kind in mask_kinds(trial.case.mask)} >= set(PATTERNS.values())
    assert {trial.composition.ranks for trial in trials} == set(range(1, 9))
    assert {trial.composition.method for trial in trials} == {
        method for method in METHODS if any(list(METHODS[method].meshes(ranks)) for ranks in range(1, 9))
    }


@pytest.mark.parametrize("how", TENSOR_LAYOUTS)
def test_memory_changes_strides_and_no_values(how):
    for name, seed in [(name, seed) for name in ("q", "dout", "x") for seed in range(10)]:
        shape = (2, 7, 3) if name == "x" else (2, 7, 4, 3)
        memory = Memory.of(Case(memory=how, gradient=how, seed=seed), name, len(shape))
        x = memory.values(torch.randn(shape))
        laid = memory.strided_copy(x)
        assert torch.equal(laid, x)
        assert how == "plain" or not laid.is_contiguous()
        assert how != "permuted" or laid.stride(-1) != 1
        assert how != "sliced" or laid.storage_offset()
        assert how != "expanded" or 0 in laid.stride()


# -- layouts ----------------------------------------------------------------------------------------------------------


def with_either_layout() -> bool:
    """Returns whether a layout over the sequence axis and one over all ranks give the same bits."""
    attend = of("usp", ring=2, ulysses=2).build()
    fine = attend.layout(37, kind="zigzag")
    q, k, v = (
        fine.take(torch.randn(2, 37, heads, 8, generator=torch.Generator().manual_seed(heads)), attend.shard)
        for heads in (8, 2, 2)
    )
    return torch.equal(*(attend(q, k, v, mask=AttentionMask(), layout=x) for x in (fine, fine.coarsen(2))))


def test_a_layout_of_the_sequence_axis_is_accepted(worlds):
    assert all(worlds(4).run(with_either_layout))


def layouts_and_shards(every: list[Composition]) -> list[tuple[SequenceLayout, int]]:
    methods = [composition.build() for composition in every]
    return [(attend.layout(53, kind="striped"), attend.shard) for attend in methods]


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


# -- tests of the suite -----------------------------------------------------------------------------------------------


class Flawed:
    """Calls a right method with changed arguments or results."""

    def __init__(self, attend: Method, flaw: str) -> None:
        self.attend, self.flaw, self.layout = attend, flaw, attend.layout
        self.shard = (attend.shard + 1) % attend.shards if flaw == "results of another rank" else attend.shard

    def __call__(self, q, k, v, *, return_lse=False, **options):
        plain = q
        match self.flaw:
            case "dk a thousandth too large":
                k = k + 0.001 * (k - k.detach())
            case "dv of the last key lost":
                v = torch.cat([v[:, :-1], v[:, -1:].detach()], 1)
            case "key heads in another order":
                k = k.roll(1, 2)
            case "causal ignored":
                options["mask"] = replace(options["mask"], causal=False)
            case "scale ignored" | "softcap ignored":
                options[self.flaw.split()[0]] = None
            case "sinks ignored" if options.get("sinks") is not None:
                options["sinks"] = options["sinks"] * 0 - torch.inf
            case "dsinks twice as large" if options.get("sinks") is not None:
                options["sinks"] = 2 * options["sinks"] - options["sinks"].detach()
            case "layout of the keys ignored" if k.shape[1] == q.shape[1]:
                options["key_layout"] = None
        out, lse = self.attend(q, k, v, return_lse=True, **options)
        match self.flaw:
            case "unwritten memory":
                out = out + torch.empty_like(out) * 0
            case "not repeatable":
                out = out * (1 + 4 * torch.rand(()).item() * torch.finfo(out.dtype).eps)
            case "inputs written to":
                plain.data.mul_(2)
            case "out in float32":
                out = out.float()
            case "lse in base 2":
                lse = lse * 1.4427
            case "lse through bfloat16":
                lse = lse.bfloat16().to(lse.dtype)
        return (out, lse) if return_lse else out


class Sharing(Local):
    """Saves tensors where the next call replaces them."""

    def forward(self, q, k, v, spec):
        out, Sharing.last = super().forward(q, k, v, spec)
        return out, Sharing.last

    def backward(self, dout, saved, spec):
        return super().backward(dout, Sharing.last, spec)


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("dk a thousandth too large", r"float64 .*: dk off by 0\.001 \(limit 1e-10\)"),
        ("dv of the last key lost", r"bfloat16 .*: dv off by "),
        ("key heads in another order", r"H8 K2 .* bfloat16.*: out off by "),
        ("causal ignored", r"bfloat16 causal .*: out off by "),
        ("scale ignored", r"bfloat16 .*scale=0\.\d+.*: out off by "),
        ("sinks ignored", r"float32 .* sinks .*: out off by .*, dsinks off by "),
        ("sinks ignored", r"float32 .* sinks=3 .*: out off by .*, dsinks off by "),
        ("dsinks twice as large", r"bfloat16 .* sinks=3 .*: dsinks off by 1 \(limit 0\.0\d+\)$"),
        ("softcap ignored", r"bfloat16 .* softcap=1\.5 .*: out off by "),
        ("unwritten memory", r"bfloat16.*: out off by inf "),
        ("not repeatable", r"float64.*: out differs between two runs"),
        ("inputs written to", r"bfloat16.*: q was written to"),
        ("out in float32", r"bfloat16.*: out is torch\.float32; it must be torch\.bfloat16"),
        ("lse in base 2", r"bfloat16 .*: lse off by 0\.44 "),
        ("lse through bfloat16", r"bfloat16 .*: lse off by 0\.00\d+ \(limit 0\.0001\)$"),
        ("saved tensors shared by calls", r"bfloat16.*: dq "),
    ],
)
def test_a_wrong_method_is_caught_and_named(flaw, says):
    attend, failed = Sharing() if "shared" in flaw else Flawed(Local(), flaw), list[str]()
    for case in cases():
        failed += failures_of(attend, [case])
        if failed and re.search(says, failed[-1]):
            break
    assert failed and re.search(says, failed[-1]), failed


def flawed_rings(flaws: list[str]) -> list[list[str]]:
    chosen = [Case(mask=AttentionMask(documents=(0, 11, 40)), length=40, key_kind=kind) for kind in KINDS]
    return [failures_of(Flawed(of("ring", ring=4).build(), flaw), chosen) for flaw in flaws]


def test_wrong_ranks_and_layouts_of_keys_are_caught(worlds):
    flaws = ["", "layout of the keys ignored", "results of another rank"]
    for right, keys, shifted in worlds(4).run(flawed_rings, flaws):
        assert not right
        assert len(keys) == 2 and all("zigzag keys=40," in failure for failure in keys)
        assert len(shifted) == 3 and all("out off by" in failure for failure in shifted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cancelling_sums_are_judged_by_their_addends(dtype):
    """Every query sees one key: dq and dk are differences of equal numbers."""
    check(Local(), Case(dtype=dtype, mask=AttentionMask(window=(0, 0)), kind="contiguous"))


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


def test_sample_has_all_pairs_of_settings_and_a_brief_one_each_setting():
    actual = [settings_of(case) for case in cases()]
    levels = {factor: {each[factor] for each in actual if each["head_dim"] <= 40} for factor in actual[0]}
    met = {(f, each[f], g, each[g]) for each in actual for f, g in combinations(levels, 2)}
    assert met >= {(f, a, g, b) for f, g in combinations(levels, 2) for a in levels[f] for b in levels[g]}
    sizes = {"mask": len(MASKS), "heads": 5, "dtype": 3, "kind": 3, "keys": 2, "sinks": 3}
    assert {factor: len(levels[factor]) for factor in sizes} == sizes
    assert {case.head_dim for case in cases()} >= {8, 64, 128, 256}
    assert {(case.keys > case.length) - (case.keys < case.length) for case in cases()} == {-1, 0, 1}
    for number in range(3):
        brief = {(factor, setting) for case in cases(brief=number) for factor, setting in settings_of(case).items()}
        for factor in levels.keys() - {"mask"}:
            assert {setting for name, setting in brief if name == factor} >= levels[factor], factor
    for chosen in (cases(), [*cases(brief=1), *cases(brief=2)], list(product_cases(1, [torch.float64]))):
        assert len(set(chosen)) == len({str(case) for case in chosen}) == len(chosen)


# -- forwarded tokens with gaps ---------------------------------------------------------------------------------------

GAPS = [
    Case(mask=AttentionMask(False, (3, 3)), length=64, heads=4),
    Case(mask=AttentionMask(documents=(0, 3, 9, 10, 24, 37, 41, 42, 58, 64)), kind="striped", heads=4, length=64),
    Case(mask=AttentionMask(False, documents=((0, 12, 52, 64), (0, 11, 53, 64))), length=64, heads=4, value_dim=24),
]
"""A later rank sees some tokens of a shard, but none between them: see `test_attention_bytes.py`."""


def test_tokens_forwarded_with_gaps(worlds):
    names = ["ring-keys", "ring-queries", "token_ring", "wallfacer-1"]
    assert worlds(4).run(conform, [(of(name, ring=4), GAPS) for name in names]) == [[]] * 4
