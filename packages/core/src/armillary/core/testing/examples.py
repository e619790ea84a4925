"""The command lines of help texts and pages, for tests that parse them."""

from __future__ import annotations

import shlex


def commands_in(text: str, *programs: str) -> list[list[str]]:
    """Returns the arguments of each line that runs one of `programs`, directly or under torchrun.

    A backslash at the end of a line continues it.
    """
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    calls = [shlex.split(line) for line in lines if line.startswith((*programs, "torchrun "))]
    starts = [next((i for i, word in enumerate(words) if word in programs), None) for words in calls]
    return [words[i + 1 :] for words, i in zip(calls, starts, strict=True) if i is not None]
