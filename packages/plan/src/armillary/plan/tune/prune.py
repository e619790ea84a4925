"""Selects the tuner's candidates: all, or without those that the planner predicts to be slow or not to fit."""

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
from armillary.plan.tune.command import TuneOptions
from armillary.plan.tune.measurements import Measurement
from armillary.train.config import model_config


@dataclass(frozen=True)
class CandidatePrediction:
    """Predicted seconds of a step.

    Args:
        missing: text with needed and available memory, if the step does not fit; else None.
    """

    candidate: Candidate
    seconds: float
    missing: str | None = None


def all_candidates(options: TuneOptions, ranks: int) -> list[Candidate]:
    """Returns all candidates on `ranks` ranks. Their meshes are shard x ring x ulysses; replicate and tp are the run's.

    Raises:
        ValueError: replicate x tp does not divide the ranks, or there are no candidates.
    """
    config = options.measured_run
    parallel = config.parallel
    other_ranks = parallel.replicate * parallel.tp
    if ranks % other_ranks:
        raise ValueError(
            f"--parallel.replicate {parallel.replicate} x --parallel.tp {parallel.tp} do not divide {ranks} ranks"
        )
    model = model_config(config.model, VOCABULARY, config.data.sequence_length)
    heads = model.heads // parallel.tp
    # Rows of a micro-batch on one of the `replicate` groups of ranks.
    rows = config.data.global_batch_size // (parallel.replicate * config.train.accumulation)
    # The run's own layout first, then others that may send less or balance the work better.
    layouts = tuple(dict.fromkeys((config.data.layout, *layouts_of(is_hybrid(model), config.data.documents))))
    relaid = is_hybrid(model) and parallel.tp == 1
    result = list(candidates(heads, ranks // other_ranks, rows, options.attention, layouts=layouts, relaid=relaid))
    if not result:
        raise ValueError(f"--attention {' '.join(options.attention)}: nothing to measure on {ranks} ranks; name others")
    return result


def prune(
    options: TuneOptions, ranks: int, precision: torch.dtype, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Measurement]]:
    """Returns (candidates to measure, excluded candidates with reasons). Excludes none without `--cluster`.

    Raises:
        ValueError: an unknown cluster, or one with another number of ranks.
    """
    if options.cluster is None:
        return list(candidates), []
    predict = predictor(options, ranks, precision)
    return partition([predict(candidate) for candidate in candidates], options.slower)


def partition(predictions: Sequence[CandidatePrediction], slower: float) -> tuple[list[Candidate], list[Measurement]]:
    """Returns (candidates to measure, fastest first; excluded candidates with reasons).

    Excludes candidates that do not fit, or take more than `slower` times as long as the fastest that fits. If none
    fits, compares all as if they did, because the formulas may be wrong.
    """
    fitting = [prediction for prediction in predictions if prediction.missing is None] or list(predictions)
    fastest = min(prediction.seconds for prediction in fitting)
    selected = sorted(
        (prediction for prediction in fitting if prediction.seconds <= slower * fastest),
        key=lambda prediction: prediction.seconds,
    )
    excluded = list[Measurement]()
    for prediction in predictions:
        if prediction not in selected:
            reason = f"predicted not to fit: {prediction.missing}"
            if prediction.missing is None:
                reason = f"predicted to take {prediction.seconds / fastest:.2f} times as long as the fastest"
            excluded.append(Measurement(prediction.candidate, reason=reason))
    return [prediction.candidate for prediction in selected], excluded


def predictor(options: TuneOptions, ranks: int, precision: torch.dtype) -> Callable[[Candidate], CandidatePrediction]:
    """Returns a function that predicts time and memory of a candidate, for the run's model on `--cluster`.

    Raises:
        ValueError: an unknown cluster, or one with another number of ranks.
    """
    config, cluster = options.measured_run, cluster_of(options.cluster or "")
    if cluster.ranks != ranks:
        raise ValueError(f"--cluster {options.cluster} has {cluster.ranks} ranks, and {ranks} are running")
    room = Room.of(cluster)
    # The data may decide the vocabulary. Then predict with the tuner's small one.
    model = model_config(config.model, config.model.vocab_size or VOCABULARY, config.data.sequence_length)

    def predict(candidate: Candidate) -> CandidatePrediction:
        run = candidate.apply_to(config)
        job = job_of(run, candidate.mesh.axes, model, precision)
        memory = estimate(job)
        missing_text = room.comparison(memory) if room.share(memory) > 1 else None
        return CandidatePrediction(candidate, time_of(run, job, cluster).seconds, missing_text)

    return predict
