"""What a run asks of CUDA and NCCL before either is used."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.core.allocator import allocator_settings
from armillary.train.config import Config


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
