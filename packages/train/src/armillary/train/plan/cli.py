"""The command line: `armillary-plan memory` and `armillary-plan bytes`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from armillary.train.parsing import parse
from armillary.train.plan import bytes_report
from armillary.train.plan.bytes import BytesPlan, plan_bytes
from armillary.train.plan.memory import MemoryPlan, plan_memory
from armillary.train.plan.report import as_json, show

USAGE = """usage: armillary-plan COMMAND [options]

commands:
  memory   what a training step holds on each rank, and the longest sequence that fits; needs no GPU
  bytes    what attention methods send, forward and backward, at any number of ranks; needs no GPU

armillary-plan COMMAND --help lists the options."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command, and exits: 2 for what cannot be planned, with one line that says why."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return
    try:
        if command not in COMMANDS:
            raise ValueError(f"no command {command!r}; known: {', '.join(COMMANDS)}")
        COMMANDS[command](rest)
    except ValueError as error:
        print(f"armillary-plan: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def memory(argv: Sequence[str]) -> None:
    """`armillary-plan memory`."""
    plan = parse(argv, MemoryPlan, "armillary-plan memory")
    screen = Console(stderr=True)
    with screen.status("simulating") as status:
        planned = plan_memory(plan, lambda what: status.update(f"simulating {what}"))
    if plan.json:
        print(as_json(planned))
    else:
        show(planned, Console())


def sent(argv: Sequence[str]) -> None:
    """`armillary-plan bytes`."""
    plan = parse(argv, BytesPlan, "armillary-plan bytes")
    screen = Console(stderr=True)
    with screen.status("counting") as status:
        rows = plan_bytes(plan, lambda what: status.update(f"counting {what}"))
    print((bytes_report.as_json if plan.json else bytes_report.as_text)(plan, rows))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"memory": memory, "bytes": sent}
