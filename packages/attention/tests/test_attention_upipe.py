"""UPipe runs heads in stages, projections included: results in float64, and one stage of heads in memory."""

import gc
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from armillary.attention import AttentionMask, Method, Ring, UPipe, reference_attention
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


def build(ring: int, stage: int | None, prefetch: bool = False) -> Method:
    """Builds the method on all four ranks."""
    axes = mesh(ring=ring, ulysses=4 // ring)
    return UPipe(axes["ulysses"], *([Ring(axes["ring"])] if ring > 1 else []), heads_per_stage=stage, prefetch=prefetch)


HEADS = [
    *(Heads(8, 8, 2), Heads(8, 2, 2), Heads(8, 2, 4), Heads(8, 4, 4), Heads(8, 8, None), Heads(8, 1, 8)),
    *(Heads(6, 3, 2), Heads(12, 3, 4), Heads(5, 5, 2), Heads(9, 3, 4), Heads(7, 7, 4), Heads(10, 5, 4)),
    *(Heads(5, 1, None), Heads(8, 1, 4), Heads(6, 2, 4), Heads(9, 3, None)),
]
"""Fewer and more key heads than per stage and than ranks, divisible and not; one stage; incomplete last stages."""
OPTIONS = [("lora",), ("bias", "rope"), ("norm", "rope"), ("bias", "norm", "rope")]
"""Without RoPE or norm, a bias of keys has no gradient, because it shifts all scores of a query equally."""
SCORES = [("sinks", "rope"), ("scale", "rope"), ("softcap", "norm", "rope"), ("sinks", "scale", "softcap")]
"""The sinks are among the parameters, although no projection uses them."""
MASKS = [
    AttentionMask(),
    AttentionMask(documents=(0, 5, 6, 19, LENGTH)),
    AttentionMask(window=(6, None)),
    AttentionMask(documents=((0, 9, LENGTH), (0, 13, 14, LENGTH))),
    AttentionMask(causal=False, window=(3, 5)),
    AttentionMask(causal=False),
]


def cases_of(ring: int) -> list[Case]:
    """Returns all heads that fit with options and masks in turn, dtypes, and layouts with shards of one token."""
    shift, stages = ring, 4 // ring
    fitting = [heads for heads in HEADS if heads.queries >= stages and (heads.stage or stages) % stages == 0]
    every = [
        Case(heads, OPTIONS[(i + shift) % len(OPTIONS)], MASKS[(i + 2 * shift) % len(MASKS)])
        for i, heads in enumerate(fitting)
    ]
    every += [Case(heads, options) for heads, options in zip(fitting[1::3], SCORES, strict=False)]
    dtypes = (torch.float32, torch.bfloat16)
    every += [Case(heads, ("norm", "rope"), dtype=dtypes[i % 2]) for i, heads in enumerate(fitting[:4])]
    kinds = product(("contiguous", "zigzag", "striped"), (4, 5))
    return every + [
        Case(Heads(8, 2, 4), ("bias", "rope"), AttentionMask(documents=(0, 1, length - 1, length)), length, kind)
        for kind, length in kinds
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


def on_ranks(ring: int, todo: list[Case], prefetch: bool = False) -> list[Result]:
    return [on_rank(build(ring, case.heads.stage, prefetch), case) for case in todo]


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


@pytest.mark.parametrize("ring", [1, 2])
def test_results_and_gradients_match_the_formula(worlds, ring):
    todo = cases_of(ring)
    answers = worlds(4).run(on_ranks, ring, todo)
    assert not [text for case, *ranks in zip(todo, *answers, strict=True) for text in wrong(case, ranks)]


def test_prefetching_runs_have_equal_bits(worlds):
    assert all(all(rank) for rank in worlds(4).run(prefetched))


def prefetched() -> list[bool]:
    todo = [Case(heads, ("norm", "rope"), dtype=torch.float32) for heads in HEADS[:12:4]]
    runs = zip(on_ranks(2, todo), on_ranks(2, todo, prefetch=True), strict=True)
    return [torch.equal(first[name], early[name]) for first, early in runs for name in first]


GROUPED = Case(Heads(8, 4, 2), ("norm", "rope"))
EVEN = GROUPED._replace(length=32)

# -- frozen weights ---------------------------------------------------------------------------------------------------


class Forbidden(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: Tensor) -> Tensor:
        raise AssertionError("a gradient is computed that nobody needs")


class Guarded(Projected):
    """Raises if a gradient is computed for a frozen base weight, or for x if `x_is_frozen`."""

    frozen: tuple[str, ...] = ()
    x_is_frozen = False

    def freeze(self, case: str) -> None:
        self.x_is_frozen = case in ("x", "everything")
        if case in ("all weights", "everything"):
            self.requires_grad_(False)
        for name in {"queries": "q", "keys": "k", "keys and values": "kv"}.get(case, ""):
            self.weights[name].requires_grad_(False)
        self.frozen = tuple(name for name, weight in self.weights.items() if not weight.requires_grad)

    def weight(self, name: str) -> Tensor:
        return Forbidden.apply(self.weights[name]) if name in self.frozen else self.weights[name]

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        return super().project(name, Forbidden.apply(x) if self.x_is_frozen else x, heads)


def partly_frozen(case: Case, frozen: str) -> Result:
    """Returns the results of `on_rank` for frozen weights, by `backward`."""
    attend = build(2, case.heads.stage)
    layout = attend.layout(case.length)
    x, dout = (layout.take(tensor, attend.shard) for tensor in inputs(case))
    positions = layout.positions(attend.shard)
    weights = Guarded(*case.heads[:2], positions, case.options)
    weights.freeze(frozen)
    x.requires_grad_(not weights.x_is_frozen)
    out = attend.projected(x, weights, mask=case.mask, layout=layout)
    assert out.requires_grad == (frozen != "everything")
    if out.requires_grad:
        out.backward(dout)
    tensors = {"x": x, **dict(weights.named_parameters())}
    assert all((tensor.grad is not None) == tensor.requires_grad for tensor in tensors.values())
    gradients = {f"d{name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    return {"positions": positions, "out": out.detach(), **gradients}


FROZEN = {
    "base": GROUPED._replace(options=("lora", "rope")),
    **dict.fromkeys(("queries", "keys and values", "x", "everything"), GROUPED._replace(options=("bias", "rope"))),
}


def each_partly_frozen() -> list[Result]:
    return [partly_frozen(case, frozen) for frozen, case in FROZEN.items()]


def test_only_unfrozen_gradients_are_computed(worlds):
    for (frozen, case), *ranks in zip(FROZEN.items(), *worlds(4).run(each_partly_frozen), strict=True):
        result, exact = joined(ranks), expected(case)
        assert all(relative_error(result[name], exact[name]) < 1e-10 for name in result), (frozen, result.keys())
        assert frozen != "base" or result.keys() == exact.keys()


# -- dropout ----------------------------------------------------------------------------------------------------------


class Dropping(Projected):
    """Dropout before the projections, as in LoRA."""

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        return super().project(name, F.dropout(x, 0.5), heads)


def dropped() -> tuple[float, float]:
    """Returns <dout, out> and <dweight, weight> of the values. Out is the values, and so linear in their weight."""
    attend = build(1, 4)
    layout = attend.layout(EVEN.length)
    x, dout = (layout.take(tensor, attend.shard) for tensor in inputs(EVEN))
    weights = Dropping(8, 4, layout.positions(attend.shard))
    out = attend.projected(x, weights, mask=AttentionMask(window=(0, 0)), layout=layout)
    (gradient,) = torch.autograd.grad(out, [weights.weights["v"]], dout)
    return (out * dout).sum().item(), (gradient * weights.weights["v"]).sum().item()


def test_recomputation_repeats_dropout(worlds):
    forward, backward = (sum(values) for values in zip(*worlds(4).run(dropped), strict=True))
    assert abs(forward - backward) < 1e-9 * abs(forward)


# -- saved tensors ----------------------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Returns the bytes of each storage that Python's garbage collector tracks; frozen objects are left out."""
    gc.collect()
    actual = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in actual}


def eventually_new(known_storages: set[int]) -> dict[int, int]:
    """Returns the storages that are not known, after gloo's threads have released their send buffers."""
    for _ in range(20):
        new = {at: n for at, n in storages().items() if at not in known_storages}
        if not any(new.values()):
            break
        time.sleep(0.05)
    return new


def saved_bytes(case: Case) -> tuple[int, int, int]:
    """Returns bytes saved by the graph without parameters, bytes of x, out and lse, and bytes kept alive elsewhere."""
    attend = build(2, case.heads.stage)
    layout = attend.layout(case.length)
    x = layout.take(inputs(case)[0], attend.shard).requires_grad_()
    weights = Projected(*case.heads[:2], layout.positions(attend.shard), case.options)
    attend.projected(x, weights, mask=case.mask, layout=layout)  # fills the caches
    before, saved = storages(), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend.projected(x, weights, mask=case.mask, layout=layout)
    elsewhere = sum(eventually_new({*before, *saved, out.data_ptr()}).values())
    parameters = {p.data_ptr() for p in weights.parameters()}
    total = sum(n for at, n in saved.items() if at not in parameters)
    return total, x.nbytes + out.nbytes + out[..., 0].nbytes, elsewhere


def all_saved_bytes(heads: list[Heads]) -> list[tuple[int, int, int]]:
    gc.freeze()  # so that collections skip the imported objects
    return [saved_bytes(EVEN._replace(heads=some)) for some in heads]


def test_only_x_out_and_lse_are_saved(worlds):
    heads = [Heads(8, 8, None), Heads(8, 1, 4)]
    for rank in worlds(4).run(all_saved_bytes, heads):
        assert [(total, elsewhere) for total, _, elsewhere in rank] == [(allowed, 0) for _, allowed, _ in rank]


class Watched(Projected):
    """Records the number of live heads of earlier stages when the next stage is projected."""

    def watch(self) -> None:
        self.alive: dict[str, list[tuple[int, StorageWeakRef]]] = {"q": [], "k": [], "v": []}
        self.most = dict.fromkeys(self.alive, 0)

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        alive_bytes = sum(n for n, storage in self.alive[name] if not storage.expired())
        self.most[name] = max(self.most[name], alive_bytes)
        y = super().project(name, x, heads)
        self.alive[name].append((len(heads), StorageWeakRef(y.untyped_storage())))
        return y


def max_alive(heads: Heads, prefetch: bool) -> list[dict[str, int]]:
    """Returns the maxima of forward, and of both phases."""
    attend = build(1, heads.stage, prefetch)
    layout = attend.layout(EVEN.length)
    x, dout = layout.take(inputs(EVEN)[0], attend.shard), torch.ones(BATCH, 8, heads.queries, DIM, dtype=torch.float64)
    weights = Watched(*heads[:2], layout.positions(attend.shard), ("rope",))
    weights.watch()
    out = attend.projected(x.requires_grad_(), weights, mask=AttentionMask(), layout=layout)
    forward = dict(weights.most)
    out.backward(dout)
    return [forward, weights.most]


ALIVE = list(product((Heads(16, 16, 4), Heads(16, 8, 4), Heads(16, 4, 8)), (False, True)))


def all_max_alive() -> list[list[dict[str, int]]]:
    return [max_alive(*case) for case in ALIVE]


def test_at_most_one_stage_of_heads_is_alive_during_the_next_projection(worlds):
    for rank in worlds(4).run(all_max_alive):
        for (heads, prefetch), phases in zip(ALIVE, rank, strict=True):
            for maxima in phases:
                assert all(n <= (1 + prefetch) * heads.stage for n in maxima.values()), (heads, prefetch, phases)
