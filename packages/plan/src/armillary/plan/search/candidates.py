"""The search space: meshes and attention methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import Any

from armillary.attention.registry import ALIASES, variants
from armillary.plan.memory.estimate import AttentionChoice


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes."""

    shard: int
    ring: int
    ulysses: int
    replicate: int = 1
    tp: int = 1

    def __str__(self) -> str:
        order = ("replicate", "shard", "ring", "ulysses", "tp")
        return " x ".join(f"{name} {self.axes[name]}" for name in order if self.axes[name] > 1) or "1 rank"

    @property
    def replicas(self) -> int:
        """Data-parallel groups, each with rows of its own."""
        return self.replicate * self.shard

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
        """Fields of the trainer's `ParallelConfig`, except replicate and tp."""
        options, mesh = asdict(self.attention), self.mesh
        axes = {"shard": mesh.shard, "ring": mesh.ring, "ulysses": mesh.ulysses}
        return {**axes, "cp": None, "attention": options.pop("name"), **options}


def candidates(
    heads: int,
    ranks: int,
    rows: int,
    names: Sequence[str] = (),
    tensor_parallel: Sequence[int] = (1,),
    replicate: Sequence[int] = (1,),
) -> Iterator[Candidate]:
    """All meshes over all ranks, with all methods that use them.

    Args:
        heads: query heads.
        rows: sequences per step, which replicate x shard must divide.
        names: only these methods; "usp" is ulysses+ring.
        tensor_parallel, replicate: sizes of these axes to try; those that do not divide the ranks are left out.
    """
    allowed = [ALIASES.get(name, name) for name in names]
    for tp, replicas in product(tensor_parallel, replicate):
        if ranks % (tp * replicas):
            continue
        for shard, ulysses in product(divisors(ranks // (tp * replicas)), repeat=2):
            mesh = Mesh(shard, ranks // (tp * replicas * shard * ulysses), ulysses, replicas, tp)
            if prod(mesh.axes.values()) != ranks or rows % mesh.replicas or ulysses > heads // tp:
                continue
            for method in variants(mesh.ring, mesh.ulysses, heads // tp):
                if not allowed or method.name in allowed:
                    yield Candidate(mesh, AttentionChoice.of(method))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
