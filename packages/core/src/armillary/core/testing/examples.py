"""Examples of a command line in a help text, to be parsed by a test."""

from __future__ import annotations

import shlex


def commands_in(text: str, *programs: str) -> list[list[str]]:
    """The arguments behind one of these programs in each line that starts it; lines may go on behind a backslash."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    calls = [shlex.split(line) for line in lines if line.startswith((*programs, "torchrun "))]
    starts = [next((i for i, word in enumerate(words) if word in programs), None) for words in calls]
    return [words[i + 1 :] for words, i in zip(calls, starts, strict=True) if i is not None]
