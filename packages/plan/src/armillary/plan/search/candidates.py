"""The search space: meshes with attention methods and layouts, and the rows of packed documents to compare these on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from armillary.attention import AttentionMask
from armillary.attention.internal import ALIASES, variants
from armillary.data import best_fit, open_store
from armillary.data.internal import packed_rows
from armillary.plan.memory import AttentionChoice
from armillary.train import Config

Layout = Literal["zigzag", "contiguous", "striped", "balanced"]
# Layouts to compare for packed documents. Striped layouts send the most bytes, and are left out.
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "balanced")
# Layouts to compare for hybrids. Contiguous shards exchange fewer states; zigzag shards balance attention. The search
# also tries attention on zigzag shards with states on contiguous shards (`Candidate.contiguous_states`).
STATE_LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous")


def layouts_of(hybrid: bool, documents: bool) -> tuple[Layout, ...]:
    """Returns the layouts to compare. There are none for a plain causal mask, for which zigzag is the best."""
    return LAYOUTS if documents else STATE_LAYOUTS if hybrid else ()


@dataclass(frozen=True)
class Mesh:
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
        """Number of data-parallel groups. Each trains on different rows."""
        return self.replicate * self.shard

    @property
    def axes(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """A mesh, an attention method on it, and the layout of sequences over the ring.

    Args:
        contiguous_states: True if layers with a state have contiguous shards, whatever the layout. Hidden states then
            move from the layout to these shards and back.
    """

    mesh: Mesh
    attention: AttentionChoice
    layout: Layout = "zigzag"
    contiguous_states: bool = False

    def __str__(self) -> str:
        layout = "" if self.layout_name == "zigzag" else f", {self.layout_name}"
        return f"{self.attention} on {self.mesh}{layout}"

    @property
    def layout_name(self) -> str:
        """The layout as text, such as "zigzag" or "zigzag, relaid for states"."""
        return f"{self.layout}, relaid for states" if self.contiguous_states else self.layout

    def apply_to(self, config: Config) -> Config:
        """Returns the trainer's configuration with this mesh (except `replicate` and `tp`), method and layout."""
        parallel = replace(config.parallel, **self.parallel)
        return replace(config, parallel=parallel, data=replace(config.data, layout=self.layout))

    @property
    def parallel(self) -> dict[str, Any]:
        """Mesh and method as fields of the trainer's `ParallelConfig`, except `replicate` and `tp`."""
        # AttentionChoice's options have the names of the trainer's fields; its `name` is the trainer's `attention`.
        options, mesh = asdict(self.attention), self.mesh
        axes = {"shard": mesh.shard, "ring": mesh.ring, "ulysses": mesh.ulysses}
        states = {"contiguous_states": self.contiguous_states}
        return {**axes, "cp": None, "attention": options.pop("name"), **options, **states}


def candidates(
    heads: int,
    ranks: int,
    rows: int,
    names: Sequence[str] = (),
    tensor_parallel: Sequence[int] = (1,),
    replicate: Sequence[int] = (1,),
    layouts: Sequence[Layout] = ("zigzag",),
    relaid: bool = False,
) -> Iterator[Candidate]:
    """Yields all meshes over all ranks, with all methods that use the mesh's axes.

    Args:
        rows: sequences per step. replicate x shard must divide them.
        names: methods to yield; empty: all. "usp" is ulysses+ring.
        tensor_parallel, replicate: sizes of these axes to try; those that do not divide the ranks are left out.
        layouts: layouts to try on meshes with a ring. Without a ring all layouts are equal, and the first one is used.
        relaid: True also tries the first layout with states on contiguous shards, on meshes with a ring and without tp.
    """
    allowed = [ALIASES.get(name, name) for name in names]
    for tp, replicas in product(tensor_parallel, replicate):
        if ranks % (tp * replicas):
            continue
        for shard, ulysses in product(divisors(ranks // (tp * replicas)), repeat=2):
            mesh = Mesh(shard, ranks // (tp * replicas * shard * ulysses), ulysses, replicas, tp)
            # Skip meshes with another number of ranks, replicas without rows, and head axes with more ranks than heads.
            if prod(mesh.axes.values()) != ranks or rows % mesh.replicas or ulysses > heads // tp:
                continue
            for method in variants(mesh.ring, mesh.ulysses, heads // tp):
                if not allowed or method.name in allowed:
                    for layout in layouts if mesh.ring > 1 else layouts[:1]:
                        yield Candidate(mesh, AttentionChoice.of(method), layout)
                    if relaid and mesh.ring > 1 and tp == 1:
                        yield Candidate(mesh, AttentionChoice.of(method), layouts[0], contiguous_states=True)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# -- packed documents --------------------------------------------------------------------------------------------------

# Boundaries of the documents of each row: 0, end of the first document, ..., N.
Rows = tuple[tuple[int, ...], ...]

# Standard deviation of the logarithm of a document's length, about as in text from the web.
SIGMA = 1.0


def rows_of_store(path: Path, length: int, rows: int) -> Rows:
    """Returns the first `rows` rows of a store, packed by best fit. If the store has fewer, rows repeat."""
    ends = [row.ends for row in packed_rows(open_store(path), length, best_fit, rows)]
    return tuple(ends[i % len(ends)] for i in range(rows))


def sample_rows(mean: int, length: int, rows: int) -> Rows:
    """Returns rows of documents with lognormal lengths of mean `mean`. The end of a row cuts its last document."""
    rng, sampled_rows = np.random.default_rng(0), list[tuple[int, ...]]()
    for _ in range(rows):
        ends = [0]
        while ends[-1] < length:
            # The mean of a lognormal distribution is exp(mu + sigma^2 / 2), so mu = log(mean) - sigma^2 / 2.
            size = max(1, round(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)))
            ends.append(min(length, ends[-1] + size))
        sampled_rows.append(tuple(ends))
    return tuple(sampled_rows)


def mask_of(documents: Rows | None, batch: int) -> AttentionMask:
    """Returns the mask of the first `batch` rows: causal, and within documents if there are any."""
    if documents is None:
        return AttentionMask()
    return AttentionMask(documents=documents[0] if batch == 1 else documents[:batch])
