"""The command line: `torchrun -m armillary.train`, or `armillary-train` on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from armillary.data.console import FAILED, exit_on_error
from armillary.train.command import PROGRAM, read_command

if TYPE_CHECKING:
    from armillary.train.runtime.health.watchdog import Watchdog


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and trains.

    Exit codes: 0 trained to the last step, or saved and stopped by a signal; 1 failed while training, after a line that
    names rank, step and error, or before because of the machine or another rank; 2 refused to start, with the reason in
    one line; 130 ^C; 143 or 138 ended by a second SIGTERM or SIGUSR1. torchrun prints the line last (`report_failure`).
    """
    watchdog: Watchdog | None = None
    with exit_on_error(PROGRAM, is_started=lambda: watchdog is not None and watchdog.training_started):
        command, overrides = read_command(sys.argv[1:] if argv is None else argv)
        if command.dry_run:
            from armillary.train.dry_run import show_dry_run  # not on every rank of every run

            show_dry_run(command.run, command.ranks, command.json)
            return
        from armillary.train.trainer import train, watchdog_of  # takes seconds, and wrong arguments need none of it

        watchdog = watchdog_of(command.run)
        try:
            train(command.run, watchdog, overrides)
        except Exception:
            if watchdog.explained:
                sys.exit(FAILED)
            raise
