"""One message of a communication plan."""

from __future__ import annotations

from typing import NamedTuple


class Send(NamedTuple):
    """A message of `bytes` bytes from rank `source` to rank `target`."""

    source: int
    target: int
    bytes: int
