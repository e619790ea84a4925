"""UPipe runs heads in stages, projections included; its results equal the formula in float64."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    Local,
    Method,
    Ring,
    TokenRing,
    Ulysses,
    UPipe,
    WallFacer,
    reference_attention,
)
from armillary.core.testing import mesh, relative_error

BATCH, WIDTH, DIM, LENGTH = 2, 12, 8, 29  # x [B, N, E], heads [.., D]
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Result = dict[str, Tensor]


class Projected(nn.Module):
    """Projections at given positions. Options: "bias", "norm" (of x, and of q and k as in Qwen3), "rope", "lora".

    Also "sinks", another parameter, "scale" and "softcap": arguments of attention, see `scores`.
    """

    def __init__(self, heads: int, key_heads: int, positions: Tensor, options: Sequence[str] = (), seed: int = 0):
        super().__init__()
        self.heads, self.key_heads, self.positions, self.options = heads, key_heads, positions, options
        self.generator, counts = torch.Generator().manual_seed(seed), {"q": heads, "k": key_heads, "v": key_heads}
        self.weights = self.new({name: (n, DIM, WIDTH) for name, n in counts.items()})
        if "bias" in options:
            self.biases = self.new({name: (n, DIM) for name, n in counts.items()})
        if "norm" in options:
            self.norms = self.new({"x": (WIDTH,), "q": (DIM,), "k": (DIM,)})
        if "lora" in options:
            self.weights.requires_grad_(False)
            self.down = self.new(dict.fromkeys(counts, (2, WIDTH)))
            self.up = self.new({name: (n, DIM, 2) for name, n in counts.items()})
        if "sinks" in options:
            self.sinks = self.new({"q": (heads,)})

    def new(self, shapes: dict[str, tuple[int, ...]]) -> nn.ParameterDict:
        drawn = {name: torch.randn(s, generator=self.generator, dtype=torch.float64) for name, s in shapes.items()}
        return nn.ParameterDict({name: nn.Parameter(0.5 * tensor) for name, tensor in drawn.items()})

    def q(self, x: Tensor, heads: Iterable[int]) -> Tensor:
        return self.project("q", x, list(heads))

    def kv(self, x: Tensor, heads: Iterable[int]) -> tuple[Tensor, Tensor]:
        return self.project("k", x, list(heads)), self.project("v", x, list(heads))

    def scores(self) -> dict[str, Any]:
        """Returns the arguments of an attention call."""
        every = {"sinks": lambda: self.sinks["q"], "scale": lambda: 0.3, "softcap": lambda: 2.0}
        return {name: value() for name, value in every.items() if name in self.options}

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        if "norm" in self.options:
            x = F.rms_norm(x, x.shape[-1:], self.norms["x"])
        y = torch.einsum("bte,hde->bthd", x, self.weight(name)[heads])
        if "bias" in self.options:
            y = y + self.biases[name][heads]
        if "lora" in self.options:
            y = y + torch.einsum("bte,re,hdr->bthd", x, self.down[name], self.up[name][heads])
        if "norm" in self.options and name != "v":
            y = F.rms_norm(y, y.shape[-1:], self.norms[name])
        return rotated(y, self.positions) if "rope" in self.options and name != "v" else y


def rotated(y: Tensor, positions: Tensor) -> Tensor:
    """Applies RoPE to y [B, T, H, D]."""
    angles = positions[:, None, None] * 100.0 ** -torch.arange(0, 1, 2 / DIM, dtype=torch.float64)
    cos, sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
    a, b = y.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Heads(NamedTuple):
    queries: int
    keys: int
    stage: int | None  # query heads per stage


class Case(NamedTuple):
    heads: Heads
    options: tuple[str, ...] = ()
    mask: AttentionMask = AttentionMask()
    length: int = LENGTH
    kind: str = "zigzag"
    dtype: torch.dtype = torch.float64


class Composition(NamedTuple):
    ring: int
    ulysses: int
    inner: str = "local"

    def build(self, stage: int | None = None, **options: bool) -> UPipe:
        axes = mesh(ring=self.ring, ulysses=self.ulysses)
        return UPipe(axes["ulysses"], inner=INNER[self.inner](axes["ring"]), heads_per_stage=stage, **options)

    def fits(self, heads: Heads) -> bool:
        return heads.queries >= self.ulysses and (heads.stage or 0) % self.ulysses == 0

    def __str__(self) -> str:
        return f"{self.inner}{self.ring}-ulysses{self.ulysses}"


INNER: dict[str, Callable[[DeviceMesh], Method]] = {
    "local": lambda _: Local(),
    "ring": Ring,
    "token_ring": TokenRing,
    "wall_facer": lambda axis: WallFacer(axis, team=1),
    "wall_facer_2": lambda axis: WallFacer(axis, team=2),
    "all_gather": AllGatherKV,
}
COMPOSITIONS = [
    *(Composition(1, 1), Composition(1, 2), Composition(1, 4), Composition(2, 2, "ring")),
    *(Composition(2, 2, "token_ring"), Composition(2, 2, "wall_facer"), Composition(2, 2, "all_gather")),
]
EIGHT = [Composition(4, 2, "ring"), Composition(4, 2, "wall_facer_2")]
USP = COMPOSITIONS[3]

HEADS = [
    *(Heads(8, 8, 2), Heads(8, 2, 2), Heads(8, 2, 4), Heads(8, 4, 4), Heads(8, 8, None), Heads(8, 1, 8)),
    *(Heads(6, 3, 2), Heads(12, 3, 4), Heads(5, 5, 2), Heads(9, 3, 4), Heads(7, 7, 4), Heads(10, 5, 4)),
    *(Heads(5, 1, None), Heads(8, 1, 4), Heads(6, 2, 4), Heads(9, 3, None)),
]
"""Fewer and more key heads than per stage and than ranks, divisible and not; one stage; incomplete last stages."""
OPTIONS = [(), ("bias", "rope"), ("norm", "rope"), ("lora", "rope"), ("bias", "norm", "rope")]
"""Without RoPE or norm, a bias of keys has no gradient, because it shifts all scores of a query equally."""
MASKS = [
    AttentionMask(),
    AttentionMask(documents=(0, 5, 6, 19, LENGTH)),
    AttentionMask(window=(6, None)),
    AttentionMask(documents=((0, 9, LENGTH), (0, 13, 14, LENGTH))),
    AttentionMask(causal=False, window=(3, 5)),
    AttentionMask(causal=False),
]


def cases(composition: Composition) -> list[Case]:
    """Returns half of the possible heads, with options and masks in turn; other compositions have other pairs."""
    shift = (COMPOSITIONS + EIGHT).index(composition)
    fitting = [heads for heads in HEADS if composition.fits(heads)]
    return [
        Case(heads, OPTIONS[(i + shift) % len(OPTIONS)], MASKS[(i + 2 * shift) % len(MASKS)])
        for i, heads in enumerate(fitting)
        if (i + shift) % 2
    ]


# -- expected and actual results --------------------------------------------------------------------------------------


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Returns global x [B, N, E] and dout [B, N, H, D], equal in every process."""
    generator = torch.Generator().manual_seed(case.length)
    shapes = (BATCH, case.length, WIDTH), (BATCH, case.length, case.heads.queries, DIM)
    x, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes)
    return x, dout


@lru_cache(maxsize=256)
def expected(case: Case) -> Result:
    """Returns out, dx and each parameter's gradient by the formula on one device, for inputs in the case's dtype."""
    x, dout = (tensor.double() for tensor in inputs(case))
    weights = Projected(*case.heads[:2], torch.arange(case.length), case.options).to(case.dtype).double()
    x.requires_grad_()
    q, (k, v) = weights.q(x, range(weights.heads)), weights.kv(x, range(weights.key_heads))
    return differentiated(reference_attention(q, k, v, mask=case.mask, **weights.scores()), dout, x, weights)


def differentiated(out: Tensor, dout: Tensor, x: Tensor, weights: nn.Module) -> Result:
    leaves = {"x": x, **dict(weights.named_parameters())}
    leaves = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    assert all(tensor.grad is None for tensor in leaves.values())
    assert all(g.dtype == tensor.dtype for g, tensor in zip(gradients, leaves.values(), strict=True))
    return {"out": out.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def on_rank(attend: Method, case: Case) -> Result:
    """Returns out, dx and positions of this rank's tokens, and its addend of each parameter's gradient."""
    layout = attend.layout(case.length, case.kind)
    x, dout = (layout.take(tensor, attend.shard) for tensor in inputs(case))
    positions = layout.positions(attend.shard)
    weights = Projected(*case.heads[:2], positions, case.options).to(case.dtype)
    x.requires_grad_()
    out = attend.projected(x, weights, mask=case.mask, layout=layout, **weights.scores())
    return {"positions": positions, **differentiated(out, dout, x, weights)}


def on_ranks(composition: Composition, todo: list[Case], **options: bool) -> list[Result]:
    return [on_rank(composition.build(case.heads.stage, **options), case) for case in todo]


def joined(ranks: Sequence[Result]) -> Result:
    """Joins ranks' results: tokens in order, gradients of parameters summed."""
    order = torch.cat([rank["positions"] for rank in ranks]).argsort()
    by_name = {name: [rank[name] for rank in ranks] for name in ranks[0] if name != "positions"}
    return {
        name: torch.cat(parts, dim=1)[:, order] if name in ("out", "dx") else torch.stack(parts).double().sum(0)
        for name, parts in by_name.items()
    }


def wrong(case: Case, ranks: Sequence[Result]) -> list[str]:
    """Returns the wrong tensors with their errors."""
    result, exact = joined(ranks), expected(case)
    assert result.keys() == exact.keys()
    errors = {name: relative_error(result[name], exact[name]) for name in exact}
    return [f"{case}: {name} is off by {error:.1e}" for name, error in errors.items() if error > LIMITS[case.dtype]]


def failures(worlds, composition: Composition, todo: list[Case]) -> list[str]:
    answers = worlds(composition.ring * composition.ulysses).run(on_ranks, composition, todo)
    return [text for case, *ranks in zip(todo, *answers, strict=True) for text in wrong(case, ranks)]


# -- exact ------------------------------------------------------------------------------------------------------------


LONG = COMPOSITIONS[4:]
"""The schedule of heads is that of USP; the conformance suite has their inner methods."""


@pytest.mark.parametrize(
    "composition", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in COMPOSITIONS], ids=str
)
def test_results_and_gradients_match_the_formula(worlds, composition):
    assert not failures(worlds, composition, cases(composition))


@pytest.mark.parametrize("composition", [pytest.param(EIGHT[0], marks=pytest.mark.long), EIGHT[1]], ids=str)
def test_on_eight_ranks(worlds, composition):
    assert not failures(worlds, composition, cases(composition)[::3])


def test_ulysses_equals_the_same_oracle(worlds):
    todo = [Case(heads, options) for heads, options in zip(HEADS[:5], OPTIONS, strict=True)]
    answers = worlds(4).run(ulysses_on_ranks, todo)
    assert not [text for case, *ranks in zip(todo, *answers, strict=True) for text in wrong(case, ranks)]


def ulysses_on_ranks(todo: list[Case]) -> list[Result]:
    axes = mesh(ring=2, ulysses=2)
    attend = Ulysses(axes["ulysses"], inner=Ring(axes["ring"]))
    return [on_rank(attend, case) for case in todo]


def test_every_layout_and_shards_of_one_token(worlds):
    todo = [
        Case(Heads(8, 2, 2), ("bias", "rope"), mask, length, kind)
        for kind, length in product(("contiguous", "zigzag", "striped"), (4, 5))
        for mask in (AttentionMask(), AttentionMask(documents=(0, 1, 4 if length > 4 else 3, length)))
    ]
    assert not failures(worlds, USP, todo)
    four = [case._replace(heads=Heads(8, 2, 4)) for case in todo if case.length == 4]
    assert not failures(worlds, Composition(1, 4), four)


def test_sinks_scale_and_softcap(worlds):
    """The sinks are among the parameters, although no projection uses them."""
    options = (("sinks", "rope"), ("scale", "rope"), ("softcap", "norm", "rope"), ("sinks", "scale", "softcap"))
    heads = (Heads(8, 2, 2), Heads(5, 5, 2), Heads(8, 1, 4))
    assert not failures(worlds, USP, [Case(*both) for both in product(heads, options)])


def test_tokens_that_only_see_themselves(worlds):
    """Outputs are the values: queries and keys have no gradient, and nearly every block is skipped."""
    case = Case(Heads(8, 2, 2), ("rope",), AttentionMask(window=(0, 0)))
    answers = worlds(4).run(on_ranks, USP, [case])
    result, exact = joined([results[0] for results in answers]), expected(case)
    for name in ("out", "dx", "dweights.v"):
        assert relative_error(result[name], exact[name]) < 1e-10
    for name in ("dweights.q", "dweights.k"):
        assert torch.linalg.vector_norm(result[name]) < 1e-12


def test_narrower_dtypes_are_unchanged(worlds):
    todo = [
        Case(heads, ("norm", "rope"), dtype=dtype)
        for heads in (Heads(8, 2, 2), Heads(8, 8, 4), Heads(8, 1, 2))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert not failures(worlds, USP, todo)


class Blind(NamedTuple):
    """Cross-attention in which the last queries are too far from all keys to see one."""

    queries: int = 23
    keys: int = 11
    mask: AttentionMask = AttentionMask(causal=False, window=(3, 2))


def finished(composition: Composition, stage: int, blind: Blind) -> tuple[list[Tensor], int]:
    """Returns (out, lse, dq, dk, dv) from finished q, k, v, and the shard."""
    attend = composition.build(stage)
    layouts = [attend.layout(length, "contiguous") for length in (blind.queries, blind.keys, blind.keys)]
    q, k, v, dout = blind_inputs(blind)
    q, k, v = (x.take(t, attend.shard).requires_grad_() for x, t in zip(layouts, (q, k, v), strict=True))
    out, lse = attend(q, k, v, mask=blind.mask, layout=layouts[0], key_layout=layouts[1], return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), layouts[0].take(dout, attend.shard))
    return [out.detach(), lse.detach(), *gradients], attend.shard


def each_finished(composition: Composition, stages: Sequence[int], blind: Blind) -> list[tuple[list[Tensor], int]]:
    return [finished(composition, stage, blind) for stage in stages]


def blind_inputs(blind: Blind) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(blind.queries, 8), (blind.keys, 4), (blind.keys, 4), (blind.queries, 8)]
    return [torch.randn(BATCH, n, heads, DIM, generator=generator, dtype=torch.float64) for n, heads in shapes]


def test_finished_tensors_and_queries_without_visible_keys(worlds):
    blind = Blind()
    q, k, v, dout = (x.requires_grad_() for x in blind_inputs(blind))
    out, lse = reference_attention(q, k, v, mask=blind.mask, return_lse=True)
    exact = [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]
    for stage, *answers in zip((2, 4, 8), *worlds(4).run(each_finished, USP, (2, 4, 8), blind), strict=True):
        ranks = sorted(answers, key=lambda answer: answer[1])
        out, lse, *gradients = (torch.cat(parts, dim=1) for parts in zip(*(x for x, _ in ranks), strict=True))
        assert (out[:, -6:] == 0).all() and (lse[:, -6:] == -torch.inf).all() and (gradients[0][:, -6:] == 0).all()
        assert torch.equal(lse == -torch.inf, exact[1] == -torch.inf)
        result = [out, lse.exp(), *gradients]
        errors = [relative_error(a, b) for a, b in zip(result, [exact[0], exact[1].exp(), *exact[2:]], strict=True)]
        assert max(errors) < 1e-10, (stage, errors)


def test_repeated_and_prefetching_runs_have_equal_bits(worlds):
    todo = [Case(heads, ("norm", "rope"), dtype=torch.float32) for heads in HEADS[1::4] if USP.fits(heads)]
    for rank in worlds(4).run(thrice, USP, todo):
        assert rank == ["same"] * len(todo)


def thrice(composition: Composition, todo: list[Case]) -> list[str]:
    first, second, prefetched = (on_ranks(composition, todo, prefetch=prefetch) for prefetch in (False, False, True))
    return [compared(*runs) for runs in zip(first, second, prefetched, strict=True)]


def compared(first: Result, second: Result, prefetched: Result) -> str:
    differing = [
        [name for name in first if not torch.equal(first[name], other[name])] for other in (second, prefetched)
    ]
    return f"again: {differing[0]}, prefetching: {differing[1]}" if any(differing) else "same"


# -- the order of heads in pretrained weights -------------------------------------------------------------------------


class Numbered(nn.Module):
    """Key/value head j has the values one-hot(j) for all tokens."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.values = nn.Parameter(torch.eye(key_heads, dtype=torch.float64))

    def q(self, x: Tensor, heads: Iterable[int]) -> Tensor:
        return torch.stack([x * (1 + h) for h in heads], dim=2)

    def kv(self, x: Tensor, heads: Iterable[int]) -> tuple[Tensor, Tensor]:
        chosen = list(heads)
        return torch.stack([x - h for h in chosen], dim=2), self.values[chosen].expand(*x.shape[:2], -1, -1)


def numbered(composition: Composition, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each query head's output [H, K] by two ways, and the values' gradient [K, K] for dout h at head h."""
    attend, projections = composition.build(heads.stage), Numbered(heads.queries, heads.keys)
    layout = attend.layout(LENGTH)
    x = torch.randn(BATCH, layout.sizes[attend.shard], DIM, dtype=torch.float64)
    out = attend.projected(x, projections, mask=AttentionMask(), layout=layout)
    (out * torch.arange(heads.queries)[:, None]).sum().backward()
    with torch.no_grad():
        q, (k, v) = projections.q(x, range(heads.queries)), projections.kv(x, range(heads.keys))
        plain = attend(q, k, v.contiguous(), mask=AttentionMask(), layout=layout)
    gradient = projections.values.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    return out.detach().mean((0, 1)), plain.mean((0, 1)), gradient


def each_numbered(composition: Composition, todo: list[Heads]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [numbered(composition, heads) for heads in todo]


@pytest.mark.parametrize(
    ("composition", "step"), [(Composition(1, 4), 1), pytest.param(USP, 1, marks=pytest.mark.long)], ids=str
)
def test_query_head_h_uses_key_head_h_over_g(worlds, composition, step):
    llama_3_8b = [Heads(32, 8, stage) for stage in (4, 8, 16, None)]
    todo = [*llama_3_8b, *[heads for heads in HEADS if composition.fits(heads)][::step]]
    for answers in worlds(composition.ring * composition.ulysses).run(each_numbered, composition, todo):
        for heads, (out, plain, gradient) in zip(todo, answers, strict=True):
            key_heads = torch.arange(heads.queries) // (heads.queries // heads.keys)
            expected_heads = F.one_hot(key_heads, heads.keys).double()
            assert torch.allclose(out, expected_heads, atol=1e-12), heads
            assert torch.allclose(plain, expected_heads, atol=1e-12), heads
            # A query's weights sum to 1, so the values get h from each query of each head h that uses them.
            weight = BATCH * LENGTH * (torch.arange(heads.queries).double() @ expected_heads)
            assert torch.allclose(gradient, weight[:, None].expand_as(gradient)), heads
