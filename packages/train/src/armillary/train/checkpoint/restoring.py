"""Resuming from the newest complete checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from armillary.train.checkpoint.manifest import Manifest, fault, is_copy
from armillary.train.checkpoint.settings import changed_settings, settings
from armillary.train.checkpoint.state import check_model, load_state, shapes_of, training_state
from armillary.train.run import Run
from armillary.train.runtime.checkpoint.folder import CheckpointFolder
from armillary.train.runtime.checkpoint.metadata import Damaged, check_files, read_metadata
from armillary.train.runtime.health.ranks import Ranks


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, None if there is none at all, and what is wrong with newer ones, by step."""

    step: int | None = None
    damage: dict[int, str] = field(default_factory=dict[int, str])


def restore(run: Run, folder: CheckpointFolder, ranks: Ranks, say: Callable[[str], None]) -> Manifest | None:
    """Restores the newest complete checkpoint; None: there is none. Collective.

    Damaged ones are reported and renamed.

    Raises:
        ValueError: none of them is whole, or the newest that is was made by another model or with other rows. Nothing
            has been changed then, neither on disk nor in the model. On every rank.
    """
    ranks.on_first(folder.clear)
    found = newest_whole(folder, ranks, "; name another --train.output to start anew")
    if found.step is None:
        return None
    place = folder.place(found.step)
    manifest = Manifest.read(place)
    shapes = shapes_of(training_state(run))
    ranks.on_first(lambda: check_model(run, place, manifest, shapes))
    try:
        run.training.load_state_dict(manifest.loader)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; name another --train.output, or the data that it was made with") from error
    for step, what in found.damage.items():
        kept = ranks.on_first(lambda step=step: folder.set_aside(step, is_copy(folder, step)))
        say(f"step-{step}: {what}; kept as {kept}, resuming from step-{found.step}")
    try:
        load_state(run, place, manifest, ranks)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; move it to another folder to resume without it") from error
    say("\n  ".join([f"resuming from {place}", *changed_settings(manifest.settings, settings(run, ranks.size))]))
    return manifest


def newest_whole(folder: CheckpointFolder, ranks: Ranks, advice: str = "") -> Found:
    """Verifies checkpoints from the newest on, each rank its share of the files. Collective.

    Args:
        advice: the end of the message where none is whole.

    Raises:
        ValueError: there are some, and none is whole; or one has a newer format, or may not be read.
    """
    damage: dict[int, str] = {}
    for step in reversed(ranks.on_first(folder.steps)):
        faults = ranks.agree(lambda step=step: fault_of(folder, step, ranks))
        found = next(filter(None, faults), None)
        if found is None:
            return Found(step, damage)
        damage[step] = found
    if damage:
        named = "; ".join(f"step-{step}: {what}" for step, what in damage.items())
        raise ValueError(f"no checkpoint in {folder.path} is whole ({named}){advice}")
    return Found()


def fault_of(folder: CheckpointFolder, step: int, ranks: Ranks) -> str | None:
    """What is wrong with this rank's share of the files, the first rank's with DCP's metadata among it."""
    found = fault(folder, step, ranks.rank, ranks.size)
    if found is not None or ranks.rank:
        return found
    try:
        check_files(folder.place(step), read_metadata(folder.place(step)))
    except Damaged as damage:
        return str(damage)
    return None
