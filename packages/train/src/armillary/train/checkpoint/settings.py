"""The configuration in a checkpoint, so that a resumed run can print what has changed."""

from __future__ import annotations

from collections.abc import Mapping

from armillary.train.config.overlay import aligned, flag, flat, shown
from armillary.train.parallel import choose_axes
from armillary.train.run import Run

ELSEWHERE = ("train.output",)
"""Paths, which do not change training."""


def settings(run: Run, ranks: int) -> dict[str, str]:
    """Values by flag, as they are printed; defaults as they were resolved."""
    given = {flag(name): shown(value) for name, value in flat(run.config) if name not in ELSEWHERE}
    axes = {f"parallel.{axis}": str(size) for axis, size in choose_axes(run.config, ranks).items()}
    return given | axes | {"train.device": run.device.type, "ranks": str(ranks)}


def changed_settings(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Aligned lines such as "optimizer.lr  0.003 -> 0.001", of keys that both have."""
    both = [(name, before[name], after[name]) for name in after if name in before]
    return aligned([(name, old, new) for name, old, new in both if old != new])
