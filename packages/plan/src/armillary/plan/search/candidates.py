"""The search space: meshes, methods and checkpoint policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from armillary.attention.registry import ALIASES, variants
from armillary.models import Checkpointing
from armillary.plan.memory.estimate import AttentionChoice

KEEPING = (
    Checkpointing("none"),
    Checkpointing("none", tiled=True),
    Checkpointing("attention_output"),
    Checkpointing("layer"),
    Checkpointing("attention_output", offload=True),
    Checkpointing("layer", offload=True),
    Checkpointing("attention_output", offload=True, prefetch=False),
    Checkpointing("layer", offload=True, prefetch=False),
)
"""What blocks may keep, from most and fastest to least and slowest."""


@dataclass(frozen=True)
class Mesh:
    """Ranks on each axis, tensor parallelism left out."""

    shard: int
    ring: int
    ulysses: int

    def __str__(self) -> str:
        axes = (("shard", self.shard), ("ring", self.ring), ("ulysses", self.ulysses))
        return " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "1 rank"

    @property
    def axes(self) -> dict[str, int]:
        """As a `Job` wants them."""
        return {"shard": self.shard, "ring": self.ring, "ulysses": self.ulysses}


@dataclass(frozen=True)
class Candidate:
    """One way to run it, but for what blocks keep and where the optimizer is."""

    mesh: Mesh
    attention: AttentionChoice

    def __str__(self) -> str:
        return f"{self.attention} on {self.mesh}"

    @property
    def parallel(self) -> dict[str, Any]:
        """As fields of `ParallelConfig`."""
        options = asdict(self.attention)
        return {**self.mesh.axes, "cp": None, "attention": options.pop("name"), **options}


def candidates(heads: int, ranks: int, rows: int) -> Iterator[Candidate]:
    """All meshes over all ranks with all methods that use them.

    Args:
        heads: of queries.
        rows: sequences of a step, which `shard` must divide.
    """
    for mesh in meshes(ranks, rows, heads):
        for method in variants(mesh.ring, mesh.ulysses, heads):
            yield Candidate(mesh, AttentionChoice.of(method))


def is_one_of(attention: AttentionChoice, names: Iterable[str]) -> bool:
    """Whether it is one of the methods asked for, if any are; "usp" is ulysses+ring."""
    wanted = [ALIASES.get(name, name) for name in names]
    return not wanted or attention.name in wanted


def meshes(ranks: int, rows: int, heads: int) -> Iterator[Mesh]:
    """Factorizations of the ranks over sequences, tokens and heads."""
    for shard in divisors(ranks):
        for ulysses in divisors(ranks // shard):
            if rows % shard == 0 and ulysses <= heads:
                yield Mesh(shard, ranks // shard // ulysses, ulysses)


def policies() -> Iterator[tuple[Checkpointing, bool]]:
    """(what blocks keep, whether the optimizer is on the host)."""
    yield from product(KEEPING, (False, True))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
