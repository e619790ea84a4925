"""The tuner's command line: the trainer's flags, and options for the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated

import tyro

from armillary.attention.plans import names
from armillary.data.console import parse
from armillary.plan.presets import cluster_of
from armillary.train import Config, LogConfig, ParallelConfig
from armillary.train.config import Source, check_limits, check_model_flags, read_source

PROGRAM = "armillary-tune"


@dataclass(frozen=True)
class TuneOptions(Source):
    """Measures which mesh and attention method train a model fastest on this machine.

    Three ways to start:
      # all meshes and methods on 8 GPUs
      torchrun --nproc-per-node 8 -m armillary.plan.tune --recipe llama3_8b_128k
      # only two methods, and skip candidates that the planner predicts to be slow or not to fit
      torchrun --nproc-per-node 8 -m armillary.plan.tune --attention usp upipe --cluster 8xh100
      # start the run with the chosen mesh and method
      torchrun --nproc-per-node 8 -m armillary.train --config tuned.toml

    Start it on as many ranks as the run will have, with the run's own flags. It tries all meshes of shard x ring x
    ulysses, keeps --parallel.replicate and --parallel.tp, and ignores the other flags of the mesh. With
    --data.documents it also tries the layouts zigzag, contiguous and balanced, on the documents of the first batch. For
    a hybrid it also tries zigzag and contiguous and, without tp, the run's layout with contiguous states. The same
    command resumes interrupted measurements.
    """

    out: Path = Path("tuned.toml")
    """TOML file to write: the run with the fastest mesh and method. Measurements are in a JSON file beside it."""
    iterations: int = 3
    """Measured passes (forward and backward) of each candidate, after a warm-up pass."""
    attention: tuple[str, ...] = ()
    """Methods to measure, named as for --parallel.attention; by default all. usp is ulysses+ring."""
    cluster: str | None = None
    """A cluster's name, such as 8xh100, or a TOML file. Skips candidates that the planner predicts not to fit on it, or
    to be slow."""
    slower: float = 1.5
    """With --cluster: skips candidates that are predicted to take more than this many times as long as the fastest."""
    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    @property
    def measured_run(self) -> Config:
        """The run with default shard, ring, ulysses, method and log, on which measurements do not depend."""
        parallel = self.run.parallel
        parallel = ParallelConfig(
            replicate=parallel.replicate,
            tp=parallel.tp,
            kernel=parallel.kernel,
            zero_stage=parallel.zero_stage,
            compiler=parallel.compiler,
        )
        return replace(self.run, parallel=parallel, log=LogConfig())

    @property
    def measurements(self) -> Path:
        """The JSON file of measurements."""
        return self.out.with_suffix(".json")


def read_options(argv: Sequence[str]) -> TuneOptions:
    """Parses a command line.

    Raises:
        ValueError: wrong flags or files of the trainer, a number outside its range, an unknown method or cluster, an
            `out` that is no .toml file, or a cluster together with replicate or tp.
    """
    # The recipe and the file give the defaults of the flags.
    source, _, config = read_source(argv, PROGRAM)
    options = parse(argv, TuneOptions, PROGRAM, TuneOptions(source.recipe, source.config, run=config))
    check_limits(options.run)
    check_model_flags(argv, options.run.model)
    parallel = options.run.parallel
    if options.iterations < 1:
        raise ValueError(f"--iterations {options.iterations}: must be at least 1")
    if not 1 <= options.slower < inf:
        raise ValueError(f"--slower {options.slower}: must be at least 1, and finite")
    if unknown := [name for name in options.attention if name not in names()]:
        raise ValueError(f"--attention {unknown[0]}: no such method; known: {', '.join(names())}")
    if options.out.is_dir() or options.out.suffix != ".toml":
        raise ValueError(f"--out {options.out}: must be a file that ends in .toml")
    if options.cluster is not None:
        cluster_of(options.cluster)
        if parallel.replicate * parallel.tp > 1:
            raise ValueError(
                f"--cluster {options.cluster} does not predict --parallel.replicate {parallel.replicate} x "
                f"--parallel.tp {parallel.tp}; leave out --cluster or these"
            )
    return replace(options, recipe=source.recipe)
