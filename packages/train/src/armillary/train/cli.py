"""The command line: `torchrun -m armillary.train`, or `armillary-train` on one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from armillary.train.build import prepare, process_group
from armillary.train.command import read_command
from armillary.train.trainer import train


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and trains. Exits with one line that says why: 2 for what cannot be started, 1 for losses
    that are not finite."""
    try:
        command, told = read_command(sys.argv[1:] if argv is None else argv)
        if command.dry_run:
            from armillary.train.dry_run import show_dry_run  # not on every rank of every run: it takes seconds

            show_dry_run(command.run, command.ranks, command.cluster, command.mfu, command.json)
            return
        with process_group(command.run) as device:
            run = prepare(command.run, device)
            if dist.get_rank() == 0:
                print(*told, sep="\n", flush=True)
            train(run)
    except (ValueError, FloatingPointError) as error:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print(f"{rank}armillary-train: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
