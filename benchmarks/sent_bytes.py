"""Bytes that one rank sends in one call of attention, on a network of any size.

    uv run python benchmarks/sent_bytes.py --attention ring wallfacer usp --team 4
    uv run python benchmarks/sent_bytes.py --tokens 128Ki --ranks 16 --heads 32 --kv-heads 8 --causal

Runs the real methods, forward and backward, on tensors without values in a process group that sends nothing, while a
ledger counts. Beside the ledger's bytes are those of the method's communication plan and, for full masks, those of
forward by the formulas of WallFacer's paper (arXiv 2407.00611), which count one more send and no lse. The default sizes
are that paper's model M.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import gcd

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import AttentionOptions, check_call, named_method
from armillary.core import CommLedger
from armillary.core.internal import phase
from armillary.core.testing import fake_world
from armillary.data.console import Column, print_table
from armillary.data.console.units import count_argument
from armillary.plan.memory import AttentionChoice, SimulatedFlash

METHODS = ("ring", "token_ring", "wallfacer", "all_gather", "usp")
COLUMNS = (
    *(Column(name, text=True) for name in ("method", "rank", "phase")),
    *map(Column, ("p2p (GiB)", "collective (GiB)", "all (GiB)", "plan (GiB)", "sends", "paper (GiB)")),
)


@dataclass(frozen=True)
class CallSizes:
    """CallSizes of a call in bfloat16. Tokens and heads are those of all ranks."""

    tokens: int = 65_536
    heads: int = 52
    kv_heads: int = 52
    head_dim: int = 128
    rows: int = 1
    ranks: int = 64
    causal: bool = False

    def axes(self, name: str) -> dict[str, int]:
        """Returns the mesh of a method. USP has the largest possible head axis, up to 8: the devices of a node."""
        uses = named_method(name).axes
        common = gcd(self.heads, self.kv_heads, self.ranks)
        ulysses = max(u for u in range(1, 9) if common % u == 0) if len(uses) > 1 else self.ranks
        ulysses = ulysses if "ulysses" in uses else 1
        return {"ring": self.ranks // ulysses, "ulysses": ulysses}


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes that one rank sends in forward or in backward.

    Args:
        p2p, collective: bytes that the ledger counted, in `sends` messages.
        plan: bytes of the method's communication plan.
        paper: (p2p, collective) by WallFacer's paper; None where it has no formula.
    """

    p2p: int
    collective: int
    sends: int
    plan: int
    paper: tuple[int, int] | None

    @property
    def total(self) -> int:
        return self.p2p + self.collective


def sent_bytes(attention: AttentionChoice, sizes: CallSizes, rank: int = 0) -> dict[str, PhaseBytes]:
    """Returns the bytes that `rank` sends, by phase: "forward" and "backward".

    Raises:
        ValueError: sizes or ranks that the method does not support.
    """
    mask, axes = AttentionMask(causal=sizes.causal), sizes.axes(attention.name)
    # 1. Run one call. Fake tensors have shapes and no values, which is all that bytes depend on.
    with fake_world(rank, **attention.mesh_axes(axes)) as mesh:
        method = attention(mesh)
        layout = method.layout(sizes.tokens, mask=mask)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CommLedger() as ledger:
            # The layout has the shards of the sequence axis. Ranks on a head axis divide each shard among them.
            tokens = layout.refine(method.shards // layout.shards).sizes[method.shard]
            heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
            q, k, v = (torch.empty((sizes.rows, tokens, n, sizes.head_dim), dtype=torch.bfloat16) for n in heads)
            spec = check_call(method, q, k, v, None, AttentionOptions(mask, layout, kernel=SimulatedFlash()))
            out, saved = method.forward(q, k, v, spec)
            with phase("backward"):
                method.backward(torch.empty_like(out), saved, spec)
    # 2. The plan of the same call, and the paper's formula.
    shape = AttentionShape.of(
        spec.layout,
        mask,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=torch.bfloat16,
        batch=sizes.rows,
        projected=False,
    )
    plan = attention.method.comm_plan(shape, axes["ring"], axes["ulysses"])
    is_even = sizes.ranks > 1 and sizes.tokens % sizes.ranks == 0
    has_formula = is_even and not sizes.causal and not attention.method.head
    formula = attention.method.sequence_plan(axes["ring"]).published_bytes(shape) if has_formula else None
    return {
        name: PhaseBytes(
            p2p=(p2p := ledger.bytes(kind="p2p", phase=name)),
            collective=ledger.bytes(phase=name) - p2p,
            sends=ledger.messages(phase=name),
            plan=plan.bytes(rank, phase=name),
            paper=formula if name == "forward" else None,
        )
        for name in ("forward", "backward")
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=METHODS, help="methods, named as for --parallel.attention")
    parser.add_argument("--team", type=count_argument(), help="wallfacer: size of its teams (C)")
    parser.add_argument("--rank", type=int, nargs="+", default=[0], help="ranks; WallFacer's rank 0 sends less")
    for field in fields(CallSizes):
        flag, default = f"--{field.name.replace('_', '-')}", None if field.name == "kv_heads" else field.default
        if field.name == "causal":
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=count_argument(), default=default)
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads
    sizes = CallSizes(**{field.name: getattr(options, field.name) for field in fields(CallSizes)})
    print_table(COLUMNS, (row for name in options.attention for row in table_rows(name, sizes, options)))


def table_rows(name: str, sizes: CallSizes, options: Namespace) -> Iterator[tuple[str, ...]]:
    """Yields the table rows of a method, two for each rank."""
    attention = AttentionChoice(name, team=options.team if "team" in named_method(name).sequence.options else None)
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.axes(name).items() if size > 1)
    for rank in options.rank:
        for part, sent in sent_bytes(attention, sizes, rank).items():
            counted = (sent.p2p, sent.collective, sent.total, sent.plan)
            paper = gib(sum(sent.paper)) if sent.paper else ""
            yield f"{attention} on {mesh}", str(rank), part, *map(gib, counted), str(sent.sends), paper


def gib(size: int) -> str:
    """Formats bytes in GiB with five decimals, one more than WallFacer's paper."""
    return f"{size / 2**30:,.5f}"


if __name__ == "__main__":
    main()
