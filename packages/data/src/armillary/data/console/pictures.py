"""Pictures of commands, drawn by matplotlib and written as PNGs."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.core.parts import write_whole
from armillary.data.optional import optional


def check_picture(path: Path, flag: str) -> None:
    """Checks the path of a PNG to write, so that a command fails before it starts its work.

    Raises:
        ValueError: another suffix, a folder, or a missing parent folder. The message names `flag`.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{flag} {path}: pictures are PNGs; give a name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{flag} {path}: {reason}; give the path of a file to write")


def print_written(path: Path) -> None:
    """Prints the name of a file that a command has written, on stderr: stdout may be JSON."""
    print(f"written to {path}", file=sys.stderr)


@contextmanager
def picture(path: Path, size: tuple[float, float], package: str) -> Generator[Any]:
    """Context manager that yields a figure of `size` inches, and writes it to `path` if the block raises no error.

    Args:
        package: the distribution whose extra `plot` installs matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = optional("matplotlib.figure", "plot", package).Figure(size, layout="constrained")
    yield figure
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
