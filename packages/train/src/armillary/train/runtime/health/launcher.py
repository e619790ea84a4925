"""The launcher of a rank, which it must not outlive: nobody would restart it, and a new start would find it there."""

from __future__ import annotations

import os

import torch.distributed as dist


class Launcher:
    """torchrun, where it has started this process; otherwise nobody, as under srun or alone.

    A process whose parent ends gets another one. That is looked at, and no signal asked for (PR_SET_PDEATHSIG): the
    kernel sends that one when the thread ends that has started the process, which may be long before its process does.
    """

    def __init__(self) -> None:
        self.pid = os.getppid() if dist.is_torchelastic_launched() else None

    @property
    def gone(self) -> bool:
        return self.pid is not None and os.getppid() != self.pid
