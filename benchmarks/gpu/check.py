"""The parts of a check: its setting and the rows of its results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import build_mesh
from armillary.core.testing import fake_world
from gpu.device import Device, Work

T = TypeVar("T")

MOST_RANKS = 8
WARMUP, REPEATS = 2, 5
"""Calls of a function before it is timed, and while it is."""
ASSUMED_FLOPS = 0.4 * 989e12
"""FLOP/s with which a check's arithmetic must fit into its time limit: 40% of an H100's dense peak in 16 bits. Matrix
products attain 65% to 80% of it, cuDNN's attention 52% to 60%, FlashAttention-2's 33% to 37%."""
NOT_RUN = "not run"


class Row(NamedTuple):
    """One result.

    Args:
        what: label of the result.
        bar: the requirement in words; "-" if there is none.
        source: where the requirement comes from.
        passed: None without a requirement, or if it holds only for GPUs and none was measured.
    """

    what: str
    measured: float | str
    unit: str = ""
    bar: str = "-"
    source: str = ""
    passed: bool | None = None

    @property
    def ran(self) -> bool:
        """False for a row of `not_run`."""
        return not str(self.measured).startswith(NOT_RUN)

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


@dataclass(frozen=True)
class Setting:
    """The device, sizes and time limit of a check.

    Args:
        fake: a rehearsal without a GPU, with tiny sizes and without judging speeds.
        gpus: GPUs of this machine; checks on several ranks use at most `MOST_RANKS`.
        seconds: time limit of the check.
    """

    device: Device
    fake: bool
    gpus: int = 1
    seconds: float = 600.0

    @property
    def ranks(self) -> int:
        """Ranks of checks on several ranks: a power of two, and two CPU ranks in a rehearsal."""
        return 2 if self.fake else 1 << (min(self.gpus, MOST_RANKS).bit_length() - 1)

    def size(self, real: T, fake: T) -> T:
        """Returns `fake` in a rehearsal, else `real`."""
        return fake if self.fake else real

    @property
    def calls(self) -> int:
        """Calls of a function by `time`, and by `host_time`."""
        return self.size(WARMUP + REPEATS, 1)

    def time(self, work: Work) -> float:
        """Median device seconds of a call after warm-up; in a rehearsal the seconds of one call."""
        return self.device.seconds(work, self.size(REPEATS, 1), self.size(WARMUP, 0))

    def host_time(self, work: Work) -> float:
        """Median host seconds of a call after warm-up; in a rehearsal the seconds of one call."""
        return self.device.host_seconds(work, self.size(REPEATS, 1), self.size(WARMUP, 0))

    def is_so(self, label: str, measured: float | str, so: bool, bar: str, source: str) -> Row:
        """A fact that is judged only on a GPU."""
        return Row(label, measured, "", bar, source, None if self.fake else so)

    def at_least(self, label: str, measured: float, bar: float, unit: str, source: str) -> Row:
        """A speed or a fraction that is judged only on a GPU."""
        return Row(label, measured, unit, f"at least {bar:.4g}", source, None if self.fake else measured >= bar)

    def at_most(self, label: str, measured: float, bar: float, unit: str, source: str) -> Row:
        """A time or a ratio that is judged only on a GPU."""
        return Row(label, measured, unit, f"at most {bar:.4g}", source, None if self.fake else measured <= bar)

    @contextmanager
    def alone(self) -> Generator[DeviceMesh]:
        """The mesh of one rank, with the trainer's process group."""
        mesh = build_mesh(self.device.type)
        try:
            yield mesh
        finally:
            dist.destroy_process_group()

    @contextmanager
    def one_of(self, **axes: int) -> Generator[DeviceMesh]:
        """The mesh of rank 0 in a fake process group, which sends nothing."""
        with fake_world(0, self.device.type, **axes) as mesh:
            yield mesh


def not_run(label: str, reason: str) -> Row:
    """A measurement that this machine does not allow. It is no failure."""
    return Row(label, f"{NOT_RUN}: {reason}")


def correct(label: str, error: float, limit: float, source: str) -> Row:
    """A relative error, judged on every device."""
    return Row(label, error, "", f"at most {limit:.2g}", source, error <= limit)


def no_flops(_: Setting) -> float:
    return 0.0


@dataclass(frozen=True)
class Check:
    """One of the command's checks, which yields its rows one by one.

    Args:
        holds: the requirement, for the final table.
        seconds: time limit in a session of `command.SESSION` minutes.
        flops: upper bound of the floating-point operations of one GPU, by a closed form.
        gpus: number of GPUs that it needs.
        nccl: runs once under each of torch's NCCL backends.
    """

    name: str
    title: str
    run: Callable[[Setting], Iterator[Row]]
    holds: str
    seconds: int
    flops: Callable[[Setting], float] = no_flops
    gpus: int = 1
    nccl: bool = False
