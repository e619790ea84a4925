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
        host: True if the tensors that the computation allocates are in host memory.
    """

    name: str
    host: bool = False


_current: ContextVar[Label | None] = ContextVar("label", default=None)


@contextmanager
def label(name: str, *, host: bool = False) -> Generator[None]:
    """Context manager that labels the computations of this thread. Of nested labels the innermost counts.

    The label appears in a torch profile, in a `Trace` and in memory accounts. The backward pass of a labelled
    computation has no label; a function that implements a backward can label it there.

    Args:
        name: the label, such as "attention" or "mlp".
        host: True if new tensors are in host memory, as those of offloaded checkpoints are. A memory simulation cannot
            see that, because all of its tensors are on the CPU.
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
