"""What is asked for on the command line: the trainer's flags, and how to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated

import tyro

from armillary.attention.registry import names
from armillary.data.parsing import parse
from armillary.plan.presets import cluster_of
from armillary.train.config import Config, LogConfig, ParallelConfig
from armillary.train.config.command import Source, read_source
from armillary.train.config.limits import check_limits

PROGRAM = "armillary-tune"


@dataclass(frozen=True)
class Order(Source):
    """Measures which mesh and attention method train a model fastest on this machine, for `armillary-train --config`.

    Three ways to start:
      # all meshes and methods on 8 GPUs
      torchrun --nproc-per-node 8 -m armillary.plan.tune --recipe llama3_8b_128k
      # two methods, without what the planner predicts to be slow or not to fit
      torchrun --nproc-per-node 8 -m armillary.plan.tune --attention usp upipe --cluster 8xh100
      # the chosen run
      torchrun --nproc-per-node 8 -m armillary.train --config tuned.toml

    It takes as many ranks as the run will have, and the run's own flags. All meshes of shard x ring x ulysses are
    tried, whatever the flags say of these; replicate and tp are kept. The same command resumes what was interrupted.
    """

    out: Path = Path("tuned.toml")
    """TOML file for the run with the fastest mesh and method; measurements go beside it (.json). Rank 0 writes both."""
    iterations: int = 3
    """Measured forward and backward passes of each candidate, after one to warm up."""
    attention: tuple[str, ...] = ()
    """Only these methods, as --parallel.attention has them; usp is ulysses+ring."""
    cluster: str | None = None
    """Skip what the planner predicts not to fit or to be slow on this cluster: 8xh100, ..., or a TOML file."""
    slower: float = 1.5
    """With --cluster: skip what is predicted to take more than so many times as long as the fastest."""
    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    @property
    def measured_run(self) -> Config:
        """The run, stripped of what does not matter to measurements."""
        parallel = self.run.parallel
        kept = ParallelConfig(
            replicate=parallel.replicate, tp=parallel.tp, kernel=parallel.kernel, compiler=parallel.compiler
        )
        return replace(self.run, parallel=kept, log=LogConfig())

    @property
    def measurements(self) -> Path:
        """The file that holds them."""
        return self.out.with_suffix(".json")


def read_order(argv: Sequence[str]) -> Order:
    """The order.

    Raises:
        ValueError: as `read_command`; numbers or methods that will not do.
    """
    source, _, config = read_source(argv, PROGRAM)
    order = parse(argv, Order, PROGRAM, Order(source.recipe, source.config, run=config))
    check_order(order)
    return replace(order, recipe=source.recipe)


def check_order(order: Order) -> None:
    """Refuses what cannot be measured."""
    check_limits(order.run)
    parallel = order.run.parallel
    if order.iterations < 1:
        raise ValueError(f"--iterations {order.iterations}: must be at least 1")
    if not 1 <= order.slower < inf:
        raise ValueError(f"--slower {order.slower}: must be at least 1, which leaves the fastest alone")
    if unknown := [name for name in order.attention if name not in names()]:
        raise ValueError(f"--attention {unknown[0]}: no such method; known: {', '.join(names())}")
    if order.out.is_dir() or order.out.suffix != ".toml":
        raise ValueError(f"--out {order.out}: must be a file that ends in .toml")
    if order.cluster is not None:
        cluster_of(order.cluster)
    if order.cluster is not None and parallel.replicate * parallel.tp > 1:
        raise ValueError(
            f"--cluster {order.cluster}: the planner knows neither --parallel.replicate {parallel.replicate} nor "
            f"--parallel.tp {parallel.tp}; leave out the one or the others"
        )
