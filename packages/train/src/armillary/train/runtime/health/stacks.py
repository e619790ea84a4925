"""The Python stack of a rank that may hang: the line that it executes, and whether it waits for other ranks."""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType

STANDARD_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")
PACKAGES = "/armillary/"

COMMUNICATION = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/armillary/core/collectives/exchange.py",
    "/armillary/core/collectives/collective.py",
)
"""Files whose functions communicate."""

CALLED_BY_COMMUNICATION = re.compile("/torch/|/armillary/core/|/armillary/train/runtime/")
"""Matches files whose functions communication may call: torch's ops, `compat`, backends written in Python."""

BLOCKING_READS = re.compile(r"\b(item|tolist|cpu|numpy|(_cuda_)?synchronize|_accelerator_synchronizeDevice)\(")
"""Matches calls of torch in which the host waits for the device, and so for collectives that run there."""


def current_stack() -> StackSummary:
    """Returns the stack of the main thread, or of the thread that the main thread waits for, outermost line first.

    The main thread may wait for a thread that it joins, for example while a checkpoint is saved, or for autograd's
    device thread, which runs the backward pass on CUDA.
    """
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.pop(threading.main_thread().ident or 0)
    while (ident := awaited_thread(frame, frames)) is not None:
        frame = frames.pop(ident)
    # Source lines are looked up when they are needed, since a file system that hangs would block the lookup.
    stack = StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    stack.reverse()
    return stack


def awaited_thread(frame: FrameType, frames: dict[int, FrameType]) -> int | None:
    """Returns the id of the thread that the thread of `frame` waits for; None if it waits for none.

    Args:
        frame: innermost frame of a thread.
        frames: innermost frames of the other threads, by thread id.
    """
    if (thread := joined_thread(frame)) is not None:
        return thread.ident if thread.ident in frames else None
    if frame.f_code.co_name != "_engine_run_backward":
        return None
    # Autograd's threads are started by C++. `threading` has a dummy thread for them, or none.
    dummy = threading._DummyThread  # pyright: ignore[reportPrivateUsage]
    python_threads = {thread.ident for thread in threading.enumerate() if not isinstance(thread, dummy)}
    autograd = [ident for ident in frames if ident not in python_threads]

    def runs_packages(ident: int) -> bool:
        return any(PACKAGES in caller.f_code.co_filename for caller, _ in traceback.walk_stack(frames[ident]))

    # Autograd has a thread for each device. The one that runs code of our packages is in the middle of backward.
    return max(autograd, key=runs_packages, default=None)


def joined_thread(frame: FrameType | None) -> threading.Thread | None:
    """Returns the thread that `frame` waits for in `Thread.join`, which may have called other functions; or None."""
    while frame is not None and in_standard_library(frame.f_code.co_filename):
        thread = frame.f_locals.get("self")
        if frame.f_code.co_name == "join" and isinstance(thread, threading.Thread):
            return thread
        frame = frame.f_back
    return None


def in_standard_library(file: str) -> bool:
    """Returns True for a file of Python's standard library. Its lines show that a thread waits, but not why."""
    return file.startswith(STANDARD_LIBRARY) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def location_of(stack: StackSummary) -> str:
    """Returns text with the innermost line outside of the standard library, and the line that called torch, if any."""
    lines = [line for line in stack if not in_standard_library(line.filename)] or list(stack)
    inner = lines[-1]
    caller = next((line for line in reversed(lines) if "/torch/" not in line.filename), inner)
    return describe(inner) if caller is inner else f"{describe(inner)}, called by {describe(caller)}"


def describe(line: FrameSummary) -> str:
    return f"{Path(line.filename).name}:{line.lineno} in {line.name}"


def communicates(stack: StackSummary) -> bool:
    """Returns True if a stack ends in a function that communicates, or in functions that such a function calls."""
    return any(line.filename.endswith(COMMUNICATION) for line in innermost(stack))


def waits(stack: StackSummary) -> bool:
    """Returns True if a stack ends in communication, or on a line with a call in which the host waits for the device.

    These calls have no frame of their own. If such a line blocks elsewhere, `missing_ranks` counts collectives instead.
    """
    return communicates(stack) or any(BLOCKING_READS.search(line.line or "") for line in innermost(stack))


def innermost(stack: StackSummary) -> list[FrameSummary]:
    """Returns the innermost lines of a stack, innermost first, through the first one that communication never calls.

    Communication may call functions in files that match `CALLED_BY_COMMUNICATION`, and of the standard library.
    """
    lines: list[FrameSummary] = []
    for line in reversed(stack):
        lines.append(line)
        if not (CALLED_BY_COMMUNICATION.search(line.filename) or in_standard_library(line.filename)):
            break
    return lines
