"""Watches the launcher process: a rank whose launcher died must exit, or a restart would find it holding the device."""

from __future__ import annotations

import os

import torch.distributed as dist


class Launcher:
    """The torchrun process that started this process; `pid` is None under srun or without a launcher.

    A process whose parent dies gets another parent, which `has_exited` checks. PR_SET_PDEATHSIG does not work here: the
    kernel sends its signal already when the parent's *thread* that started the process ends.
    """

    def __init__(self) -> None:
        self.pid = os.getppid() if dist.is_torchelastic_launched() else None

    @property
    def has_exited(self) -> bool:
        return self.pid is not None and os.getppid() != self.pid
