"""`armillary-plan bytes`: bytes that attention methods send, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import gcd
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.parts import AttentionOptions, FlashCall, Inputs, check_call
from armillary.attention.plans import (
    ALIASES,
    HEAD_METHODS,
    SEQUENCE_METHODS,
    NamedMethod,
    methods_without_plan,
    named_method,
)
from armillary.core import CommLedger, accumulation_dtype
from armillary.core.parts import phase
from armillary.data.console import Column, print_table
from armillary.plan.memory import SimulatedFlash, fake_world
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.presets import Quantity, amount
from armillary.plan.search.candidates import Candidate, Mesh
from armillary.train.config import Count, CountOrNone, check_limits
from armillary.train.parts import MOST_RANKS

PHASES = ("forward", "backward")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float64)}
COLUMNS = (
    *(Column(name, text=True) for name in ("method", "rank", "phase")),
    *map(Column, ("p2p (GiB)", "collective (GiB)", "all (GiB)", "closed form (GiB)", "sends")),
    Column("paper (GiB)", text=True, own_line=True),
)
LARGEST_DEFAULT_ULYSSES = 8
"""Largest default size of the head axis, for methods on two axes: the accelerators of a typical node."""


@dataclass(frozen=True)
class BytesOptions:
    """Counts the bytes that one rank sends in one call of attention, forward and backward, without a GPU.

    Two ways to start:
      # all methods on 64 ranks
      armillary-plan bytes
      # two methods with a model's heads
      armillary-plan bytes --tokens 128Ki --ranks 16 --heads 32 --kv-heads 8 --causal --attention usp ring

    Runs the methods on fake tensors in a fake process group, while a ledger counts the bytes. The table also has the
    bytes by each method's closed form and, for full masks, the forward bytes by the formulas of WallFacer's paper
    (arXiv 2407.00611), which count one more send and no lse. Defaults are that paper's model M.
    """

    tokens: Quantity = "64Ki"
    """Sequence length over all ranks (N): 65536, 128Ki, 1M, ..."""
    heads: Count = 52
    """Query heads (H)."""
    kv_heads: CountOrNone = None
    """Key/value heads (K); by default as many as query heads."""
    head_dim: Count = 128
    """Head dim (D)."""
    rows: Count = 1
    """Sequences in the batch (B)."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    causal: bool = False
    """Causal mask; by default a full mask."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Distribution of positions over sequence ranks."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 64
    ulysses: CountOrNone = None
    """Ranks on the head axis, for methods on both axes such as usp; by default the largest number up to 8 that divides
    the ranks, H and K."""
    attention: tuple[str, ...] = ()
    """Methods, named as for --parallel.attention; by default usp and all methods on one axis that the heads allow."""
    team: tuple[Count, ...] = ()
    """wallfacer: team sizes (C); by default all valid sizes of at least 2."""
    nodes: CountOrNone = None
    """ring+ring, ring+token_ring: number of nodes of the sequence ranks; by default the smallest possible from 2 on."""
    of_ranks: tuple[int, ...] = ()
    """Ranks whose bytes are counted; by default 0 and 1. With wallfacer, rank 0 keeps its keys and sends less."""
    json: bool = False
    """Print JSON, with exact numbers of bytes."""

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
class MethodBytes:
    """Bytes that a rank sends in one phase of a method: counted, by closed form, and by WallFacer's paper.

    Args:
        ranks: ranks that send these bytes.
        counted: bytes that the ledger counted, in `messages` messages.
        closed: bytes by the closed form, which is the method's communication plan.
        published: bytes by the paper's formula; None if the paper has none for the method and the mask.
    """

    candidate: Candidate
    ranks: tuple[int, ...]
    phase: str
    counted: PhaseBytes
    closed: PhaseBytes
    published: PhaseBytes | None
    messages: int


def plan_bytes(
    options: BytesOptions, progress: Callable[[str, int, int], None] = lambda _activity, _done, _total: None
) -> list[MethodBytes]:
    """Returns the bytes of each method in forward and in backward. Ranks with equal bytes are in one result.

    Args:
        progress: called before each run with the method and rank, the number of finished runs, and of all runs.

    Raises:
        ValueError: a method that does not support the shapes or the ranks, or an unknown rank.
    """
    check_limits(options)
    options = replace(options, kv_heads=options.key_heads)
    candidates, finished_runs = list(candidates_of(options)), count()
    ranks = options.of_ranks or tuple(range(min(2, options.ranks)))
    results = list[MethodBytes]()
    for candidate in candidates:
        # [forward, backward] of the ranks whose figures are equal in both phases, by these figures.
        phases_by_figures = dict[tuple[object, ...], list[MethodBytes]]()
        for rank in ranks:
            progress(f"{candidate.attention}, rank {rank}", next(finished_runs), len(candidates) * len(ranks))
            phases = bytes_by_phase(options, candidate, rank)
            figures = tuple((result.counted, result.closed, result.messages) for result in phases)
            if figures in phases_by_figures:
                ranks_before = phases_by_figures[figures][0].ranks
                phases = [replace(result, ranks=(*ranks_before, rank)) for result in phases]
            phases_by_figures[figures] = phases
        results += (result for phases in phases_by_figures.values() for result in phases)
    return results


def candidates_of(options: BytesOptions) -> Iterator[Candidate]:
    """Yields the chosen methods, or the default ones, each on its mesh; WallFacer once for every team size."""
    for name in options.attention or default_methods(options):
        method = named_method(name)
        # A method on one axis gets all ranks on this axis.
        if method.axes == ("ring", "ulysses"):
            common = gcd(options.heads, options.key_heads, options.ranks)
            ulysses = options.ulysses or max(u for u in range(1, LARGEST_DEFAULT_ULYSSES + 1) if common % u == 0)
        else:
            ulysses = options.ranks if "ulysses" in method.axes else 1
        if options.ranks % ulysses:
            raise ValueError(f"--ulysses {ulysses} does not divide {options.ranks} ranks")
        mesh = Mesh(1, options.ranks // ulysses, ulysses)
        for team in team_sizes(options, method, mesh.ring):
            nodes = options.nodes if "nodes" in method.sequence.mesh_options else None
            yield Candidate(mesh, AttentionChoice(name, team=team, nodes=nodes))


def default_methods(options: BytesOptions) -> list[str]:
    """Returns the methods on one axis that support the number of ranks, and USP, if they have a communication plan."""
    names = [*SEQUENCE_METHODS, *(HEAD_METHODS if options.heads % options.ranks == 0 else ()), *ALIASES]
    return [name for name in names if name not in methods_without_plan("comm_plan")]


def team_sizes(options: BytesOptions, method: NamedMethod, ring: int) -> Iterable[int | None]:
    """Returns the chosen team sizes, or all valid ones; [None] for a method without teams."""
    if "team" not in method.sequence.options:
        return [None]
    # Variants with equal teams differ in the placement of ranks: count each size once.
    valid_sizes = dict.fromkeys(variant.team for variant in method.sequence.variants(ring, options.heads))
    return options.team or valid_sizes or [None]


def bytes_by_phase(options: BytesOptions, candidate: Candidate, rank: int) -> list[MethodBytes]:
    """Returns the bytes that one rank sends: [in forward, in backward]."""
    ledger, shape = run_attention(options, candidate, rank)
    comm_plan = candidate.attention.comm_plan(shape, candidate.mesh.ring, candidate.mesh.ulysses)
    results = list[MethodBytes]()
    for name in PHASES:
        # All kinds of sends except p2p are collectives.
        p2p, closed_p2p = ledger.bytes(kind="p2p", phase=name), comm_plan.bytes(rank, "p2p", name)
        results.append(
            MethodBytes(
                candidate=candidate,
                ranks=(rank,),
                phase=name,
                counted=PhaseBytes(p2p, ledger.bytes(phase=name) - p2p),
                closed=PhaseBytes(closed_p2p, comm_plan.bytes(rank, phase=name) - closed_p2p),
                published=published_bytes(shape, candidate.attention) if name == "forward" else None,
                messages=ledger.messages(phase=name),
            )
        )
    return results


def run_attention(options: BytesOptions, candidate: Candidate, rank: int) -> tuple[CommLedger, AttentionShape]:
    """Runs one call of attention, forward and backward, as `rank`. Returns (ledger, shape of the call)."""
    dtype = DTYPES[options.dtype]
    # Bytes depend only on shapes. Fake tensors have no storage, and the fake process group sends nothing.
    with fake_world(rank, **candidate.attention.mesh_axes(candidate.mesh.axes)) as mesh:
        method = candidate.attention(mesh)
        layout = method.layout(amount(options, "tokens"), options.layout, options.mask)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CommLedger() as ledger:
            # The layout has the shards of the sequence axis. Ranks on a head axis divide each shard among them.
            tokens = layout.refine(method.shards // layout.shards).sizes[method.shard]
            heads = (options.heads, options.key_heads, options.key_heads)
            q, k, v = (torch.empty((options.rows, tokens, n, options.head_dim), dtype=dtype) for n in heads)
            spec = check_call(method, q, k, v, None, AttentionOptions(options.mask, layout, kernel=AnyFlash()))
            out, saved = method.forward(q, k, v, spec)
            with phase("backward"):
                method.backward(torch.empty_like(out), saved, spec)
    return ledger, AttentionShape.of(
        spec.layout,
        options.mask,
        heads=options.heads,
        kv_heads=options.key_heads,
        head_dim=options.head_dim,
        dtype=dtype,
        batch=options.rows,
        projected=False,
    )


@dataclass(frozen=True)
class AnyFlash(SimulatedFlash):
    """A simulated kernel for every dtype and head dim. Its lse has the accumulation dtype, as that of a real kernel."""

    def refuses(self, inputs: Inputs) -> str | None:
        return None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        out, lse = super().call_forward(q, k, v, call)
        return out, lse.to(accumulation_dtype(q.dtype))


def published_bytes(shape: AttentionShape, attention: AttentionChoice) -> PhaseBytes | None:
    """Returns the bytes of forward by WallFacer's paper (arXiv 2407.00611), or None.

    The paper has formulas for some methods on the sequence axis, for full masks and equal shards.
    """
    method, ranks = attention.method, shape.layout.shards
    if shape.mask != AttentionMask(causal=False) or ranks == 1 or shape.layout.length % ranks or method.head:
        return None
    paper_bytes = method.sequence_plan(ranks).published_bytes(shape)
    return None if paper_bytes is None else PhaseBytes(*paper_bytes)


# -- output -----------------------------------------------------------------------------------------------------------


def as_dict(options: BytesOptions, results: Sequence[MethodBytes]) -> dict[str, Any]:
    """Returns the options and all results as JSON values, in bytes."""
    return {"plan": asdict(options), "rows": [asdict(result) for result in results]}


def show(options: BytesOptions, results: Sequence[MethodBytes]) -> None:
    """Prints a table in GiB."""
    mask = f"causal, {options.layout}" if options.causal else "full mask"
    ranks = f"{options.ranks} {'rank' if options.ranks == 1 else 'ranks'}"
    heads = f"H {options.heads}, K {options.key_heads}, D {options.head_dim}"
    print(f"N {amount(options, 'tokens'):,}, {heads}, B {options.rows}, {options.dtype}, {mask}, {ranks}")
    for name in () if options.attention else methods_without_plan("comm_plan"):
        print(f"skipped: {name} has no comm_plan")
    print("sent by one rank in one call of attention; paper: by WallFacer's formulas, with one more send\n")
    print_table(COLUMNS, map(cells, results))


def cells(result: MethodBytes) -> tuple[str, ...]:
    """Returns the cells of a table row. Method and ranks are shown for forward, in the first of a method's two rows."""
    attention, mesh = result.candidate.attention, result.candidate.mesh
    counted, paper = result.counted, result.published
    title = f"{attention} ({mesh})" if min(mesh.ring, mesh.ulysses) > 1 else str(attention)
    names = (title, ", ".join(map(str, result.ranks))) if result.phase == "forward" else ("", "")
    figures = map(gib, (counted.p2p, counted.collective, counted.total, result.closed.total))
    if paper is None:
        paper_text = ""
    elif not paper.collective:
        paper_text = gib(paper.p2p)
    else:
        paper_text = f"{gib(paper.p2p)} + {gib(paper.collective)} = {gib(paper.total)}"
    return (*names, result.phase, *figures, str(result.messages), paper_text)


def gib(size: int) -> str:
    """Formats bytes in GiB with five decimals, one more than WallFacer's paper."""
    return f"{size / 2**30:,.5f}"
