"""The command line `armillary-plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from armillary.data.console import FAILED, exit_on_error, exit_with

PROGRAM = "armillary-plan"
USAGE = """usage: armillary-plan [COMMAND] [options]

  # the fastest mesh, method and checkpoints, as a file for armillary-train --config
  armillary-plan --model llama3-8b --cluster 8xh100 --tokens 128Ki --out planned.toml
  # the longest sequence that fits
  armillary-plan memory --model llama3-8b --cluster 16xh100 --max-context
  # memory and time of a step, by the trainer's own flags
  armillary-plan run --recipe llama3_8b_1m --cluster 8xh100

commands:
  search   the fastest mesh, method and checkpoints for a model on a cluster, and why others are slower; the default
  memory   peak memory of a training step on one rank, and the longest sequence that fits
  run      memory and time of a run of the trainer, by its own flags

None needs a GPU. armillary-plan COMMAND --help lists the options.
Exit codes: 0; 1 if the model or the sequence does not fit into memory; 2 for wrong arguments."""
# The module of each command, whose `main` takes its flags and returns False if nothing fits into memory.
COMMANDS = {
    "search": "armillary.plan.search.cli",
    "memory": "armillary.plan.memory.cli",
    "run": "armillary.plan.trainer_run",
}
# Commands that are gone, and what to run instead.
REMOVED = {
    "bytes": "python benchmarks/sent_bytes.py, in a checkout of the repository",
    "steps": "python docs/tools/draw_steps.py, in a checkout of the repository",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exits with 1 if nothing fits into memory, and with 2 and one line if arguments are wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    # If the first word is a flag, the command is `search`.
    command, words = ("search", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    with exit_on_error(PROGRAM):
        if command in REMOVED:
            raise ValueError(f"{PROGRAM} {command} is gone: run {REMOVED[command]}")
        if command not in COMMANDS:
            raise ValueError(f"no command {command!r}; known: {', '.join(COMMANDS)}")
        # These imports take seconds, which neither help nor a wrong name needs.
        module = import_module(COMMANDS[command])
        from armillary.plan.memory.room import DoesNotFitError

        try:
            fits = module.main(words, f"{PROGRAM} {command}")
        except DoesNotFitError as error:
            exit_with(PROGRAM, str(error), FAILED)
        if not fits:
            sys.exit(FAILED)
