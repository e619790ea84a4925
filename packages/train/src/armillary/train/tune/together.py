"""A process group of its own for each candidate, on which ranks agree: communicators of many would pile up."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from armillary.train.build import patience, process_group
from armillary.train.checkpoint.ranks import Ranks
from armillary.train.config import Config
from armillary.train.watchdog import Watchdog


@contextmanager
def together(config: Config, phase: str, number: int = 0) -> Generator[tuple[torch.device, Ranks]]:
    """(this rank's device, all ranks on a group that candidates do not use), around what ranks do together.

    A watchdog sees to it that nothing waits for ever.

    Args:
        phase, number: what is being done, for whoever has to say where it stands.
    """
    with process_group(config) as device, Watchdog(config.train) as watchdog:
        watchdog.begins(phase, number)
        ranks = Ranks(patience(config))
        yield device, ranks
        ranks.gather()  # nobody takes a group down that others still use
        ranks.close()
