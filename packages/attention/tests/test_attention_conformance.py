"""Every method in every composition through the suite; and the suite itself, on toys that are wrong on purpose."""

import re
from dataclasses import replace
from itertools import combinations
from math import prod

import pytest
import torch
import torch.distributed as dist

from armillary.attention import Local, Ring, Ulysses
from armillary.attention.conformance import MASKS, Case, cases, check, errors
from armillary.attention.mask import AttentionMask
from armillary.attention.reference import reference_attention, visible_pairs
from armillary.core import SequenceLayout
from armillary.core.testing import mesh

COMPOSITIONS = [
    {},
    *({"ring": n} for n in (1, 2, 4, 8)),
    *({"ulysses": n} for n in (1, 2, 4, 8)),
    *({"ring": r, "ulysses": u} for r, u in ((2, 2), (2, 4), (4, 2))),
    {"shard": 2, "ring": 4},
    {"ring": 2, "tp": 2},
]


def named(axes: dict[str, int]) -> str:
    return "-".join(f"{name}{size}" for name, size in axes.items()) or "local"


def build(axes: dict[str, int]):
    """The method that runs over these axes, as this rank sees it."""
    ring = Ring(mesh(**axes)["ring"]) if "ring" in axes else None
    if "ulysses" not in axes:
        return ring or Local()
    return Ulysses(mesh(**axes)["ulysses"], inner=ring) if ring else Ulysses(mesh(**axes)["ulysses"])


def failures_of(attend, chosen, seeds: int = 0) -> list[str]:
    """What each failing case said. A failed check leaves the ranks in step, so the next case can go on."""
    failed = []
    for case in chosen:
        try:
            check(attend, replace(case, seed=case.seed + seeds))
        except AssertionError as failure:
            failed.append(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {failure}")
    return failed


def conform(axes: dict[str, int]) -> list[str]:
    """Ranks that only differ on the outer axes hold different data, as replicas do."""
    replica = 10 * mesh(**axes)["shard"].get_local_rank() + mesh(**axes)["tp"].get_local_rank()
    return failures_of(build(axes), cases(), seeds=1000 * replica)


@pytest.mark.parametrize("axes", COMPOSITIONS, ids=named)
def test_conformance(worlds, axes):
    assert not [failure for rank in worlds(prod(axes.values())).run(conform, axes) for failure in rank]


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


@pytest.mark.parametrize("axes", [{}, {"ring": 2}, {"ulysses": 2}], ids=named)
def test_a_gradient_through_lse_is_refused_rather_than_dropped(worlds, axes):
    for said in worlds(prod(axes.values())).run(gradient_of_lse, axes):
        assert "lse has no gradient" in said or "does not require grad" in said, said


def with_either_layout(axes: dict[str, int]) -> bool:
    """Whether the layout of the sequence axis and that of all ranks give the same bits."""
    attend = build(axes)
    fine = attend.layout(37, kind="zigzag")
    q, k, v = (
        fine.take(torch.randn(2, 37, heads, 8, generator=torch.Generator().manual_seed(heads)), attend.shard)
        for heads in (8, 2, 2)
    )
    outs = [attend(q, k, v, mask=AttentionMask(), layout=x) for x in (fine, fine.coarsen(axes["ulysses"]))]
    return torch.equal(*outs)


@pytest.mark.parametrize("axes", [{"ulysses": 2}, {"ring": 2, "ulysses": 2}], ids=named)
def test_the_layout_may_be_that_of_the_sequence_axis(worlds, axes):
    assert all(worlds(prod(axes.values())).run(with_either_layout, axes))


@pytest.mark.parametrize("axes", COMPOSITIONS[1:12], ids=named)
def test_the_layout_of_a_method_covers_its_ranks(worlds, axes):
    size = prod(axes.values())
    answers = worlds(size).run(layout_and_shard, axes)
    layouts, shards = zip(*answers, strict=True)
    assert sorted(shards) == list(range(size)) and set(layouts) == {layouts[0]}
    ring = SequenceLayout.striped(53, axes.get("ring", 1))
    assert layouts[0] == ring.refine(axes.get("ulysses", 1))


def layout_and_shard(axes: dict[str, int]) -> tuple[SequenceLayout, int]:
    attend = build(axes)
    return attend.layout(53, kind="striped"), attend.shard


# -- refusals -------------------------------------------------------------------------------------------------------

FOUR = [{"ring": 4}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}]


def refusal(axes: dict[str, int], wrong: str) -> str:
    """What the method says of one wrong argument, on this rank."""
    attend = build(axes)
    layout = attend.layout(24, kind="zigzag")
    tokens = layout.sizes[attend.shard]
    shapes = {"q": (2, tokens, 8, 8), "k": (2, tokens, 4, 8), "v": (2, tokens, 4, 8)}
    shapes |= {
        "few heads": {"q": (2, tokens, 3, 8), "k": (2, tokens, 3, 8), "v": (2, tokens, 3, 8)},
        "local length": {name: (2, tokens + 1, *shape[2:]) for name, shape in shapes.items()},
        "k and v": {"v": (2, tokens, 2, 8)},
        "key length": {"k": (2, tokens + 2, 4, 8), "v": (2, tokens + 2, 4, 8)},
        "groups": {"k": (2, tokens, 3, 8), "v": (2, tokens, 3, 8)},
        "head dim": {"k": (2, tokens, 4, 6)},
        "batch": {"k": (3, tokens, 4, 8), "v": (3, tokens, 4, 8)},
        "three dims": {"q": (tokens, 8, 8)},
    }.get(wrong, {})
    q, k, v = (torch.zeros(shapes[name]) for name in "qkv")
    if wrong == "dtypes":
        k = k.double()
    given = {"mask": AttentionMask(), "layout": layout}
    if wrong == "shards":
        given["layout"] = SequenceLayout.contiguous(24, 3)
    if wrong == "no layout":
        del given["layout"]
    try:
        attend.layout(24, kind="spiral") if wrong == "kind" else attend(q, k, v, **given)
    except ValueError as refused:
        return str(refused)
    return "accepted"


@pytest.mark.parametrize(
    ("axes", "wrong", "words"),
    [
        *((axes, "few heads", ["3", "4", "heads"]) for axes in [{"ulysses": 4}]),
        *((axes, "shards", ["3", "shards", str(axes.get("ring", 1))]) for axes in FOUR),
        *((axes, "local length", ["7", "6"]) for axes in FOUR),
        *((axes, "k and v", ["(2, 6, 4, 8)", "(2, 6, 2, 8)"]) for axes in FOUR),
        *((axes, "key length", ["8", "6"]) for axes in FOUR),
        *((axes, "groups", ["8", "3"]) for axes in FOUR),
        *((axes, "head dim", ["8", "6"]) for axes in FOUR),
        *((axes, "batch", ["2", "3"]) for axes in FOUR),
        *((axes, "three dims", ["(6, 8, 8)"]) for axes in FOUR),
        *((axes, "dtypes", ["float32", "float64"]) for axes in FOUR),
        *((axes, "no layout", ["layout"]) for axes in FOUR),
        *((axes, "kind", ["spiral", "zigzag"]) for axes in FOUR),
    ],
    ids=lambda value: value if isinstance(value, str) else named(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused_on_every_rank_with_its_values(worlds, axes, wrong, words):
    for said in worlds(4).run(refusal, axes, wrong):
        assert said != "accepted"
        assert all(word in said for word in words), said


# -- the suite itself, on toys --------------------------------------------------------------------------------------


class Toy:
    """Attention on one rank in plain torch: the keys in two halves, merged. Wrong if given a flaw."""

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
        weights = [(x - lse).exp() for x in (lse_one, lse_two)]
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
        p = (qs @ ks.mT * scale - lse).exp() * pairs(mask, i, i, len(q))
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
    """[B, H, T, D] each, in float32 at least, keys repeated for the query heads that use them."""
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


SAME_DIMS = cases(value_dims=(0,))


@pytest.mark.parametrize("mask", MASKS)
def test_a_right_method_passes(mask):
    assert not failures_of(Toy(), cases(masks=[mask]))


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
        ("scale ignored", r"bfloat16 .*scale=0\.5.*: out off by "),
        ("key heads taken in turn", r"H8 K2 .* bfloat16.*: out off by "),
        ("unwritten memory", r"bfloat16.*: out off by inf "),
        ("not repeatable", r"float64.*: out differs between two runs"),
        ("scratch shared by calls", r"bfloat16.*: (out|dq) "),
        ("inputs written to", r"bfloat16.*: q was written to"),
        ("out in float32", r"bfloat16.*: out is torch\.float32; it must be torch\.bfloat16"),
    ],
)
def test_a_wrong_method_is_caught_and_named(flaw, says):
    failed = failures_of(Toy(flaw), SAME_DIMS)
    assert any(re.search(says, failure) for failure in failed), failed


class Everything:
    """Attention on every rank over everything, gathered by summing what each holds. Wrong if given a flaw."""

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
    """The global tensor from the shards of all ranks, or with zeros for those of the others."""
    whole = x.new_zeros(x.shape[0], layout.length, *x.shape[2:]).index_copy(1, layout.positions(shard), x)
    if not alone:
        dist.all_reduce(whole)
    return whole


def everything(flaw: str = "") -> list[str]:
    chosen = cases(dtypes=[torch.float64, torch.float32], lengths=[24, 64], heads=[(8, 2)], value_dims=[0])
    return failures_of(Everything(flaw), chosen)


def test_shards_are_compared_with_what_belongs_to_them(worlds):
    assert worlds(4).run(everything) == [[]] * 4


@pytest.mark.parametrize(("flaw", "says"), [("others' queries forgotten", "dk off by"), ("wrong shard", "out off by")])
def test_a_method_that_confuses_ranks_is_caught_on_each(worlds, flaw, says):
    assert all(any(says in failure for failure in failed) for failed in worlds(4).run(everything, flaw))


# -- the sample -----------------------------------------------------------------------------------------------------


def test_any_two_settings_of_any_two_factors_meet_in_a_case():
    factors = ("batch", "length", "heads", "head_dim", "dtype", "mask", "kind", "scale", "memory")
    met = {(f, getattr(case, f), g, getattr(case, g)) for case in cases() for f, g in combinations(factors, 2)}
    levels = {f: {getattr(case, f) for case in cases()} for f in factors}
    assert met >= {(f, a, g, b) for f, g in combinations(factors, 2) for a in levels[f] for b in levels[g]}
    assert len(levels["heads"]) == 3 and len(levels["mask"]) == 2 and len(levels["dtype"]) == 3


def test_cases_are_the_same_every_time_and_differ_from_one_another():
    assert cases() == cases() and len(set(cases())) == len({str(case) for case in cases()}) == len(cases()) < 40


def test_errors_are_numbers_for_what_the_case_needs():
    assert set(errors(Toy(), Case(needs="kv"))) == {"out", "lse", "dk", "dv"}
    assert set(errors(Toy(), Case(needs=""))) == {"out", "lse"}
