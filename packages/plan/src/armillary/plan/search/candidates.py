"""The search space: meshes and attention methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from armillary.attention.registry import ALIASES, variants
from armillary.plan.memory.estimate import AttentionChoice


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes, without tensor parallelism."""

    shard: int
    ring: int
    ulysses: int

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes.items() if size > 1) or "1 rank"

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by name, as for a `Job`."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """A mesh and an attention method on it."""

    mesh: Mesh
    attention: AttentionChoice

    def __str__(self) -> str:
        return f"{self.attention} on {self.mesh}"

    @property
    def parallel(self) -> dict[str, Any]:
        """Fields of the trainer's `ParallelConfig`."""
        options = asdict(self.attention)
        return {**self.mesh.axes, "cp": None, "attention": options.pop("name"), **options}


def candidates(heads: int, ranks: int, rows: int, names: Sequence[str] = ()) -> Iterator[Candidate]:
    """All meshes over all ranks, with all methods that use them.

    Args:
        heads: query heads.
        rows: sequences per step, which `shard` must divide.
        names: only these methods; "usp" is ulysses+ring.
    """
    allowed = [ALIASES.get(name, name) for name in names]
    for shard in divisors(ranks):
        for ulysses in divisors(ranks // shard):
            mesh = Mesh(shard, ranks // shard // ulysses, ulysses)
            if rows % shard or ulysses > heads:
                continue
            for method in variants(mesh.ring, mesh.ulysses, heads):
                if not allowed or method.name in allowed:
                    yield Candidate(mesh, AttentionChoice.of(method))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
