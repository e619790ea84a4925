"""What every check is made of: the setting that it runs in, and the rows that it gives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import build_mesh
from armillary.train.runtime.fake_world import fake_world
from gpu.device import Device

T = TypeVar("T")

MOST_RANKS = 8


class Row(NamedTuple):
    """One thing that was asked.

    Args:
        bar: what it must be, in words; "-" where it is only told.
        source: who says so.
        passed: None where nothing is asked for, or where no GPU was measured.
    """

    what: str
    measured: float | str
    unit: str = ""
    bar: str = "-"
    source: str = ""
    passed: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


@dataclass(frozen=True)
class Setting:
    """Where checks run.

    Args:
        fake: a rehearsal without a GPU: sizes are tiny, and what only a GPU could reach is not judged.
        gpus: GPUs of this machine, of which checks of several ranks use at most `MOST_RANKS`.
        seconds: that the check may take.
    """

    device: Device
    fake: bool
    gpus: int = 1
    seconds: float = 600.0

    @property
    def ranks(self) -> int:
        """Ranks of a check that takes several: a power of two; in a rehearsal two, on the CPU."""
        return 2 if self.fake else 1 << (min(self.gpus, MOST_RANKS).bit_length() - 1)

    def size(self, real: T, fake: T) -> T:
        """Of the run, or of the rehearsal."""
        return fake if self.fake else real

    def is_so(self, label: str, measured: float | str, so: bool, bar: str, source: str) -> Row:
        """A fact, which is judged on a GPU alone."""
        return Row(label, measured, "", bar, source, None if self.fake else so)

    def at_least(self, label: str, measured: float, bar: float, unit: str, source: str) -> Row:
        """A speed or a share, which only a GPU can be held to."""
        return Row(label, measured, unit, f"at least {bar:.4g}", source, None if self.fake else measured >= bar)

    def at_most(self, label: str, measured: float, bar: float, unit: str, source: str) -> Row:
        """A time or a ratio, likewise."""
        return Row(label, measured, unit, f"at most {bar:.4g}", source, None if self.fake else measured <= bar)

    @contextmanager
    def alone(self) -> Generator[DeviceMesh]:
        """The mesh of one rank, with a process group as a trainer has it."""
        mesh = build_mesh(self.device.type)
        try:
            yield mesh
        finally:
            dist.destroy_process_group()

    @contextmanager
    def one_of(self, **axes: int) -> Generator[DeviceMesh]:
        """The mesh of rank 0 of several, of which the others are not there: nothing is sent."""
        with fake_world(0, self.device.type, **axes) as mesh:
            yield mesh


def correct(label: str, error: float, limit: float, source: str) -> Row:
    """A relative error, which holds anywhere."""
    return Row(label, error, "", f"at most {limit:.2g}", source, error <= limit)


@dataclass(frozen=True)
class Check:
    """One of the command's checks: rows come as they are found.

    Args:
        holds: what must hold, for the table at the end.
        seconds: that it may take of a session of 30 minutes.
        gpus: that it needs.
        nccl: run it once under each of torch's NCCL backends.
    """

    name: str
    title: str
    run: Callable[[Setting], Iterator[Row]]
    holds: str
    seconds: int
    gpus: int = 1
    nccl: bool = False
