"""`Groups`: a new process group for each candidate, so that the candidate's communicators are freed with the group."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from armillary.core.parts import compat
from armillary.train import Config, process_group
from armillary.train.parts import Ranks, Watchdog, collective_timeout, watchdog_of


@dataclass(frozen=True)
class Groups:
    """Successive process groups of the same ranks, under one watchdog, which also watches their start and end.

    Args:
        store: store of the first rendezvous. The watchdog communicates through it, so it must outlive the groups.
    """

    config: Config
    watchdog: Watchdog
    store: dist.Store

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Generator[Groups]:
        """Context manager that starts the watchdog, with the store of a temporary group. All ranks must enter it."""
        with ExitStack() as stack:
            with process_group(config):
                watchdog = stack.enter_context(watchdog_of(config))
                store = compat.default_store()
            # The temporary group is destroyed here. The watchdog and its store remain.
            yield cls(config, watchdog, store)

    @contextmanager
    def group(self, phase: str, number: int = 0) -> Generator[tuple[torch.device, Ranks]]:
        """Context manager with a new process group. Yields this rank's device, and `Ranks` to exchange small values.

        Args:
            phase, number: name of the `with` block in the watchdog's reports, such as ("measuring", 3).
        """
        self.watchdog.start_phase(phase, number)
        hook = sys.excepthook  # starting a group wraps the hook, so restore it at the end
        with process_group(self.config) as device:
            ranks = Ranks(collective_timeout(self.config))
            yield device, ranks
            ranks.barrier()  # no rank destroys a group that another still uses
            ranks.close()
        sys.excepthook = hook
