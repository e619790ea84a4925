"""Ending before the last step, when asked to."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist


class StopSignal:
    """Hears SIGTERM and SIGUSR1 within a `with` block; training then ends after the step in hand, on all ranks."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.heard = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def asked(self, device: torch.device) -> bool:
        """Whether any rank has heard a signal: the same on all ranks, which must all call it."""
        heard = torch.tensor(float(self.heard), device=device)
        dist.all_reduce(heard)
        return heard.item() > 0
