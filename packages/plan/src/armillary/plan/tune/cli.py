"""The command line: `torchrun -m armillary.plan.tune`, or `armillary-tune` on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from armillary.data.console import exit_on_error
from armillary.plan.tune.command import PROGRAM, read_options
from armillary.plan.tune.tuner import tune


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and tunes.

    Exit codes: 0: the choice is written. 1: an error stopped the measurements; the same command resumes them. 2: wrong
    arguments, or no candidate could be run; prints the reason in one line.
    """
    with exit_on_error(PROGRAM):
        tune(read_options(sys.argv[1:] if argv is None else argv))
