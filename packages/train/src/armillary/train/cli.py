"""The command line: `torchrun -m armillary.train`, or `armillary-train` on one process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TypeVar

import tyro

from armillary.train.build import prepare, process_group
from armillary.train.config import Config
from armillary.train.trainer import train


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, trains, and exits: 2 for what cannot be started, with one line that says why."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv, Config, "armillary-train")
        with process_group(config) as device:
            run = prepare(config, device)
            train(run)
    except ValueError as error:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print(f"{rank}armillary-train: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


Parsed = TypeVar("Parsed")


def parse(argv: Sequence[str], kind: type[Parsed], program: str) -> Parsed:
    """A configuration of this kind from command line arguments.

    Raises:
        ValueError: an unknown key or a value of the wrong kind, with the nearest known keys.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=list(argv), prog=program)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(one_line(said.getvalue())) from None


def one_line(box: str) -> str:
    """The sentences of a boxed error message, without its title, its box and its line breaks."""
    lines = [line.strip(" │") for line in box.splitlines()]
    sentences = [line for line in lines[1:] if line.strip("─-╭╮╰╯ ")]
    return " ".join(sentences) or box
