"""Command lines into values, with errors of one line and numbers as people write them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial, wraps
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import SubcommandApp

from armillary.core.quantity import whole

Parsed = TypeVar("Parsed")


def parse(argv: Sequence[str], kind: type[Parsed], program: str, default: Parsed | None = None) -> Parsed:
    """A value of this kind from command line arguments, which change the fields of the default.

    Raises:
        ValueError: an unknown key or a value of the wrong kind, with the nearest known keys.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    with errors_in_one_line():
        return tyro.cli(kind, args=list(argv), prog=program, registry=numbers(), **given)


def parse_known(argv: Sequence[str], kind: type[Parsed], program: str) -> Parsed:
    """Likewise, passing over what is no flag of this kind, --help among it."""
    with errors_in_one_line():
        return tyro.cli(
            kind, args=list(argv), prog=program, registry=numbers(), return_unknown_args=True, add_help=False
        )[0]


def parse_command(argv: Sequence[str], commands: Mapping[str, Callable[..., None]], program: str) -> Callable[[], None]:
    """The command that the first word names, with its arguments, to be called. Errors as in `parse`."""
    app = SubcommandApp()
    for name, command in commands.items():
        app.command(name=name)(_deferred(command))
    with errors_in_one_line():
        return app.cli(args=list(argv), prog=program, registry=numbers())


def _deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function with the same arguments that returns the call: what a command says is not said while parsing."""
    return wraps(command)(lambda *args, **kwargs: partial(command, *args, **kwargs))


def numbers() -> ConstructorRegistry:
    """Whole numbers in flags, as `armillary.core.quantity` reads them: 65536, 64Ki, 1_000, 5M."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:  # pyright: ignore[reportUnusedFunction]
        if kind.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: whole(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


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
    """The sentences of a boxed error message, without its title, its box, its line breaks and what help would say."""
    lines = [line.strip(" │") for line in box.splitlines()]
    sentences = " ".join(line for line in lines[1:] if line.strip("─-╭╮╰╯ "))
    return re.sub(r" Argument helptext:.*(?= For full helptext)", "", sentences) or box
