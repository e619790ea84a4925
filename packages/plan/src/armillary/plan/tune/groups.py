"""Starts a process group for each candidate, so that its communicators are freed with it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from armillary.core import compat
from armillary.train.build import collective_timeout, process_group
from armillary.train.config import Config
from armillary.train.runtime.health.ranks import Ranks
from armillary.train.runtime.health.watchdog import Watchdog
from armillary.train.trainer import watchdog_of


@dataclass(frozen=True)
class Groups:
    """Successive process groups of the same ranks, under one watchdog that also covers their start and end.

    Args:
        store: store of the first rendezvous. The watchdog communicates through it, so it must outlive the groups.
    """

    config: Config
    watchdog: Watchdog
    store: dist.Store

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Generator[Groups]:
        """Starts the watchdog, with the store of a temporary group. All ranks must enter."""
        with ExitStack() as stack:
            with process_group(config):
                watchdog = stack.enter_context(watchdog_of(config))
                store = compat.default_store()
            # The temporary group has ended; the watchdog and its store remain.
            yield cls(config, watchdog, store)

    @contextmanager
    def group(self, phase: str, number: int = 0) -> Generator[tuple[torch.device, Ranks]]:
        """Context manager with a new process group. Yields this rank's device, and `Ranks` to agree with the others.

        Args:
            phase, number: title of the block in the watchdog's reports.
        """
        self.watchdog.start_phase(phase, number)
        hook = sys.excepthook  # each start of a group wraps it once more
        with process_group(self.config) as device:
            ranks = Ranks(collective_timeout(self.config))
            yield device, ranks
            ranks.gather()  # no rank destroys a group that another still uses
            ranks.close()
        sys.excepthook = hook
