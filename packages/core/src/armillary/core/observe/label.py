"""Naming what is being computed, so that profiles and memory accounts can say it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch

from armillary.core import compat
from armillary.core.observe.trace import span


class Label(NamedTuple):
    """What is being computed, and whether what it allocates lies in the host's memory instead of the device's."""

    name: str
    host: bool = False


_current: ContextVar[Label | None] = ContextVar("label", default=None)


@contextmanager
def label(name: str, *, host: bool = False) -> Generator[None]:
    """Names what this thread computes meanwhile, such as "attention" or "mlp"; the innermost name counts.

    It shows in a torch profile and a `Trace` too. A backward pass does not inherit it: name that where it is written.

    Args:
        host: whether new tensors are kept in the host's memory (offloaded checkpoints, say). To be told, because a
            simulation has no device to tell it by.
    """
    if torch.compiler.is_compiling():
        yield
        return
    token = _current.set(Label(name, host))
    try:
        profiled = torch.profiler.record_function(name) if compat.profiling() else nullcontext()
        with profiled, span(name, "label"):
            yield
    finally:
        _current.reset(token)


def current_label() -> Label | None:
    """The innermost label on this thread."""
    return _current.get()
