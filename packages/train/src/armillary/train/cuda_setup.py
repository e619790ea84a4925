"""What a run asks of CUDA and NCCL before either is used."""

from __future__ import annotations

import os
from dataclasses import dataclass

from armillary.core import compat
from armillary.train.config import Config

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads settings of its allocator from; the second is the older name."""
EXPANDABLE = "expandable_segments"


@dataclass(frozen=True)
class CudaSetup:
    """What is asked for on GPUs.

    Args:
        allocator: settings that torch's allocator is given; None: those of the environment, as they are.
        device_id: what `init_process_group` is told, so that communicators connect at once and split off each other.
        high_priority: mesh axes whose communicators run on streams of high priority.
        sm_margin: multiprocessors that FlashAttention-3 leaves to NCCL.
    """

    allocator: str | None
    device_id: str | None
    high_priority: tuple[str, ...]
    sm_margin: int


def cuda_setup(config: Config) -> CudaSetup:
    """That of a run, on whichever rank."""
    asked = config.cuda
    bound = asked.bind_device and not config.optimizer.cpu_offload  # with gloo beside NCCL torch cannot split groups
    return CudaSetup(
        allocator=allocator_settings(asked.expandable_segments),
        device_id="cuda:LOCAL_RANK" if bound else None,
        high_priority=("ring",) if asked.high_priority else (),
        sm_margin=asked.sm_margin,
    )


def allocator_settings(expandable: bool) -> str | None:
    """What to give the allocator, besides what the user has set; None: nothing. What they say of segments counts."""
    given = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if not expandable or EXPANDABLE in given:
        return None
    return ",".join(filter(None, (given, f"{EXPANDABLE}:True")))


def set_allocator(setup: CudaSetup) -> None:
    """Gives the allocator its settings; before anything is allocated."""
    if setup.allocator is not None:
        compat.set_allocator(setup.allocator)
