"""The configuration in a checkpoint, from which a resumed run prints what has changed."""

from __future__ import annotations

from collections.abc import Mapping

from armillary.data.console import one_line
from armillary.train.config.overlay import align_columns, flag, flag_text, flat
from armillary.train.parallel import choose_axes
from armillary.train.run import Run

NOT_SAVED = ("train.output",)
"""Fields that are not among the saved settings: the output folder may be moved between runs."""


def settings(run: Run, ranks: int) -> dict[str, str]:
    """Returns the fields of a run's configuration as texts, by flag without the leading dashes.

    Mesh axes and device are the actual ones, also if the configuration leaves the choice open. `ranks` is added.
    """
    flags = {flag(name): flag_text(value) for name, value in flat(run.config) if name not in NOT_SAVED}
    axes = {f"parallel.{axis}": str(size) for axis, size in choose_axes(run.config, ranks).items()}
    return flags | axes | {"train.device": run.device.type, "ranks": str(ranks)}


def changed_settings(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns aligned lines such as "optimizer.lr  0.003 -> 0.001". A setting in only one of the two is left out."""
    names = [name for name in after if before.get(name, after[name]) != after[name]]
    return align_columns([(name, one_line(before[name]), after[name]) for name in names])
