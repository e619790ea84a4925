"""Watches the launcher process: a rank whose launcher died must exit, or a restart would find it holding the device."""

from __future__ import annotations

import os

import torch.distributed as dist


class Launcher:
    """The torchrun that started this process; None under srun or without a launcher.

    A process whose parent dies gets another parent, which `has_exited` checks for. The signal of PR_SET_PDEATHSIG
    would come too early: the kernel sends it when the parent's *thread* that started the process ends.
    """

    def __init__(self) -> None:
        self.pid = os.getppid() if dist.is_torchelastic_launched() else None

    @property
    def has_exited(self) -> bool:
        return self.pid is not None and os.getppid() != self.pid
