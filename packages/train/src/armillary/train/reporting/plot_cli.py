"""The command line: `armillary-plot FOLDER...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from armillary.data.console.exit import exit_on_error
from armillary.data.console.picture import check_picture
from armillary.data.parsing import parse
from armillary.train.reporting.plot import plot_runs

PROGRAM = "armillary-plot"


@dataclass(frozen=True)
class Pictures:
    """Draws the loss, gradient norm and learning rate of runs over each other, as a PNG.

    Two ways to start:
      # one run, into outputs/loss.png
      armillary-plot outputs
      # two runs
      armillary-plot outputs other-outputs --output both.png
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs."""
    output: Path | None = None
    """The picture; by default loss.png in the folder of a single run; for several, losses.png here."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-plot`. Exits with 2 and one line on invalid input."""
    with exit_on_error(PROGRAM):
        pictures = parse(sys.argv[1:] if argv is None else argv, Pictures, PROGRAM)
        default = pictures.folders[0] / "loss.png" if len(pictures.folders) == 1 else Path("losses.png")
        if pictures.output is not None:
            check_picture(pictures.output, "--output")
        print(plot_runs(pictures.folders, pictures.output or default))
