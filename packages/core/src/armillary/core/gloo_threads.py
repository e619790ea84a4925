"""Delays the exit of Python while gloo's threads still hold tensors."""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"
"""The name that torch gives to threads of a gloo group."""

PAUSE, LIMIT = 0.01, 10.0
"""Seconds between two polls, and in total."""


@atexit.register
def wait_for_gloo_threads() -> None:
    """Waits until the threads of all gloo groups sleep. Linux only.

    Such a thread drops the tensors of a collective only after it has woken the caller, and needs the GIL for that. If
    Python ends meanwhile, a thread that requests the GIL is ended, and torch's destructors cannot be unwound: the
    process aborts with "terminate called without an active exception" (pytorch/pytorch#190489). `destroy_process_group`
    stops no thread while an object, such as a mesh, refers to the group.

    A thread whose collective waits for another rank sleeps too, so this never waits for other ranks.
    """
    end, quiet_looks = time.monotonic() + LIMIT, 0
    # A thread that waits for the GIL sleeps too. It gets the GIL during the pause, and is awake or finished after it.
    while (states := gloo_thread_states()) and quiet_looks < 3 and time.monotonic() < end:
        quiet_looks = quiet_looks + 1 if set(states) == {"S"} else 0
        time.sleep(PAUSE)


def gloo_thread_states() -> list[str]:
    """Returns the scheduler's state of each gloo thread of this process, such as "R" or "S"."""
    states: list[str] = []
    with suppress(OSError):  # no /proc
        for thread in THREADS.iterdir():
            with suppress(OSError):  # the thread has just ended
                name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
                states += [fields.split()[0]] if name == NAME else []
    return states
