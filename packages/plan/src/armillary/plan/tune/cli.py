"""The command line: `torchrun -m armillary.plan.tune`, or `armillary-tune` on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from armillary.core.commands import ending
from armillary.plan.tune.command import PROGRAM, read_order
from armillary.plan.tune.tuner import tune


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and tunes.

    Exit codes: 0 a choice stands in the file; 1 failed on the way, and the same command goes on; 2 cannot be started,
    or nothing could be run, with one line that says why.
    """
    with ending(PROGRAM):
        tune(read_order(sys.argv[1:] if argv is None else argv))
