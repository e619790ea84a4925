"""Command-line arguments as dataclasses, with one-line errors and numbers such as 64Ki."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from armillary.data.console.units import whole_number

Parsed = TypeVar("Parsed")

_QUANTITIES = ConstructorRegistry()
"""Has tyro parse integers with `whole_number`: 65536, 64Ki, 1_000, 5M."""


@_QUANTITIES.primitive_rule
def _whole_numbers(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if kind.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def parse(argv: Sequence[str], kind: type[Parsed], program: str, default: Parsed | None = None) -> Parsed:
    """Returns an instance of the dataclass `kind`: the default, overridden by command-line arguments.

    Args:
        program: name of the command in messages.

    Raises:
        ValueError: an unknown flag (the message names the nearest known ones), or a value of the wrong type.
    """
    with _one_line_errors():
        options: dict[str, Any] = {} if default is None else {"default": default}
        return tyro.cli(kind, args=list(argv), prog=program, registry=_QUANTITIES, **options)


def parse_known(argv: Sequence[str], kind: type[Parsed], program: str) -> Parsed:
    """Returns an instance of `kind` as `parse` does, but ignores --help and flags that `kind` does not have."""
    with _one_line_errors():
        options: dict[str, Any] = {"return_unknown_args": True, "add_help": False}
        return tyro.cli(kind, args=list(argv), prog=program, registry=_QUANTITIES, **options)[0]


def refuse_removed(argv: Sequence[str], removed: Mapping[str, str]) -> None:
    """Raises ValueError for words of earlier versions: flags, sections of flags or subcommands.

    Args:
        removed: what to write instead of each such word; a flag comes before its section.
    """
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        for old, advice in removed.items():
            if name == old or name.startswith(f"{old}."):
                raise ValueError(f"{name}: {advice}")


@contextmanager
def _one_line_errors() -> Generator[None]:
    # tyro prints a box; ranks print errors in one line.
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            raise
        # Drops the title, the frame of the box, line breaks and the help texts of the argument and of similar ones.
        lines = [line.strip(" │") for line in box.getvalue().splitlines()[1:]]
        if "Perhaps you meant:" in lines:
            i = lines.index("Perhaps you meant:")
            names = [" or ".join(re.findall(r"--[\w.-]+", line)) for line in lines[i + 1 :] if re.match(r"--?\w", line)]
            full_help = [line for line in lines[i:] if line.startswith("For full helptext")]
            lines[i:] = [f"Perhaps you meant: {', '.join(names)}.", *full_help]
        sentences = " ".join(line for line in lines if line.strip("─-╭╮╰╯ "))
        message = re.sub(r" Argument helptext:.*(?= For full helptext)", "", sentences)
        raise ValueError(message or box.getvalue()) from None
