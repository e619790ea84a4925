"""Selects the tuner's candidates: leaves out those that the planner predicts to be slow or not to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from armillary.plan.dry_run import job_of, time_of
from armillary.plan.memory.estimate import estimate
from armillary.plan.memory.room import Room
from armillary.plan.presets import cluster_of, is_hybrid
from armillary.plan.search.candidates import Candidate, candidates, layouts_of
from armillary.plan.tune.bench import VOCABULARY
from armillary.plan.tune.command import TunePlan
from armillary.plan.tune.measurements import Measurement
from armillary.train.config.model_sizes import model_config


@dataclass(frozen=True)
class CandidatePrediction:
    """Predicted seconds of a step; `missing` compares needed and available memory if it does not fit."""

    candidate: Candidate
    seconds: float
    missing: str | None = None


def all_candidates(plan: TunePlan, ranks: int) -> list[Candidate]:
    """Returns all candidates on `ranks` ranks, with the run's replicate and tp.

    Raises:
        ValueError: there are no candidates.
    """
    config = plan.measured_run
    parallel = config.parallel
    other_ranks = parallel.replicate * parallel.tp
    if ranks % other_ranks:
        raise ValueError(
            f"--parallel.replicate {parallel.replicate} x --parallel.tp {parallel.tp} do not divide {ranks} ranks"
        )
    model = model_config(config.model, VOCABULARY, config.data.sequence_length)
    heads = model.heads // parallel.tp
    rows = config.data.global_batch_size // (parallel.replicate * config.train.accumulation)  # of a micro-batch
    # The run's own layout, and others that may send less or balance better.
    layouts = tuple(dict.fromkeys((config.data.layout, *layouts_of(is_hybrid(model), config.data.documents))))
    relaid = is_hybrid(model) and parallel.tp == 1
    every = list(candidates(heads, ranks // other_ranks, rows, plan.attention, layouts=layouts, relaid=relaid))
    if not every:
        raise ValueError(f"--attention {' '.join(plan.attention)}: nothing to measure on {ranks} ranks; name others")
    return every


def prune(
    plan: TunePlan, ranks: int, precision: torch.dtype, every: Sequence[Candidate]
) -> tuple[list[Candidate], list[Measurement]]:
    """Returns (candidates to measure, excluded ones with reasons), by prediction; all of them without a cluster.

    Raises:
        ValueError: an unknown cluster, or one with another number of ranks.
    """
    if plan.cluster is None:
        return list(every), []
    predict = predictor(plan, ranks, precision)
    return partition([predict(candidate) for candidate in every], plan.slower)


def partition(predictions: Sequence[CandidatePrediction], slower: float) -> tuple[list[Candidate], list[Measurement]]:
    """Returns (candidates to measure, fastest first; excluded ones with reasons).

    Excludes candidates that do not fit, or take more than `slower` times as long as the fastest. If nothing fits, all
    are measured, because the formulas may be wrong.
    """
    fitting_predictions = [prediction for prediction in predictions if prediction.missing is None] or list(predictions)
    fastest = min(prediction.seconds for prediction in fitting_predictions)
    selected_predictions = sorted(
        (prediction for prediction in fitting_predictions if prediction.seconds <= slower * fastest),
        key=lambda each: each.seconds,
    )
    excluded_measurements = list[Measurement]()
    for prediction in predictions:
        if prediction not in selected_predictions:
            reason = f"predicted not to fit: {prediction.missing}"
            if prediction.missing is None:
                reason = f"predicted to take {prediction.seconds / fastest:.2f} times as long as the fastest"
            excluded_measurements.append(Measurement(prediction.candidate, reason=reason))
    return [prediction.candidate for prediction in selected_predictions], excluded_measurements


def predictor(plan: TunePlan, ranks: int, precision: torch.dtype) -> Callable[[Candidate], CandidatePrediction]:
    """Returns a function that predicts time and memory of a candidate, for the plan's model and cluster."""
    config, cluster = plan.measured_run, cluster_of(plan.cluster or "")
    if cluster.ranks != ranks:
        raise ValueError(f"--cluster {plan.cluster} has {cluster.ranks} ranks, and {ranks} are running")
    room = Room.of(cluster)
    # Without a known vocabulary, embedding and head are as small as the tuner's.
    model = model_config(config.model, config.model.vocab_size or VOCABULARY, config.data.sequence_length)

    def predict(candidate: Candidate) -> CandidatePrediction:
        run = candidate.apply_to(config)
        job = job_of(run, candidate.mesh.axes, model, precision)
        memory = estimate(job)
        missing_text = room.comparison(memory) if room.share(memory) > 1 else None
        return CandidatePrediction(candidate, time_of(run, job, cluster).seconds, missing_text)

    return predict
