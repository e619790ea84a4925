"""Labels of computations, for profiles, traces and memory accounts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch

from armillary.core import compat
from armillary.core.observe.trace import span


class Label(NamedTuple):
    """The name of a computation.

    Args:
        name: such as "attention".
        host: True if the tensors that it allocates lie in host memory.
    """

    name: str
    host: bool = False


_current: ContextVar[Label | None] = ContextVar("label", default=None)


@contextmanager
def label(name: str, *, host: bool = False) -> Generator[None]:
    """Context that labels the computations of this thread, such as "attention" or "mlp". The innermost label counts.

    The label appears in a torch profile and in a `Trace`. A backward pass does not inherit it: label it where it is
    written.

    Args:
        name: the label.
        host: True if new tensors lie in host memory, as those of offloaded checkpoints do. A simulation without devices
            cannot tell by itself.
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
    """Returns the innermost label of this thread."""
    return _current.get()
