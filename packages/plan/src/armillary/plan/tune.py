"""`armillary-tune`: measures which mesh and attention method train a model fastest on the machine that it runs on.

Builds a block of the model like the trainer, on one mesh after another, and times forward and backward.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from armillary.attention import AttentionMask
from armillary.core import world_size
from armillary.core.internal import compat
from armillary.data.console import Bar, Column, exit_on_error, print_lines, print_table, refuse_removed
from armillary.models import initialize, linear_token_loss
from armillary.models.internal import one_block
from armillary.plan.arguments import cluster_of, duration, is_hybrid
from armillary.plan.memory import estimate
from armillary.plan.memory.room import Room
from armillary.plan.search.candidates import Candidate, candidates, layouts_of
from armillary.plan.search.search import check_methods
from armillary.plan.search.trainer_config import write_toml
from armillary.plan.trainer_run import job_of, time_of
from armillary.train import Config, LogConfig, ParallelConfig, process_group
from armillary.train.config import (
    ConfiguredRun,
    Count,
    Several,
    by_flag,
    check_config,
    check_limits,
    model_config,
    read_run,
)
from armillary.train.internal import (
    Ranks,
    batch_mask,
    caused_by_peers,
    check_consistent,
    choose_axes,
    collective_timeout,
    kernel_with_sm_margin,
    load_rows,
    mesh_of,
    open_stores,
    precision,
    shard_model,
    watchdog_of,
)

PROGRAM = "armillary-tune"
# Flags that are gone, and what to write instead.
REMOVED = {"--slower": "name the number of candidates to measure, --best"}
# Vocabulary of the measured model. It is small, because embedding and loss take the same time for all candidates.
VOCABULARY = 256
COLUMNS = (Column("candidate", text=True), Column("forward and backward"), Column("failed", text=True, own_line=True))


@dataclass(frozen=True)
class TuneOptions(ConfiguredRun):
    """Measures which mesh and attention method train a model fastest on this machine.

    Three ways to start:
      # all meshes and methods on 8 GPUs
      torchrun --nproc-per-node 8 -m armillary.plan.tune --recipe llama3_8b_128k
      # only two methods, and of these the candidates that the planner predicts to be fastest
      torchrun --nproc-per-node 8 -m armillary.plan.tune --attention usp upipe --cluster 8xh100
      # start the run with the chosen mesh and method
      torchrun --nproc-per-node 8 -m armillary.train --config tuned.toml

    Start it on as many ranks as the run will have, with the run's own flags. It tries all meshes of shard x ring x
    ulysses, keeps --parallel.replicate and --parallel.tp, and ignores the other flags of the mesh. With
    --data.documents it also tries the layouts zigzag, contiguous and balanced, on the documents of the first batch. For
    a hybrid it also tries zigzag and contiguous and, without tp, the run's layout with contiguous states.
    """

    out: Path = Path("tuned.toml")
    """TOML file to write, for armillary-train --config: the run with the fastest mesh and method."""
    iterations: Count = 3
    """Measured passes (forward and backward) of each candidate, after a warm-up pass."""
    attention: Several[str] = ()
    """Methods to measure, named as for --parallel.attention; by default all. usp is ulysses+ring."""
    cluster: str | None = None
    """A cluster's name, such as 8xh100, or a TOML file. Measures only candidates that the planner predicts to be
    fastest on it, of those that fit."""
    best: Count = 10
    """With --cluster: number of candidates to measure."""

    @property
    def measured_run(self) -> Config:
        """The run with default shard, ring, ulysses, method and log, on which measurements do not depend."""
        measured_settings = ("replicate", "tp", "kernel", "zero_stage", "compiler")
        parallel = ParallelConfig(**{name: getattr(self.run.parallel, name) for name in measured_settings})
        return replace(self.run, parallel=parallel, log=LogConfig())


@dataclass(frozen=True)
class Measurement:
    """Seconds of a candidate's forward and backward: median over passes on their slowest ranks; None if it failed."""

    candidate: Candidate
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a candidate on one rank: seconds of each pass, or the reason of its failure."""

    seconds: list[float] = field(default_factory=list[float])
    reason: str = ""
    # Communication failed, because another rank has failed or died.
    by_peers: bool = False


# Type of `measure`.
Measure = Callable[[Config, Candidate, torch.device, int, Ranks], list[float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-tune`. Exits with 2 for wrong arguments, or if no candidate could be run."""
    with exit_on_error(PROGRAM):
        tune(read_options(sys.argv[1:] if argv is None else argv))


def read_options(argv: Sequence[str]) -> TuneOptions:
    refuse_removed(argv, REMOVED)
    options, _ = read_run(argv, TuneOptions, PROGRAM)
    check_limits(options)
    parallel = options.run.parallel
    check_methods(options.attention)
    if options.out.is_dir() or options.out.suffix != ".toml":
        raise ValueError(f"--out {options.out}: must be a file that ends in .toml")
    if options.cluster is not None:
        cluster_of(options.cluster)
        if parallel.replicate * parallel.tp > 1:
            raise ValueError(
                f"--cluster {options.cluster} does not predict --parallel.replicate {parallel.replicate} x "
                f"--parallel.tp {parallel.tp}; leave out --cluster or these"
            )
    return options


# -- the candidates ----------------------------------------------------------------------------------------------------


def all_candidates(options: TuneOptions, ranks: int) -> list[Candidate]:
    """Returns all candidates on `ranks` ranks: meshes of shard x ring x ulysses. replicate and tp are the run's."""
    config = options.measured_run
    parallel = config.parallel
    other_ranks = parallel.replicate * parallel.tp
    if ranks % other_ranks:
        raise ValueError(
            f"--parallel.replicate {parallel.replicate} x --parallel.tp {parallel.tp} do not divide {ranks} ranks"
        )
    model = model_config(config.model, VOCABULARY, config.data.sequence_length)
    # Rows of a micro-batch on one of the `replicate` groups of ranks.
    rows = config.data.global_batch_size // (parallel.replicate * config.train.accumulation)
    # The run's own layout first, then others that may send less or balance the work better.
    layouts = tuple(dict.fromkeys((config.data.layout, *layouts_of(is_hybrid(model), config.data.documents))))
    relaid = is_hybrid(model) and parallel.tp == 1
    heads, ranks_left = model.heads // parallel.tp, ranks // other_ranks
    result = list(candidates(heads, ranks_left, rows, options.attention, layouts=layouts, relaid=relaid))
    if not result:
        raise ValueError(f"--attention {' '.join(options.attention)}: nothing to measure on {ranks} ranks; name others")
    return result


def candidates_to_measure(options: TuneOptions, ranks: int, dtype: torch.dtype) -> list[Candidate]:
    """Returns all candidates or, with `--cluster`, the `--best` that are predicted to be fastest of those that fit."""
    every = all_candidates(options, ranks)
    if options.cluster is None:
        return every
    config, cluster = options.measured_run, cluster_of(options.cluster)
    if cluster.ranks != ranks:
        raise ValueError(f"--cluster {options.cluster} has {cluster.ranks} ranks, and {ranks} are running")
    # The data may decide the vocabulary. Then predict with the small one of the measured model.
    model = model_config(config.model, config.model.vocab_size or VOCABULARY, config.data.sequence_length)
    room, seconds, fitting = Room.of(cluster), dict[Candidate, float](), list[Candidate]()
    for candidate in every:
        run = candidate.apply_to(config)
        job = job_of(run, candidate.mesh.axes, model, dtype)
        seconds[candidate] = time_of(run, job, cluster).seconds
        if room.share(estimate(job)) <= 1:
            fitting.append(candidate)
    # If none is predicted to fit, rank all as if they did: the prediction may be wrong.
    return sorted(fitting or every, key=lambda candidate: seconds[candidate])[: options.best]


# -- one candidate -----------------------------------------------------------------------------------------------------


def measure(config: Config, candidate: Candidate, device: torch.device, iterations: int, ranks: Ranks) -> list[float]:
    """Returns this rank's seconds of `iterations` passes after a warm-up. Every rank must call it.

    Raises on every rank if a rank cannot build the block.
    """
    passes = list[Callable[[], None]]()
    # The pass itself communicates: a rank without its block would leave its peers waiting for the time-out.
    ranks.on_all(lambda: passes.append(build_pass(config, candidate, device)))
    (run_pass,) = passes
    run_pass()  # the warm-up: allocates, compiles and opens connections
    seconds = list[float]()
    for _ in range(iterations):
        dist.barrier()  # all ranks start together
        synchronize(device)
        start = time.perf_counter()
        run_pass()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def build_pass(config: Config, candidate: Candidate, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs forward and backward of one block; for a hybrid, of one period of its blocks.

    Every rank must call it, and every rank raises ValueError if the model, the rows or the length do not allow the
    candidate.
    """
    # 1. The mesh and the method of the candidate.
    config = candidate.apply_to(config)
    check_config(config)
    axes, dtype = choose_axes(config, world_size()), precision(config, device)
    mesh = mesh_of(config, device, axes)
    # 2. The model: one block, or for a hybrid one period of the blocks that it repeats.
    block = model_config(config.model, VOCABULARY, config.data.sequence_length)
    block = replace(block, layers=len(block.mixers)) if is_hybrid(block) else one_block(block)
    block = replace(block, vocab_size=VOCABULARY)
    model, attention = shard_model(block, config, mesh, dtype)
    attention.kernel = kernel_with_sm_margin(config, block, dtype, device, axes["ring"])
    # 3. Random tokens. With documents, the layout and the mask are those of the run's first batch.
    states = is_hybrid(block) and not config.parallel.contiguous_states
    layout, mask = attention.layout(config.data.sequence_length, config.data.layout, states=states), AttentionMask()
    if config.data.documents:
        replica = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
        stores = open_stores(config.data, config.model.pretrained)
        batch = load_rows(config, stores, attention, replica)[0].batch(0)
        layout, mask = batch.layout, batch_mask(batch.documents, batch.parents, config.data.documents)
    model.to_empty(device="cpu" if config.optimizer.cpu_offload else device)
    initialize(model, config.train.seed)
    positions = layout.positions(attention.shard).to(device)
    tokens = torch.randint(VOCABULARY, (config.rows_per_batch, len(positions)), device=device)
    # All labels take the same time, so shifted tokens are good enough.
    head = partial(linear_token_loss, labels=tokens.roll(1, dims=1))

    def run_pass() -> None:
        total, count = model(tokens, positions=positions, mask=mask, layout=layout, head=head)
        (total / count).backward()
        model.zero_grad()

    return run_pass


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- all candidates ----------------------------------------------------------------------------------------------------


def tune(options: TuneOptions, measure: Measure = measure) -> list[Measurement]:
    """Measures the candidates, prints the result and writes the fastest. Returns all measurements, fastest first.

    Every rank must call it; all return the same. Raises ValueError on every rank if no candidate could be run.
    """
    config, measurements = options.measured_run, list[Measurement]()
    with ExitStack() as stack:
        # 1. The candidates, in a process group whose store outlives it: the watchdog and `exchange` use the store.
        with new_group(config) as (device, ranks):
            watchdog = stack.enter_context(watchdog_of(config))
            flags = {f"--{name}": getattr(options, name) for name in ("iterations", "attention", "cluster", "best")}
            check_consistent("the configuration", by_flag(config) | flags)
            dtype = precision(config, device)
            selected = ranks.on_first(lambda: candidates_to_measure(options, world_size(), dtype))
            run_id = ranks.on_first(time.time_ns)  # a caller's store may have the outcomes of an earlier run
            store = dist.PrefixStore(f"armillary/tune/{run_id}", compat.default_store())
            # A rank that fails waits until its peers have noticed, which may take the time-out of a collective.
            store.set_timeout(2 * collective_timeout(config))
        # 2. Measure each in a process group of its own, so that communicators do not accumulate.
        bar = stack.enter_context(Bar("tuning", quiet=ranks.rank > 0))
        for number, candidate in enumerate(selected):
            bar.show(f"measuring {candidate}", number, len(selected))
            watchdog.start_phase("measuring", number + 1)
            with new_group(config) as (device, ranks):
                outcome = attempt(partial(measure, config, candidate, device, options.iterations, ranks), ranks, device)
            # Outside of the group, which a failed rank has left, so that its peers fail too and come here.
            outcomes = exchange(outcome, store, number, ranks)
            measurements.append(combined(candidate, outcomes))
        # 3. The fastest. Rank 0 prints and writes.
        watchdog.start_phase("writing", len(selected))
        measurements.sort(key=lambda each: (each.seconds is None, each.seconds))
        with new_group(config) as (_, ranks):
            ranks.on_first(lambda: report(options, measurements, ranks.size))
    return measurements


@contextmanager
def new_group(config: Config) -> Generator[tuple[torch.device, Ranks]]:
    """Context manager with a new default process group. Yields this rank's device, and `Ranks` of the group."""
    hook = sys.excepthook  # starting a group wraps the hook, so restore it at the end
    with process_group(config) as device:
        ranks = Ranks(collective_timeout(config))
        yield device, ranks
        ranks.close()
    sys.excepthook = hook


def attempt(passes: Callable[[], list[float]], ranks: Ranks, device: torch.device) -> Outcome:
    """Runs the passes of a candidate. Returns their seconds or, if an error ends them, its first line."""
    try:
        seconds = passes()
        ranks.on_all(lambda: None)  # no rank leaves the group while another still uses it
        outcome = Outcome(seconds)
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        outcome = Outcome(reason=reason, by_peers=caused_by_peers(error))
    # The error's frames are gone here, so this frees the candidate's tensors and connections.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return outcome


def exchange(outcome: Outcome, store: dist.Store, number: int, ranks: Ranks) -> list[Outcome]:
    """Returns the outcomes of candidate `number` on all ranks. Needs no process group, only the store."""
    store.set(f"{number}/{ranks.rank}", json.dumps(asdict(outcome)))
    return [Outcome(**json.loads(store.get(f"{number}/{rank}"))) for rank in range(ranks.size)]


def combined(candidate: Candidate, outcomes: Sequence[Outcome]) -> Measurement:
    """Returns the measurement of a candidate from the outcomes of all ranks. It failed if it failed on any rank."""
    failed = [outcome for outcome in outcomes if outcome.reason]
    if failed:
        # Ranks whose communication failed name only the consequence, if another rank names the cause.
        causes = [outcome for outcome in failed if not outcome.by_peers] or failed
        return Measurement(candidate, None, "; ".join(dict.fromkeys(outcome.reason for outcome in causes)))
    passes = zip(*(outcome.seconds for outcome in outcomes), strict=True)
    return Measurement(candidate, median(map(max, passes)))


def report(options: TuneOptions, measurements: Sequence[Measurement], ranks: int) -> None:
    """Prints all measurements, which are sorted, and writes the configuration of the run with the fastest candidate."""
    best = measurements[0]
    if best.seconds is None:
        raise ValueError(
            f"none of {len(measurements)} candidates could be run; the first, {best.candidate}: {best.reason}"
        )
    times = ["" if each.seconds is None else duration(each.seconds) for each in measurements]
    print_table(COLUMNS, [(str(m.candidate), text, m.reason) for m, text in zip(measurements, times, strict=True)])
    comment = f"{best.candidate}, measured by armillary-tune to be fastest on {ranks} ranks"
    write_toml(options.out, options.recipe or "debug", best.candidate.apply_to(options.run), comment)
    print_lines("", f"chosen: {best.candidate}; train with --config {options.out}")


if __name__ == "__main__":
    record(main)()  # writes an exception to the file in which torchrun looks for the cause of a failure
