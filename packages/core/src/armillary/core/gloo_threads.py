"""Delays the exit of Python while gloo's threads still refer to tensors, because the process could abort."""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"
"""The name that torch gives to the threads of gloo groups."""

PAUSE, LIMIT = 0.01, 10.0
"""Seconds between two polls, and maximum seconds in total."""


@atexit.register
def wait_for_gloo_threads() -> None:
    """Waits until the threads of all gloo groups sleep, at most `LIMIT` seconds. Linux only.

    After a collective, gloo's thread first wakes the caller and then drops the tensors, for which it needs the GIL. If
    Python exits in between, it ends the thread that requests the GIL, in the middle of torch's destructors: the process
    aborts with "terminate called without an active exception" (pytorch/pytorch#190489). `destroy_process_group` does
    not stop these threads while an object, such as a mesh, refers to the group.

    A thread whose collective waits for another rank sleeps too, so this function never waits for other ranks.
    """
    end, quiet_polls = time.monotonic() + LIMIT, 0
    # A thread that waits for the GIL sleeps as well. It gets the GIL during the pause, and is then awake or finished.
    # So only several polls in a row show that all threads are idle.
    while (states := gloo_thread_states()) and quiet_polls < 3 and time.monotonic() < end:
        quiet_polls = quiet_polls + 1 if set(states) == {"S"} else 0
        time.sleep(PAUSE)


def gloo_thread_states() -> list[str]:
    """Returns the scheduler's state of each gloo thread of this process, such as "R" or "S"."""
    states: list[str] = []
    with suppress(OSError):  # no /proc
        for thread in THREADS.iterdir():
            with suppress(OSError):  # the thread has just ended
                # /proc/.../stat is "id (name) state ...".
                name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
                states += [fields.split()[0]] if name == NAME else []
    return states
