"""`armillary-plan bytes`: what attention methods send for given shapes, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import gcd
from typing import Annotated, Literal

import torch
import torch.distributed._tools.fake_collectives  # pyright: ignore[reportUnusedImport] - collectives on fake tensors
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.kernels import Inputs, Scores
from armillary.attention.kernels.packing import Lengths
from armillary.attention.registry import ALIASES, HEAD_METHODS, SEQUENCE_METHODS, NamedMethod, named_method
from armillary.attention.spec import AttentionOptions
from armillary.core import CommLedger
from armillary.core.accumulate import accumulation_dtype
from armillary.core.observe.ledger import phase
from armillary.plan.memory import SimulatedFlash, fake_world
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.presets import Quantity, amount
from armillary.plan.search.candidates import Candidate, Mesh
from armillary.train.config.limits import Count, CountOrNone, check_limits
from armillary.train.dry_run import MOST_RANKS

PHASES = ("forward", "backward")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class BytesPlan:
    """Counts what one rank sends in one call of attention, forward and backward, without a GPU.

    Two ways to start:
      # all methods on 64 ranks
      armillary-plan bytes
      # two methods with a model's heads
      armillary-plan bytes --tokens 128Ki --ranks 16 --heads 32 --kv-heads 8 --causal --attention usp ring

    The real methods run on fake tensors in a fake process group, under a ledger. Shown beside are closed forms, and for
    full masks what WallFacer's paper counts in forward (arXiv 2407.00611): as many steps as ranks, where one less is
    sent, and no LSE. The defaults are that paper's model M.
    """

    tokens: Quantity = "64Ki"
    """Of a sequence (N), over all ranks: 65536, 128Ki, 1M, ..."""
    heads: Count = 52
    """Query heads (H)."""
    kv_heads: CountOrNone = None
    """Key/value heads (K); by default as many as query heads."""
    head_dim: Count = 128
    """D."""
    rows: Count = 1
    """Sequences (B)."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    causal: bool = False
    """Causal mask; by default a full one."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Which positions each sequence rank holds."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 64
    ulysses: CountOrNone = None
    """Ranks on the head axis, for methods on both axes such as usp; by default what divides both, up to 8."""
    attention: tuple[str, ...] = ()
    """Methods, as --parallel.attention has them; by default usp and all on one axis that the ranks divide."""
    team: tuple[Count, ...] = ()
    """wallfacer: team sizes (C); by default all from 2 on that fit."""
    of_ranks: tuple[int, ...] = ()
    """Ranks whose bytes are shown; by default 0 and 1. With wallfacer, 0 keeps its own keys, and sends less."""
    json: bool = False
    """Print JSON, with all bytes."""

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(causal=self.causal)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in one phase."""

    p2p: int
    collective: int

    @property
    def total(self) -> int:
        return self.p2p + self.collective


@dataclass(frozen=True)
class Row:
    """What a method sends from each of some ranks in one phase, counted, by closed form, and as published."""

    candidate: Candidate
    ranks: tuple[int, ...]
    phase: str
    counted: Sent
    closed: Sent
    published: Sent | None
    messages: int


def plan_bytes(
    plan: BytesPlan, progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None
) -> list[Row]:
    """Forward and backward of each method, ranks with the same figures together.

    Args:
        progress: called before each method and rank, with its name, how many are done, and how many there are.

    Raises:
        ValueError: a method that does not fit the shapes or the ranks, or no such rank.
    """
    check_limits(plan)
    plan = replace(plan, kv_heads=plan.heads if plan.kv_heads is None else plan.kv_heads)

    wanted, ranks = list(choices(plan)), plan.of_ranks or tuple(range(min(2, plan.ranks)))
    done = count()

    def rows(candidate: Candidate) -> Iterator[Row]:
        for rank in ranks:
            progress(f"{candidate.attention}, rank {rank}", next(done), len(wanted) * len(ranks))
            yield from rows_of(plan, candidate, rank)

    return [row for candidate in wanted for row in together(list(rows(candidate)))]


def choices(plan: BytesPlan) -> Iterator[Candidate]:
    """The methods asked for, each with its axes and teams."""
    for name in plan.attention or shown_by_default(plan):
        method = named_method(name)
        both = method.axes == ("ring", "ulysses")
        ulysses = ulysses_of(plan) if both else plan.ranks if "ulysses" in method.axes else 1
        if plan.ranks % ulysses:
            raise ValueError(f"--ulysses {ulysses} does not divide {plan.ranks} ranks")
        mesh = Mesh(1, plan.ranks // ulysses, ulysses)
        for team in teams(plan, method, mesh.ring):
            yield Candidate(mesh, AttentionChoice(name, team=team))


def shown_by_default(plan: BytesPlan) -> list[str]:
    """All methods on one axis, those on heads where the ranks divide these; and USP."""
    return [*SEQUENCE_METHODS, *(HEAD_METHODS if plan.heads % plan.ranks == 0 else ()), *ALIASES]


def teams(plan: BytesPlan, method: NamedMethod, ring: int) -> Iterable[int | None]:
    """Team sizes of a method that has them: those asked for, or all that fit."""
    if "team" not in method.sequence.takes:
        return [None]
    fitting = dict.fromkeys(options.team for options in method.sequence.variants(ring))
    return plan.team or fitting or [None]


def ulysses_of(plan: BytesPlan) -> int:
    """Ranks on the head axis of a method that has both."""
    if plan.ulysses is not None:
        return plan.ulysses
    shared = gcd(plan.heads, plan.kv_heads or plan.heads, plan.ranks)
    return max(u for u in range(1, 9) if shared % u == 0)


def rows_of(plan: BytesPlan, candidate: Candidate, rank: int) -> list[Row]:
    """Forward and backward of one rank."""
    ledger, work = attend(plan, candidate, rank)
    comm_plan = candidate.attention.comm_plan(work, candidate.mesh.ring, candidate.mesh.ulysses)

    def row(phase: str) -> Row:
        counted, closed = (
            Sent(p2p, total - p2p)
            for p2p, total in (
                (ledger.bytes(kind="p2p", phase=phase), ledger.bytes(phase=phase)),
                (comm_plan.bytes(rank, "p2p", phase), comm_plan.bytes(rank, phase=phase)),
            )
        )
        paper = published(work, candidate.attention) if phase == "forward" else None
        return Row(candidate, (rank,), phase, counted, closed, paper, ledger.messages(phase=phase))

    return [row(phase) for phase in PHASES]


def attend(plan: BytesPlan, candidate: Candidate, rank: int) -> tuple[CommLedger, AttentionShape]:
    """Runs one call forward and backward as this rank would: what it sent, and what the call was."""
    heads, keys = plan.heads, plan.kv_heads or plan.heads
    with fake_world(rank, **candidate.mesh.axes) as mesh:
        method = candidate.attention(mesh)
        layout = method.layout(amount(plan, "tokens"), plan.layout, plan.mask)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CommLedger() as ledger:
            tokens = layout.refine(method.shards // layout.shards).sizes[method.shard]
            shapes = ((plan.rows, tokens, n, plan.head_dim) for n in (heads, keys, keys))
            q, k, v = (torch.empty(shape, dtype=DTYPES[plan.dtype]) for shape in shapes)
            spec = method.check_call(q, k, v, None, AttentionOptions(plan.mask, layout, kernel=AnyFlash()))
            out, saved = method.forward(q, k, v, spec)
            with phase("backward"):
                method.backward(torch.empty_like(out), saved, spec)
    return ledger, AttentionShape.of(
        spec.layout,
        plan.mask,
        heads=heads,
        kv_heads=keys,
        head_dim=plan.head_dim,
        dtype=DTYPES[plan.dtype],
        batch=plan.rows,
        projected=False,
    )


@dataclass(frozen=True)
class AnyFlash(SimulatedFlash):
    """A kernel without numbers for any inputs."""

    def refuses(self, inputs: Inputs) -> str | None:
        return None

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().call_forward(q, k, v, window, scores, lengths)
        return out, lse.to(accumulation_dtype(q.dtype))


def published(work: AttentionShape, attention: AttentionChoice) -> Sent | None:
    """What the paper counts for forward, where every token sees all (arXiv 2407.00611), of a method it counts."""
    method, ranks = attention.method, work.layout.shards
    if work.mask != AttentionMask(causal=False) or ranks == 1 or work.layout.length % ranks:
        return None
    counted = None if method.head else method.sequence.published
    return None if counted is None else Sent(*counted(work, method.options))


def together(rows: list[Row]) -> list[Row]:
    """Ranks with the same figures in one row for each phase; forward before backward for the same ranks."""
    same: dict[tuple[tuple[object, ...], ...], list[Row]] = {}
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        figures = tuple((row.counted, row.closed, row.messages) for row in (forward, backward))
        before = same.get(figures)
        ranks = (*(before[0].ranks if before else ()), *forward.ranks)
        same[figures] = [replace(forward, ranks=ranks), replace(backward, ranks=ranks)]
    return [row for pair in same.values() for row in pair]
