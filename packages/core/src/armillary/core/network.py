"""What is sent, as communication plans say it."""

from __future__ import annotations

from typing import NamedTuple


class Send(NamedTuple):
    """So many bytes from one rank to another."""

    source: int
    target: int
    bytes: int
