"""The command line: `torchrun -m armillary.plan.tune`, or `armillary-tune` on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from armillary.core.commands import ending
from armillary.plan.tune.command import PROGRAM, read_order
from armillary.plan.tune.tuner import tune


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and tunes.

    Exit codes: 0 the choice is written; 1 failed while measuring, and the same command resumes; 2 refused to start, or
    no candidate could be run, with one line that says why.
    """
    with ending(PROGRAM):
        tune(read_order(sys.argv[1:] if argv is None else argv))
