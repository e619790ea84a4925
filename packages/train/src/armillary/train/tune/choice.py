"""The trainer's side: a configuration with the mesh and the attention method that a file of the tuner chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.train.config import Config, ParallelConfig
from armillary.train.overlay import flag, shown
from armillary.train.tune.question import FIXED, difference, question_of

if TYPE_CHECKING:
    from armillary.plan.tune.file import Tuned

NAMES = (*FIXED, "shard", "ring", "ulysses", "attention", "heads_per_stage", "team", "placement")
"""Fields of `ParallelConfig` that are chosen."""


def with_choice(config: Config, ranks: int, precision: str) -> Config:
    """The configuration with the choice of the file that it names, written out and the name taken away; itself where it
    names none.

    Raises:
        ValueError: the file cannot be read, is not complete, was made for something else, or has another axis or
            another method than one that is asked for beside it.
    """
    path = config.parallel.tuned
    if path is None:
        return config
    tuned = finished(path)
    if (found := difference(tuned.question, question_of(config, ranks, precision), leaving="parallel.")) is not None:
        raise ValueError(f"--parallel.tuned {path}: was measured with {found}; tune for this, or leave it out")
    plain, taken = ParallelConfig(), choice(tuned)
    asked = {name: value for name in taken if (value := getattr(config.parallel, name)) != getattr(plain, name)}
    refuse_others(asked, taken, path)
    return replace(config, parallel=replace(config.parallel, tuned=None, **taken))


def chosen(parallel: ParallelConfig, path: Path) -> ParallelConfig:
    """With the choice of a file, whatever was there before.

    Raises:
        ValueError: the file cannot be read, or is not complete.
    """
    return replace(parallel, **choice(finished(path)))


def check_typed(typed: ParallelConfig, taken: ParallelConfig, path: Path) -> None:
    """Refuses flags, typed over what was taken from a file, that say something else."""
    refuse_others({name: getattr(typed, name) for name in NAMES}, {name: getattr(taken, name) for name in NAMES}, path)


def refuse_others(asked: dict[str, Any], taken: dict[str, Any], path: Path) -> None:
    """Refuses what is asked for and is not what is taken from a file."""
    for name, value in asked.items():
        if value != taken[name]:
            raise ValueError(
                f"--parallel.{flag(name)} {shown(value)}: --parallel.tuned {path} has chosen {shown(taken[name])}; "
                "leave out one of them"
            )


def finished(path: Path) -> Tuned:
    """The file, which must have a choice."""
    from armillary.plan.tune.file import read  # not in every run: it takes the planner along

    tuned = read(path, f"--parallel.tuned {path}")
    if not tuned.complete:
        left = f"{tuned.left} candidates are left to measure" if tuned.left else "the nearest are left to compare"
        raise ValueError(
            f"--parallel.tuned {path}: {left}; start armillary-tune as before, with --out {path}, and it goes on"
        )
    if tuned.choice is None:
        raise ValueError(f"--parallel.tuned {path}: none of its candidates could be run; its reasons tell why")
    return tuned


def choice(tuned: Tuned) -> dict[str, Any]:
    """What a finished file chose, as fields of `ParallelConfig`."""
    assert tuned.choice is not None
    return {**{name: tuned.question[f"parallel.{name}"] for name in FIXED}, **tuned.choice.parallel}
