"""Profiler traces and memory histories of chosen steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch.cuda.memory as cuda_memory
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile

HISTORY = 100_000
"""Allocations and frees that a memory history keeps."""


class Profiler:
    """Writes traces and memory snapshots of chosen steps, one file a rank.

    A step's Chrome trace is `step-N-rank-R.json.gz` (for Perfetto, or chrome://tracing), its memory snapshot
    `memory-step-N-rank-R.pickle` (for pytorch.org/memory_viz). The step before a chosen one warms up.

    Args:
        trace_steps: steps with a Chrome trace.
        snapshots: steps after which the allocator's history is written; cuda only.
        folder: created when there is something to write.
        say: called with a line about a file that could not be written; training continues.
    """

    def __init__(
        self, trace_steps: Iterable[int], snapshots: Iterable[int], folder: Path, say: Callable[[str], None]
    ) -> None:
        self.folder, self.say = folder, say
        self._traced, self._snapshots = frozenset(trace_steps), frozenset(snapshots)
        self._profile: profile | None = None
        self._first = 0

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Context manager around a step."""
        self._begin_trace(step)
        self._begin_memory(step)
        yield
        self._end_memory(step)
        self._end_trace(step)

    def _begin_trace(self, step: int) -> None:
        # One step early: the first step under a profiler pays for its start, so it is not recorded (`_action`).
        if self._profile is None and {step, step + 1} & self._traced:
            self._first = step
            self._profile = profile(schedule=self._action, on_trace_ready=self._write_trace)
            self._profile.start()

    def _action(self, count: int) -> ProfilerAction:
        step = self._first + count
        if step in self._traced:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in self._traced else ProfilerAction.NONE

    def _end_trace(self, step: int) -> None:
        if self._profile is None:
            return
        self._profile.step()
        # Continues if the next step is traced, or is the warm-up of a traced step.
        if not {step + 1, step + 2} & self._traced:
            self._profile.stop()
            self._profile = None

    def _write_trace(self, profile_data: profile) -> None:
        # step() calls this after it has incremented step_num.
        step = self._first + profile_data.step_num - 1
        self._write(f"step-{step}-rank-{dist.get_rank()}.json.gz", profile_data.export_chrome_trace)

    def _begin_memory(self, step: int) -> None:
        # From the step before, so that tensors which outlive a step have an allocation in the history.
        if {step, step + 1} & self._snapshots:
            cuda_memory._record_memory_history(max_entries=HISTORY)  # pyright: ignore[reportPrivateUsage]

    def _end_memory(self, step: int) -> None:
        if step in self._snapshots:
            name = f"memory-step-{step}-rank-{dist.get_rank()}.pickle"
            self._write(name, cuda_memory._dump_snapshot)  # pyright: ignore[reportPrivateUsage]
            if step + 1 not in self._snapshots:
                cuda_memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(str(self.folder / name))
        except Exception as error:  # no error of a profile is a reason to stop training
            self.say(f"{self.folder / name}: not written ({type(error).__name__}: {error})")
