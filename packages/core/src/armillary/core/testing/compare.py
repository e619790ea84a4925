"""Comparisons in tests: tensors with an oracle, errors with the calls and commands that must raise them.

A relative error is relative to the norm of the expected tensor, so that small gradients count too.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from math import isfinite

import torch
from torch import Tensor

from armillary.core.ledger import CommLedger

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-6}
"""Largest relative error of attention's results and gradients, by dtype. Errors in 16 bits depend on the tensors, and
have no fixed limit."""


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the root mean square of the difference over that of `expected`, in float64.

    Infinite for a NaN, for any difference if the divisor is 0, and if -inf is not at the same places in both: an lse is
    -inf where a query sees no key.

    Args:
        floor: the divisor if the root mean square of `expected` is smaller.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    unseen = expected == -torch.inf
    if not torch.equal(actual == -torch.inf, unseen):
        return float("inf")
    expected = expected.detach().double().masked_fill(unseen, 0)
    difference = root_mean_square(actual.detach().double().masked_fill(unseen, 0) - expected)
    if not difference:
        return 0.0
    divisor = max(root_mean_square(expected), floor)
    return difference / divisor if isfinite(difference) and divisor else float("inf")


def root_mean_square(x: Tensor) -> float:
    """Returns the root mean square of a tensor's numbers, computed in float64; 0 if it has none."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def refusal(main: Callable[[Sequence[str]], object], argv: Sequence[object]) -> str:
    """Returns the line that a command prints on stderr for wrong arguments.

    Raises:
        AssertionError: the command did not exit with code 2, or did not print exactly one line, on stderr.
    """
    out, err = io.StringIO(), io.StringIO()
    words = [str(word) for word in argv]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
            code = 0
        except SystemExit as stop:
            code = stop.code
    lines = err.getvalue().splitlines()
    assert (code, len(lines), out.getvalue()) == (2, 1, ""), f"{words}: exit code {code}, {out.getvalue()}, {lines}"
    return lines[0]


def value_errors(calls: Sequence[Callable[[], object]], sent: int = 0) -> list[str]:
    """Returns the message of the ValueError that each call raises.

    Args:
        sent: bytes that the calls send to other ranks before they raise, all together.

    Raises:
        AssertionError: a call raised no ValueError, or the calls sent another number of bytes.
    """
    messages: list[str] = []
    with CommLedger() as ledger:
        for number, call in enumerate(calls):
            try:
                call()
            except ValueError as error:
                messages.append(str(error))
            else:
                raise AssertionError(f"call {number} was not refused")
    assert ledger.bytes() == sent, ledger.table()
    return messages


def commands_in(text: str, *programs: str) -> list[list[str]]:
    """Returns the arguments of each line that runs one of `programs`, directly or under torchrun.

    A backslash at the end of a line continues it.
    """
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    calls = [shlex.split(line) for line in lines if line.startswith((*programs, "torchrun "))]
    starts = [next((i for i, word in enumerate(words) if word in programs), None) for words in calls]
    return [words[i + 1 :] for words, i in zip(calls, starts, strict=True) if i is not None]
