"""Command lines into dataclasses, with errors of one line."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TypeVar

import tyro

Parsed = TypeVar("Parsed")


def parse(argv: Sequence[str], kind: type[Parsed], program: str, default: Parsed | None = None) -> Parsed:
    """A value of this kind from command line arguments, which change the fields of the default.

    Raises:
        ValueError: an unknown key or a value of the wrong kind, with the nearest known keys.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    with errors_in_one_line():
        return tyro.cli(kind, args=list(argv), prog=program, **given)


def parse_known(argv: Sequence[str], kind: type[Parsed], program: str) -> Parsed:
    """Likewise, passing over what is no flag of this kind, --help among it."""
    with errors_in_one_line():
        return tyro.cli(kind, args=list(argv), prog=program, return_unknown_args=True, add_help=False)[0]


@contextmanager
def errors_in_one_line() -> Generator[None]:
    """Makes a `ValueError` of what is said on the way out of a command line that will not do."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(one_line(said.getvalue())) from None


def one_line(box: str) -> str:
    """The sentences of a boxed error message, without its title, its box and its line breaks."""
    lines = [line.strip(" │") for line in box.splitlines()]
    sentences = [line for line in lines[1:] if line.strip("─-╭╮╰╯ ")]
    return " ".join(sentences) or box
