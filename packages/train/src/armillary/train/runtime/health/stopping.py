"""Ending before the last step, when asked to."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist


class StopSignal:
    """Hears SIGTERM and SIGUSR1 within a `with` block; training then ends after the step in hand, on all ranks.

    Blocks may be nested: what was heard in the outer one holds in the inner one. A signal that comes again changes
    nothing, so that the checkpoint is written to its end. Python hands signals to its main thread only, so in another
    thread nothing is heard.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.heard = False
        self._before: list[dict[signal.Signals, Any]] = []

    def __enter__(self) -> Self:
        hears = threading.current_thread() is threading.main_thread()
        self._before.append({number: signal.signal(number, self._hear) for number in self.SIGNALS if hears})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.pop().items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by other than Python

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def asked(self, device: torch.device) -> bool:
        """Whether any rank has heard a signal: the same on all ranks, which must all call it."""
        heard = torch.tensor(float(self.heard), device=device)
        dist.all_reduce(heard)
        return heard.item() > 0
