"""`armillary-plan bytes`: bytes that attention methods send, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import gcd
from typing import Annotated, Any, Literal

import torch
import torch.distributed._tools.fake_collectives  # pyright: ignore[reportUnusedImport] - collectives on fake tensors
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import check_call
from armillary.attention.kernels import Inputs
from armillary.attention.kernels.flash import FlashCall
from armillary.attention.registry import (
    ALIASES,
    HEAD_METHODS,
    SEQUENCE_METHODS,
    NamedMethod,
    methods_without_plan,
    named_method,
)
from armillary.core import CommLedger, accumulation_dtype
from armillary.core.observe.ledger import phase
from armillary.data.console.table import Column, print_table
from armillary.plan.memory import SimulatedFlash, fake_world
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.presets import Quantity, amount
from armillary.plan.search.candidates import Candidate, Mesh
from armillary.train.config.limits import Count, CountOrNone, check_limits
from armillary.train.dry_run import MOST_RANKS

PHASES = ("forward", "backward")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)}
COLUMNS = (
    *(Column(name, text=True) for name in ("method", "rank", "phase")),
    *map(Column, ("p2p (GiB)", "collective (GiB)", "all (GiB)", "closed form (GiB)", "sends")),
    Column("paper (GiB)", text=True, own_line=True),
)


@dataclass(frozen=True)
class BytesPlan:
    """Counts the bytes that one rank sends in one call of attention, forward and backward, without a GPU.

    Two ways to start:
      # all methods on 64 ranks
      armillary-plan bytes
      # two methods with a model's heads
      armillary-plan bytes --tokens 128Ki --ranks 16 --heads 32 --kv-heads 8 --causal --attention usp ring

    The real methods run on fake tensors in a fake process group, under a ledger. The table also has closed forms and,
    for full masks, the forward bytes of WallFacer's paper (arXiv 2407.00611), which has one more send and no lse.
    Defaults are that paper's model M.
    """

    tokens: Quantity = "64Ki"
    """Sequence length over all ranks (N): 65536, 128Ki, 1M, ..."""
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
    """Distribution of positions over sequence ranks."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 64
    ulysses: CountOrNone = None
    """Ranks on the head axis, for methods on both axes such as usp; by default the largest common divisor up to 8."""
    attention: tuple[str, ...] = ()
    """Methods, named as for --parallel.attention; by default usp and the methods on one axis that support the heads."""
    team: tuple[Count, ...] = ()
    """wallfacer: team sizes (C); by default all valid sizes of at least 2."""
    nodes: CountOrNone = None
    """ring+ring, ring+token_ring: number of nodes of the sequence ranks; by default the smallest of at least 2."""
    of_ranks: tuple[int, ...] = ()
    """Ranks to show; by default 0 and 1. With wallfacer, rank 0 keeps its own keys and sends less."""
    json: bool = False
    """Print JSON, with all bytes."""

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(causal=self.causal)


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes that one rank sends in one phase."""

    p2p: int
    collective: int

    @property
    def total(self) -> int:
        return self.p2p + self.collective


@dataclass(frozen=True)
class Row:
    """Bytes of a method in one phase, for ranks with equal figures.

    Args:
        counted: bytes that the ledger counted, in `messages` messages.
        closed: bytes by the closed form, the method's communication plan.
        published: bytes by the formula in WallFacer's paper, if it has the method.
    """

    candidate: Candidate
    ranks: tuple[int, ...]
    phase: str
    counted: PhaseBytes
    closed: PhaseBytes
    published: PhaseBytes | None
    messages: int


def plan_bytes(
    plan: BytesPlan, progress: Callable[[str, int, int], None] = lambda _activity, _done, _total: None
) -> list[Row]:
    """Returns rows for forward and backward of each method; ranks with equal figures share a row.

    Args:
        progress: called before each method and rank with its name, the number done, and their total number.

    Raises:
        ValueError: a method that does not support the shapes or the ranks, or an unknown rank.
    """
    check_limits(plan)
    plan = replace(plan, kv_heads=plan.key_heads)
    all_choices, finished_runs = list(choices(plan)), count()
    ranks = plan.of_ranks or tuple(range(min(2, plan.ranks)))
    rows = list[Row]()
    for candidate in all_choices:
        by_figures = dict[tuple[object, ...], list[Row]]()
        for rank in ranks:
            progress(f"{candidate.attention}, rank {rank}", next(finished_runs), len(all_choices) * len(ranks))
            pair = rows_of(plan, candidate, rank)
            group = by_figures.setdefault(tuple((row.counted, row.closed, row.messages) for row in pair), [])
            # Ranks with equal figures in both phases share the rows.
            group[:] = [replace(row, ranks=(*(group[0].ranks if group else ()), rank)) for row in pair]
        rows += (row for group in by_figures.values() for row in group)
    return rows


def choices(plan: BytesPlan) -> Iterator[Candidate]:
    """Yields the plan's methods, or the default ones, each on its mesh; WallFacer once for every team size."""
    for name in plan.attention or default_methods(plan):
        method = named_method(name)
        # All ranks are on the method's axis. A method on two axes gets the largest head axis of at most 8 ranks.
        if method.axes == ("ring", "ulysses"):
            common = gcd(plan.heads, plan.key_heads, plan.ranks)
            ulysses = plan.ulysses or max(u for u in range(1, 9) if common % u == 0)
        else:
            ulysses = plan.ranks if "ulysses" in method.axes else 1
        if plan.ranks % ulysses:
            raise ValueError(f"--ulysses {ulysses} does not divide {plan.ranks} ranks")
        mesh = Mesh(1, plan.ranks // ulysses, ulysses)
        for team in teams(plan, method, mesh.ring):
            nodes = plan.nodes if "nodes" in method.sequence.mesh_options else None
            yield Candidate(mesh, AttentionChoice(name, team=team, nodes=nodes))


def default_methods(plan: BytesPlan) -> list[str]:
    """Returns USP and the methods on one axis that support the ranks, except methods without a communication plan."""
    names = [*SEQUENCE_METHODS, *(HEAD_METHODS if plan.heads % plan.ranks == 0 else ()), *ALIASES]
    return [name for name in names if name not in methods_without_plan("comm_plan")]


def teams(plan: BytesPlan, method: NamedMethod, ring: int) -> Iterable[int | None]:
    """Returns the team sizes to count: the plan's, or all valid ones; [None] for a method without teams."""
    if "team" not in method.sequence.options:
        return [None]
    fitting_teams = dict.fromkeys(options.team for options in method.sequence.variants(ring, plan.heads))
    return plan.team or fitting_teams or [None]


def rows_of(plan: BytesPlan, candidate: Candidate, rank: int) -> list[Row]:
    """Returns the rows of one rank, for forward and for backward: bytes counted, by closed form, and published."""
    ledger, shape = attend(plan, candidate, rank)
    comm_plan = candidate.attention.comm_plan(shape, candidate.mesh.ring, candidate.mesh.ulysses)
    rows = list[Row]()
    for name in PHASES:
        # Both count all kinds of sends; all but p2p are collectives.
        p2p, closed_p2p = ledger.bytes(kind="p2p", phase=name), comm_plan.bytes(rank, "p2p", name)
        counted_bytes = PhaseBytes(p2p, ledger.bytes(phase=name) - p2p)
        formula_bytes = PhaseBytes(closed_p2p, comm_plan.bytes(rank, phase=name) - closed_p2p)
        paper = published_bytes(shape, candidate.attention) if name == "forward" else None
        rows.append(Row(candidate, (rank,), name, counted_bytes, formula_bytes, paper, ledger.messages(phase=name)))
    return rows


def attend(plan: BytesPlan, candidate: Candidate, rank: int) -> tuple[CommLedger, AttentionShape]:
    """Runs one call forward and backward as `rank`; returns (its ledger, the shape of the call)."""
    dtype = DTYPES[plan.dtype]
    # Only shapes matter: fake tensors have no storage, and the fake group delivers nothing.
    with fake_world(rank, **candidate.attention.mesh_axes(candidate.mesh.axes)) as mesh:
        method = candidate.attention(mesh)
        layout = method.layout(amount(plan, "tokens"), plan.layout, plan.mask)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CommLedger() as ledger:
            tokens = layout.refine(method.shards // layout.shards).sizes[method.shard]
            heads = (plan.heads, plan.key_heads, plan.key_heads)
            q, k, v = (torch.empty((plan.rows, tokens, n, plan.head_dim), dtype=dtype) for n in heads)
            spec = check_call(method, q, k, v, None, AttentionOptions(plan.mask, layout, kernel=AnyFlash()))
            out, saved = method.forward(q, k, v, spec)
            with phase("backward"):
                method.backward(torch.empty_like(out), saved, spec)
    return ledger, AttentionShape.of(
        spec.layout,
        plan.mask,
        heads=plan.heads,
        kv_heads=plan.key_heads,
        head_dim=plan.head_dim,
        dtype=dtype,
        batch=plan.rows,
        projected=False,
    )


@dataclass(frozen=True)
class AnyFlash(SimulatedFlash):
    """A simulated kernel that accepts every dtype and head dim."""

    def refuses(self, inputs: Inputs) -> str | None:
        return None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        out, lse = super().call_forward(q, k, v, call)
        return out, lse.to(accumulation_dtype(q.dtype))


def published_bytes(shape: AttentionShape, attention: AttentionChoice) -> PhaseBytes | None:
    """Returns forward bytes under a full mask by WallFacer's paper (arXiv 2407.00611); None if it has no formula."""
    method, ranks = attention.method, shape.layout.shards
    if shape.mask != AttentionMask(causal=False) or ranks == 1 or shape.layout.length % ranks or method.head:
        return None
    paper_bytes = method.sequence_plan(ranks).published_bytes(shape)
    return None if paper_bytes is None else PhaseBytes(*paper_bytes)


# -- output -----------------------------------------------------------------------------------------------------------


def as_dict(plan: BytesPlan, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the plan and all rows as JSON values, in bytes."""
    return {"plan": asdict(plan), "rows": [asdict(row) for row in rows]}


def show(plan: BytesPlan, rows: Sequence[Row]) -> None:
    """Prints a table in GiB."""
    mask = f"causal, {plan.layout}" if plan.causal else "full mask"
    ranks = f"{plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}"
    shape = f"N {amount(plan, 'tokens'):,}, H {plan.heads}, K {plan.key_heads}, D {plan.head_dim}, B {plan.rows}"
    print(f"{shape}, {plan.dtype}, {mask}, {ranks}")
    for name in () if plan.attention else methods_without_plan("comm_plan"):
        print(f"skipped: {name} has no comm_plan")
    print("sent by one rank in one call of attention; paper: WallFacer's count, with one send per rank\n")
    print_table(COLUMNS, map(cells, rows))


def cells(row: Row) -> tuple[str, ...]:
    """Returns the table cells of a row; names are in the forward row only."""
    attention, mesh, counted_bytes, paper = row.candidate.attention, row.candidate.mesh, row.counted, row.published
    title = f"{attention} ({mesh})" if min(mesh.ring, mesh.ulysses) > 1 else str(attention)
    names = (title, ", ".join(map(str, row.ranks))) if row.phase == "forward" else ("", "")
    figures = map(gib, (counted_bytes.p2p, counted_bytes.collective, counted_bytes.total, row.closed.total))
    if paper is None:
        paper_text = ""
    elif not paper.collective:
        paper_text = gib(paper.p2p)
    else:
        paper_text = f"{gib(paper.p2p)} + {gib(paper.collective)} = {gib(paper.total)}"
    return (*names, row.phase, *figures, str(row.messages), paper_text)


def gib(size: int) -> str:
    """Formats GiB with five decimals; WallFacer's paper has four."""
    return f"{size / 2**30:,.5f}"
