"""What of a run's settings stands in its checkpoints, so that a run that goes on can say what has changed."""

from __future__ import annotations

from collections.abc import Mapping

from armillary.train.config.overlay import aligned, flag, flat, shown
from armillary.train.parallel import choose_axes
from armillary.train.run import Run

ELSEWHERE = ("train.output",)
"""Places, which change nothing."""


def settings(run: Run, ranks: int) -> dict[str, str]:
    """By their flags, as they are shown; what is chosen by default as it was chosen."""
    given = {flag(name): shown(value) for name, value in flat(run.config) if name not in ELSEWHERE}
    axes = {f"parallel.{axis}": str(size) for axis, size in choose_axes(run.config, ranks).items()}
    return given | axes | {"train.device": run.device.type, "ranks": str(ranks)}


def changed_settings(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Aligned lines such as "optimizer.lr  0.003 -> 0.001", of what both know."""
    both = [(name, before[name], after[name]) for name in after if name in before]
    return aligned([(name, old, new) for name, old, new in both if old != new])
