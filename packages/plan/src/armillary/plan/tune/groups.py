"""A process group of its own for each candidate, so that communicators do not pile up."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from armillary.core import compat
from armillary.core.health.ranks import Ranks
from armillary.core.health.watchdog import Watchdog
from armillary.train.build import collective_timeout, process_group
from armillary.train.config import Config
from armillary.train.trainer import watchdog_of


@dataclass(frozen=True)
class Groups:
    """All ranks, and a watchdog that sees to it that none waits for ever, when groups come and go too.

    Args:
        store: of the first rendezvous, through which the watchdog communicates.
    """

    config: Config
    watchdog: Watchdog
    store: dist.Store

    @classmethod
    @contextmanager
    def watched(cls, config: Config) -> Generator[Groups]:
        """All ranks must enter it. Starts a group, for the store, and takes it down again."""
        with ExitStack() as stack:
            with process_group(config):
                watchdog = stack.enter_context(watchdog_of(config))
                store = compat.default_store()
            yield cls(config, watchdog, store)

    @contextmanager
    def group(self, phase: str, number: int = 0) -> Generator[tuple[torch.device, Ranks]]:
        """(this rank's device, all ranks on a group that candidates do not use) around what ranks do together.

        Args:
            phase, number: what is done in it, for the watchdog.
        """
        self.watchdog.begins(phase, number)
        hook = sys.excepthook  # each group that starts wraps it once more
        with process_group(self.config) as device:
            ranks = Ranks(collective_timeout(self.config))
            yield device, ranks
            ranks.gather()  # no rank destroys a group that others still use
            ranks.close()
        sys.excepthook = hook
