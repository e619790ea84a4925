"""A first run."""

from __future__ import annotations

from armillary.train.config.sections import Config


def debug() -> Config:
    """0.8 million parameters on Python's own text: any number of CPU ranks, two minutes, loss 5.6 -> 2.9."""
    return Config()
