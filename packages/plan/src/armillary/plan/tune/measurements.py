"""The tuner's JSON file: measurements, the choice, and the settings for which both are valid (the cache key)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from armillary.core.parts import read_file, write_whole
from armillary.models import GPTConfig, LlamaConfig
from armillary.plan.search.candidates import Candidate
from armillary.train import Config
from armillary.train.config import SIZES, flag, flag_text, model_config

CacheKey = dict[str, Any]
"""Values of settings by "section.key", and of "ranks". Measurements are reused only if all are equal."""


def cache_key(config: Config, ranks: int, precision: torch.dtype) -> CacheKey:
    """Returns the cache key of a configuration on `ranks` ranks.

    The key identifies a model by its sizes, whether these come from flags or from a pretrained folder.

    Raises:
        ValueError: the sizes are those of no valid model.
    """
    # Measurements use a small vocabulary of their own, so the key is independent of the run's.
    model = model_config(config.model, 1, config.data.sequence_length)
    hybrid = {}
    if isinstance(model, LlamaConfig) and model.states is not None:
        hybrid = {"model.mixers": list(model.mixers), "model.states": asdict(model.states)}
    return {
        "ranks": ranks,
        "parallel.replicate": config.parallel.replicate,
        "parallel.tp": config.parallel.tp,
        "parallel.kernel": config.parallel.kernel,
        "parallel.zero_stage": config.parallel.zero_stage,
        "parallel.compiler": config.parallel.compiler,
        "model.family": "gpt" if isinstance(model, GPTConfig) else "llama",
        **{f"model.{name}": getattr(model, name) for name in SIZES if name != "mixers" and hasattr(model, name)},
        **hybrid,
        "data.sequence_length": config.data.sequence_length,
        "data.global_batch_size": config.data.global_batch_size,
        "data.layout": config.data.layout,
        **({"data.documents": True, "data.path": list(map(str, config.data.path))} if config.data.documents else {}),
        "optimizer.cpu_offload": config.optimizer.cpu_offload,
        "train.accumulation": config.train.accumulation,
        "train.precision": str(precision).removeprefix("torch."),
        **{f"checkpointing.{name}": value for name, value in asdict(config.checkpointing).items()},
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Returns the first difference between two keys, such as "--data.layout zigzag instead of striped"."""
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            setting = "ranks" if name == "ranks" else f"--{flag(name)}"
            return f"{setting} {flag_text(old.get(name))} instead of {flag_text(new.get(name))}"
    return None


@dataclass(frozen=True)
class Measurement:
    """Result for a candidate: the time of a pass on the slowest rank.

    A pass is forward and backward of one block, or for a hybrid of one period of blocks.

    Args:
        seconds: median over passes; None if the candidate was not measured.
        fastest_pass: seconds of the fastest pass. Far below the median if other processes used the machine.
        paired_seconds: for finalists, the median when passes alternate with those of the other finalists.
        memory: peak bytes of a device, on the rank that needed the most; None on the CPU.
        reason: the reason why the candidate was not measured.
    """

    candidate: Candidate
    seconds: float | None = None
    fastest_pass: float | None = None
    paired_seconds: float | None = None
    memory: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class TunerState:
    """Contents of the file.

    Args:
        settings: cache key of the measurements.
        complete: True once all candidates are measured and the choice is made.
        remaining: number of candidates that are not measured yet.
        choice: the fastest candidate; None before the end, and if no candidate could be measured.
        measurements: results of candidates that were measured or failed.
        excluded: candidates that are not measured, because the planner predicts them to be slow or not to fit.
        attempts: for candidates that were started and have no result, the number of starts, by the candidate's name.
    """

    settings: CacheKey
    complete: bool = False
    remaining: int = 0
    choice: Candidate | None = None
    measurements: tuple[Measurement, ...] = ()
    excluded: tuple[Measurement, ...] = ()
    attempts: dict[str, int] = field(default_factory=dict[str, int])

    def has(self, candidate: Candidate) -> bool:
        """True if the candidate has a result: it was measured, or failed."""
        return any(measurement.candidate == candidate for measurement in self.measurements)

    @property
    def fastest_first(self) -> list[Measurement]:
        """Measurements that did not fail, the fastest first."""
        return sorted(
            (measurement for measurement in self.measurements if measurement.seconds is not None),
            key=lambda measurement: measurement.seconds or 0.0,
        )


def load(path: Path, settings: CacheKey) -> TunerState:
    """Returns the state in the file, or an empty state if there is no file.

    Raises:
        ValueError: the file cannot be read, is not of the tuner, or has measurements with other settings.
    """
    if not path.exists():
        return TunerState(settings)
    try:
        state = TypeAdapter(TunerState).validate_json(read_file(path))
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        detail = error.errors()[0]
        problem = ": ".join([*([".".join(map(str, detail["loc"]))] if detail["loc"] else []), detail["msg"]])
        raise ValueError(
            f"--out {path}: is no file of armillary-tune ({problem}); name another file, or remove this one"
        ) from error
    if (change := difference(state.settings, settings)) is not None:
        raise ValueError(f"--out {path}: was measured with {change}; name another file, or remove this one")
    return state


def save(path: Path, state: TunerState) -> None:
    """Replaces the file atomically.

    Raises:
        ValueError: the file cannot be written.
    """
    text = json.dumps(asdict(state), indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: partial.write_text(text))
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error
