"""Files about chosen steps: profiler traces, memory histories, and a trace of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.cuda.memory as cuda_memory
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile

from armillary.core import Trace, span

# Maximum number of allocations and frees in a memory history.
HISTORY = 100_000


class Profiler:
    """Writes traces and memory snapshots of chosen steps, one file per rank.

    A step's Chrome trace is `step-N-rank-R.json.gz` (for Perfetto, or chrome://tracing), its memory snapshot
    `memory-step-N-rank-R.pickle` (for pytorch.org/memory_viz), on cuda only. Training continues if a write fails.
    """

    def __init__(
        self, trace_steps: Iterable[int], snapshots: Iterable[int], folder: Path, say: Callable[[str], None]
    ) -> None:
        self.folder, self.say = folder, say
        self._traced, self._snapshots = frozenset(trace_steps), frozenset(snapshots)
        self._profile: profile | None = None
        self._first_profiled = 0  # step before which the current profile started

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        # 1. Both start one step early: the start of the profiler slows the first step, which `_action` therefore does
        # not record, and the history then has the allocations of tensors that the step before leaves behind.
        if self._profile is None and {step, step + 1} & self._traced:
            self._first_profiled = step
            self._profile = profile(schedule=self._action, on_trace_ready=self._write_trace)
            self._profile.start()
        if {step, step + 1} & self._snapshots:
            cuda_memory._record_memory_history(max_entries=HISTORY)  # pyright: ignore[reportPrivateUsage]
        yield
        # 2. Write the snapshot, and stop recording unless the next step has one too.
        if step in self._snapshots:
            name = f"memory-step-{step}-rank-{dist.get_rank()}.pickle"
            self._write(name, cuda_memory._dump_snapshot)  # pyright: ignore[reportPrivateUsage]
            if step + 1 not in self._snapshots:
                cuda_memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]
        # 3. Write the trace (`_write_trace`). Continue if the next step is traced, or is the warm-up of a traced one.
        if self._profile is not None:
            self._profile.step()
            if not {step + 1, step + 2} & self._traced:
                self._profile.stop()
                self._profile = None

    def _action(self, count: int) -> ProfilerAction:
        step = self._first_profiled + count  # of the step that is `count` steps after the profiler's start
        if step in self._traced:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in self._traced else ProfilerAction.NONE

    def _write_trace(self, profile_data: profile) -> None:
        # `profile.step` increments `step_num` before it calls this.
        step = self._first_profiled + profile_data.step_num - 1
        self._write(f"step-{step}-rank-{dist.get_rank()}.json.gz", profile_data.export_chrome_trace)

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(str(self.folder / name))
        except Exception as error:  # an error of the profiler must not stop training
            self.say(f"{self.folder / name}: not written ({type(error).__name__}: {error})")


class StepTrace:
    """Writes one file with an `armillary.core.Trace` of chosen steps of all ranks, on rank 0. Every rank must use it.

    Args:
        path: path of the file; None: no trace.
        steps: steps to trace; by default the second step after the start or restart.
        first, last: the first and the last step that this run trains, after a restart if there was one.
    """

    def __init__(
        self,
        path: Path | None,
        steps: Sequence[int],
        device: torch.device,
        first: int,
        last: int,
        say: Callable[[str], None],
    ) -> None:
        self.path, self.say, self.trace = path, say, Trace(device.type)
        trace_steps = steps or (min(first + 1, last),)
        self._remaining = {step for step in trace_steps if first <= step <= last} if self.path else set[int]()
        if self.path and not self._remaining and first <= last:
            numbers = ", ".join(map(str, trace_steps))
            say(f"{self.path}: no trace is written, for steps {first} to {last} are none of {numbers}")

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        if step not in self._remaining:
            yield
            return
        with self.trace, span(f"step {step}", "label"):
            yield
        self._remaining.remove(step)
        if not self._remaining:
            self._write()

    def finish(self) -> None:
        """Writes the traced steps if the run ends before all chosen ones."""
        if self._remaining and self.trace.spans:
            self._write()

    def _write(self) -> None:
        assert self.path is not None
        try:
            self.trace.write(self.path)
        except OSError as error:
            self.say(f"{self.path}: not written ({type(error).__name__}: {error})")
