"""The suite that every attention method goes through, ours or yours.

    def on_every_rank() -> None:
        attend = MyMethod(mesh(ring=4)["ring"])
        for case in cases():
            check(attend, case)

    def test_my_method(worlds):
        worlds(4).run(on_every_rank)

Every rank builds the same global tensors from the case's seed, runs the method on its own shard, forward and backward,
and compares with the float64 oracle: random dout, each gradient against its own size, in the dtype that went in. Memory
that nobody wrote holds NaN, inputs may be strided views, another call comes between forward and backward, and a second
run must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, combinations, product
from math import isnan, sqrt
from random import Random
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.attention.reference import reference_attention, visible_pairs
from armillary.core import SequenceLayout

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
CAUSAL = AttentionMask()
HEADS = ((8, 8), (8, 2), (8, 1), (12, 4), (9, 3))
"""(H, K): equal, grouped, one key/value head for all, and two that eight ranks cannot share evenly."""
LENGTHS = (24, 37, 53, 64)
KINDS = ("contiguous", "zigzag", "striped")
MEMORY = ("plain", "transposed", "packed")
"""How the inputs lie: as they are; as views of [B, H, T, D]; as slices of one [B, T, (H + 2K) D] projection."""
MASKS: dict[str, Callable[[int, int], AttentionMask]] = {
    "full": lambda length, batch: AttentionMask(causal=False),
    "causal": lambda length, batch: AttentionMask(),
    "window": lambda length, batch: AttentionMask(window=(length // 5, None)),
    "band": lambda length, batch: AttentionMask(causal=False, window=(length // 4, 3)),
    "documents": lambda length, batch: AttentionMask(documents=(0, 1, length // 3, length // 2 + 2, length)),
    "rows": lambda length, batch: AttentionMask(
        documents=tuple((0, length // (row + 2), length) for row in range(batch))
    ),
}
"""Masks by name, made to fit (length, batch)."""

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-6}
LSE_LIMIT = 1e-4
"""In bfloat16: flash kernels for 16 bits take exp to about 20 bits. An lse that was itself rounded is off by 1e-3."""
FLASH_FACTOR = 2.0
"""In bfloat16: how much larger an error may be than that of flash attention on one device."""


class Method(Protocol):
    """What the suite needs of a method. Tensors are this rank's shards; the result is [B, T, H, Dv]."""

    @property
    def shard(self) -> int:
        """This rank's index in `layout`."""
        ...

    def layout(self, length: int, kind: str) -> SequenceLayout:
        """The layout over all ranks of the method."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any: ...


@dataclass(frozen=True)
class Case:
    """One thing to try. `str(case)` names it.

    Args:
        mask: in global positions.
        kind: of the layout, as `attend.layout` takes it.
        shift: about what every logit is raised by; softmax does not feel it, a careless exp(lse) does.
        memory: how the inputs lie, one of `MEMORY`.
        needs: which of q, k, v require a gradient.
    """

    batch: int = 2
    length: int = 37
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float64
    mask: AttentionMask = CAUSAL
    kind: str = "zigzag"
    scale: float | None = None
    shift: float = 0.0
    memory: str = "plain"
    needs: str = "qkv"
    seed: int = 0

    def __str__(self) -> str:
        words = [f"B{self.batch} N{self.length} H{self.heads} K{self.kv_heads} D{self.head_dim}"]
        words += [f"Dv{self.value_dim}"] * (self.value_dim != self.head_dim)
        words += [str(self.dtype).removeprefix("torch."), "causal" if self.mask.causal else "full"]
        words += [f"window{self.mask.window}"] * (self.mask.window is not None)
        words += [f"documents{self.mask.documents}"] * (self.mask.documents is not None)
        words += [self.kind, self.memory]
        words += [f"scale={self.scale}"] * (self.scale is not None) + [f"shift={self.shift:g}"] * (self.shift != 0)
        words += [f"needs={self.needs or 'nothing'}"] * (self.needs != "qkv")
        return " ".join([*words, f"seed{self.seed}"])


def cases(
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    masks: Sequence[str] = ("full", "causal"),
    heads: Sequence[tuple[int, int]] = HEADS,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = KINDS,
    value_dims: Sequence[int] = (0, -4, 8),
) -> list[Case]:
    """A few dozen cases, always the same, in which any two settings of any two of these meet at least once.

    Args:
        masks: names in `MASKS`.
        heads: pairs (H, K).
        value_dims: how much wider v's heads are than q's.
    """
    rows = _pairwise([(1, 2, 3), lengths, heads, (8, 16), value_dims, dtypes, masks, kinds, (None, 0.5), MEMORY])
    made = [
        Case(b, n, h, kv, d, d + more, dtype, MASKS[mask](n, b), kind, scale, memory=memory, seed=seed)
        for seed, (b, n, (h, kv), d, more, dtype, mask, kind, scale, memory) in enumerate(rows)
    ]
    subsets = [replace(case, needs=needs) for case, needs in zip(made, ("q", "k", "v", "kv", ""), strict=False)]
    far = 1000.0 if dtypes[0] == torch.float64 else 120.0  # exp of it overflows, and exp of its opposite vanishes
    hardest = next((case for case in made if case.mask.causal), made[0])
    shifted = [replace(hardest, dtype=dtypes[0], shift=shift) for shift in (far, -far)]
    return made + subsets + shifted


def check(attend: Method, case: Case, *, device: str | torch.device = "cpu") -> None:
    """Runs `case` on this rank and asserts that everything is as exact as the dtype allows. All ranks must call it.

    Raises:
        AssertionError: naming the case, and each tensor with its error and its limit.
    """
    found = errors(attend, case, device=device)
    limits = _limits(case, attend.layout(case.length, kind=case.kind), attend.shard)
    wrong = [
        f"{name} off by {found[name]:.2g} (limit {limits[name]:.2g})" for name in found if found[name] > limits[name]
    ]
    assert not wrong, f"{case}: {', '.join(wrong)}"


def errors(attend: Method, case: Case, *, device: str | torch.device = "cpu") -> dict[str, float]:
    """Relative errors of this rank's out, lse and gradients (dq, dk, dv, as far as needed) against the oracle.

    Each is relative to what the oracle has on this shard. Any NaN, or an infinity of its own, makes it infinite.

    Raises:
        AssertionError: a wrong dtype or shape, inputs written to, or two runs that differ. Only after all
            communication, so that the ranks stay in step.
    """
    layout, shard = attend.layout(case.length, kind=case.kind), attend.shard
    local = {name: layout.take(x.to(device), shard) for name, x in _inputs(case).items()}
    laid = _lay_out(local, case)
    with _poisoned(list(local.values())):
        first = _run(attend, case, layout, laid, disturb=True)
        second = _run(attend, case, layout, laid, disturb=False)
    expected = {name: layout.take(x, shard) for name, x in _expected(case).items()}
    for name, x in laid.items():
        assert torch.equal(x, local[name]), f"{case}: {name} was written to"
    for name, x in first.items():
        _assert_form(x, expected[name], case, name)
    for name, x in second.items():
        same = torch.equal(x.nan_to_num(), first[name].nan_to_num())
        assert same, f"{case}: {name} differs between two runs, one with return_lse and another call before backward"
    return {name: _error(x.cpu(), expected[name], _expected(case)[name]) for name, x in first.items()}


# -- one run --------------------------------------------------------------------------------------------------------


def _run(
    attend: Method, case: Case, layout: SequenceLayout, inputs: Mapping[str, Tensor], disturb: bool
) -> dict[str, Tensor]:
    """Forward and backward: out and the gradients that the case needs; with `disturb` also lse.

    `disturb` makes another call in between, as the next layer does: what backward will use must survive it."""
    q, k, v = (inputs[name].detach().requires_grad_(name in case.needs) for name in "qkv")
    call = partial(attend, mask=case.mask, layout=layout, scale=case.scale, return_lse=disturb)
    results: dict[str, Tensor] = {}
    if disturb:
        out, lse = call(q, k, v)
        results |= {"out": out.detach(), "lse": lse.detach()}
        call(*(x.detach().mul(-2).requires_grad_() for x in (q, k, v)))
    else:
        out = call(q, k, v)
        results["out"] = out.detach()
    needed = {name: x for name, x in zip("qkv", (q, k, v), strict=True) if x.requires_grad}
    if needed:
        gradients = torch.autograd.grad(out, list(needed.values()), inputs["dout"])
        results |= {f"d{name}": gradient for name, gradient in zip(needed, gradients, strict=True)}
    return results


def _lay_out(local: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The same values in the memory that the case asks for: views whose storage is larger or in another order."""
    if case.memory == "transposed":
        return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in local.items()}
    copies = {name: x.clone() for name, x in local.items()}
    if case.memory == "plain":
        return copies
    parts = [local[name] for name in "qkv"]
    packed = torch.cat([x.flatten(2) for x in parts], dim=-1)
    ends = list(accumulate(x.shape[2] * x.shape[3] for x in parts))
    views = torch.tensor_split(packed, ends[:-1], dim=-1)
    return copies | {name: x.unflatten(2, local[name].shape[2:]) for name, x in zip("qkv", views, strict=True)}


@contextmanager
def _poisoned(like: Sequence[Tensor]) -> Generator[None]:
    """NaN in memory that nobody has written to: in what `torch.empty` returns, and in freed blocks of these sizes."""
    stale = [torch.full_like(x, torch.nan, dtype=d) for x in like for d in (x.dtype, torch.float32) for _ in range(3)]
    del stale
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # makes torch.empty fill what it returns
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# -- what is expected -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _inputs(case: Case) -> dict[str, Tensor]:
    """Global q [B, N, H, D], k [B, N, K, D], v [B, N, K, Dv] and dout [B, N, H, Dv], the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
    dims = {"q": case.head_dim, "k": case.head_dim, "v": case.value_dim, "dout": case.value_dim}
    x = {
        name: torch.randn(case.batch, case.length, heads[name], dims[name], generator=generator, dtype=torch.float64)
        for name in heads
    }
    if case.shift:
        root = sqrt(abs(case.shift) / (case.scale or case.head_dim**-0.5))
        x["q"][..., 0], x["k"][..., 0] = root, root if case.shift > 0 else -root
    return {name: tensor.to(case.dtype) for name, tensor in x.items()}


@lru_cache(maxsize=64)
def _expected(case: Case) -> dict[str, Tensor]:
    """Global out, lse, dq, dk and dv in float64, of the inputs as they are after rounding to the case's dtype."""
    x = _inputs(case)
    leaves = [x[name].double().detach().requires_grad_() for name in "qkv"]
    out, lse = reference_attention(*leaves, mask=case.mask, scale=case.scale, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, x["dout"].double())
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


@lru_cache(maxsize=64)
def _flash(case: Case) -> dict[str, Tensor]:
    """Global out, dq, dk and dv of torch's flash attention on one device, in the case's dtype."""
    x = _inputs(case)
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    width = max(case.head_dim, case.value_dim)  # flash has one head dim: zeros fill the narrower ones
    q, k, v = (F.pad(leaf, (0, width - leaf.shape[3])).transpose(1, 2) for leaf in leaves)
    positions = torch.arange(case.length)
    visible = visible_pairs(case.mask, positions, positions, case.batch)[:, None]
    scale = case.scale or case.head_dim**-0.5
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)[..., : case.value_dim]
    dq, dk, dv = torch.autograd.grad(out, leaves, x["dout"])
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


# -- how far off is too far -----------------------------------------------------------------------------------------


def _limits(case: Case, layout: SequenceLayout, shard: int) -> dict[str, float]:
    """The largest error that each of out, lse, dq, dk and dv may have on this shard."""
    accumulated = torch.float64 if case.dtype == torch.float64 else torch.float32
    # A logit is rounded at its own size, so a shift costs that much.
    limit = LIMITS[accumulated] + 2 * torch.finfo(accumulated).eps * abs(case.shift)
    names = ("out", "lse", "dq", "dk", "dv")
    if case.dtype in LIMITS:
        return dict.fromkeys(names, limit)
    expected, flash = _expected(case), _flash(case)
    limits = {"lse": max(limit, LSE_LIMIT)}
    for name, x in flash.items():
        # Where few tokens make a shard, flash may happen to be exact: then its error on the whole counts.
        here = _error(layout.take(x, shard), layout.take(expected[name], shard), expected[name])
        limits[name] = FLASH_FACTOR * max(here, _error(x, expected[name], expected[name]))
    return limits


def _error(got: Tensor, expected: Tensor, whole: Tensor) -> float:
    """Root mean square of the difference over that of `expected`, or over a tenth of that of `whole` if it is less.

    The latter keeps a shard that expects almost nothing (causal: query 0 has no gradient at all) from dividing by it.
    """
    none = expected == -torch.inf  # an lse that saw nothing
    if not torch.equal(got == -torch.inf, none):
        return float("inf")
    difference = _rms(got.double().masked_fill(none, 0) - expected.masked_fill(none, 0))
    if isnan(difference):
        return float("inf")
    floor = max(_rms(whole.masked_fill(whole == -torch.inf, 0)) / 10, 0.01)
    return difference / max(_rms(expected.masked_fill(none, 0)), floor)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _assert_form(x: Tensor, expected: Tensor, case: Case, name: str) -> None:
    """Right shape, and the inputs' dtype; for lse float32 unless they are float64."""
    dtype = torch.float32 if name == "lse" and case.dtype != torch.float64 else case.dtype
    assert x.dtype == dtype, f"{case}: {name} is {x.dtype}; it must be {dtype} for inputs in {case.dtype}"
    shapes = tuple(x.shape), tuple(expected.shape)
    assert x.shape == expected.shape, f"{case}: {name} has shape {shapes[0]}; it must be {shapes[1]}"


def _pairwise(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows with one level of each factor, such that any two levels of any two factors meet in some row. Greedy."""
    random = Random(0)
    sizes = [range(len(levels)) for levels in factors]
    missing = {
        ((f, a), (g, b)) for f, g in combinations(range(len(factors)), 2) for a, b in product(sizes[f], sizes[g])
    }
    rows: list[tuple[Any, ...]] = []
    while missing:
        kept = dict(min(missing))
        tries = [tuple(kept.get(f, random.choice(size)) for f, size in enumerate(sizes)) for _ in range(50)]
        best = max(tries, key=lambda row: len(missing.intersection(combinations(enumerate(row), 2))))
        missing.difference_update(combinations(enumerate(best), 2))
        rows.append(tuple(levels[level] for levels, level in zip(factors, best, strict=True)))
    return rows
