"""Candidates, and which of them the planner predicts to be fast enough to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from armillary.core.quantity import quantity
from armillary.plan.comm_time.step_time import step_time
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import estimate
from armillary.plan.memory.room import HOST_RESERVE, RESERVE, Room, missing
from armillary.plan.presets import cluster_of
from armillary.plan.search.candidates import Candidate, candidates, is_one_of
from armillary.plan.search.search import passes_of
from armillary.plan.tune.bench import VOCABULARY
from armillary.plan.tune.command import Order
from armillary.plan.tune.measurements import Measured
from armillary.train.config import Config
from armillary.train.model import model_config


@dataclass(frozen=True)
class CandidatePrediction:
    """The planner's prediction for a candidate: seconds of a step, and what is missing where it does not fit."""

    candidate: Candidate
    seconds: float
    missing: str | None = None


def all_candidates(order: Order, ranks: int) -> list[Candidate]:
    """All candidates for so many ranks.

    Raises:
        ValueError: there are none.
    """
    config = order.measured_run
    fixed = config.parallel.replicate * config.parallel.tp
    heads = model_config(config.model, VOCABULARY, config.data.sequence_length).heads // config.parallel.tp
    rows = config.data.global_batch_size // (config.parallel.replicate * config.train.accumulation)
    if ranks % fixed:
        raise ValueError(
            f"--parallel.replicate {config.parallel.replicate} x --parallel.tp {config.parallel.tp} do not divide "
            f"{ranks} ranks"
        )
    found = [each for each in candidates(heads, ranks // fixed, rows) if is_one_of(each.attention, order.attention)]
    if not found:
        raise ValueError(f"--attention {' '.join(order.attention)}: nothing to measure on {ranks} ranks; name others")
    return found


def pruned(
    order: Order, ranks: int, precision: torch.dtype, every: Sequence[Candidate]
) -> tuple[list[Candidate], list[Measured]]:
    """(candidates to measure, the fastest by prediction first; those left out, with reasons). Without a cluster all are
    to be measured.

    Raises:
        ValueError: no such cluster, or one of other ranks.
    """
    if order.cluster is None:
        return list(every), []
    predict = predictor(order, ranks, precision)
    return parted([predict(candidate) for candidate in every], order.slower)


def parted(predictions: Sequence[CandidatePrediction], slower: float) -> tuple[list[Candidate], list[Measured]]:
    """What to measure, and what not because it does not fit or takes more than `slower` times as long as the fastest.

    Where nothing fits by prediction, all are to be measured: the formulas may be wrong, and the device will tell.
    """
    fitting = [each for each in predictions if each.missing is None] or list(predictions)
    least = min(each.seconds for each in fitting)
    kept = sorted((each for each in fitting if each.seconds <= slower * least), key=lambda each: each.seconds)
    reasons = {
        each.candidate: f"predicted not to fit: {each.missing}"
        if each.missing is not None
        else f"predicted to take {each.seconds / least:.2f} times as long as the fastest"
        for each in predictions
        if each not in kept
    }
    return [each.candidate for each in kept], [Measured(each, reason=reason) for each, reason in reasons.items()]


def predictor(order: Order, ranks: int, precision: torch.dtype) -> Callable[[Candidate], CandidatePrediction]:
    """The planner, asked about the order's model on its cluster."""
    config, cluster = order.measured_run, cluster_of(order.cluster or "")
    if cluster.ranks != ranks:
        raise ValueError(f"--cluster {order.cluster} has {cluster.ranks} ranks, and {ranks} are running")
    room = Room.of(cluster, quantity(RESERVE), quantity(HOST_RESERVE))
    job = job_of(config, precision)

    def predict(candidate: Candidate) -> CandidatePrediction:
        mesh, attention = candidate.mesh, candidate.attention
        mine = replace(job, axes=mesh.axes, attention=attention, rows=job.rows // mesh.shard)
        passes = passes_of(candidate, job.model, cluster, job.length, job.rows, config.parallel.kernel)
        memory, taken = estimate(mine), step_time(mine, passes, cluster)
        return CandidatePrediction(candidate, taken.seconds, missing(memory, room) if room.share(memory) > 1 else None)

    return predict


def job_of(config: Config, precision: torch.dtype) -> Job:
    """The step on one rank, with all rows."""
    sizes = model_config(config.model, config.model.vocab_size or VOCABULARY, config.data.sequence_length)
    return Job(
        model=sizes,
        axes={},
        attention=lambda mesh: NotImplemented,
        length=config.data.sequence_length,
        rows=config.data.global_batch_size // config.train.accumulation,
        checkpointing=config.checkpointing,
        on_host=config.optimizer.cpu_offload,
        precision=precision,
    )
