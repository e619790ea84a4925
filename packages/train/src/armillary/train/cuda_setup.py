"""What a run asks of CUDA and NCCL before either is used."""

from __future__ import annotations

import os
from dataclasses import dataclass

from armillary.core.mesh import binds_device
from armillary.train.config import Config, CudaConfig
from armillary.train.kernels import sm_margin
from armillary.train.runtime.allocator import allocator_settings

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class CudaSetup:
    """What is asked for on GPUs.

    Args:
        allocator: settings that torch's allocator is given; None: those of the environment, as they are.
        device_id: what `init_process_group` is told, so that communicators connect at once and split off each other.
        high_priority: mesh axes whose communicators run on streams of high priority.
        max_ctas: thread blocks, at most, of an NCCL kernel on these axes; None: NCCL decides.
        sm_margin: multiprocessors that FlashAttention-3 leaves to NCCL.
        connections: work queues of the GPU.
    """

    allocator: str | None
    device_id: str | None
    high_priority: tuple[str, ...]
    max_ctas: int | None
    sm_margin: int
    connections: int


def cuda_setup(config: Config, ring: int) -> CudaSetup:
    """Settings of a run with so many ranks on its ring, the same on every rank."""
    asked = config.cuda
    bound = binds_device(asked.bind_device, host_too=config.optimizer.cpu_offload)
    return CudaSetup(
        allocator=allocator_settings(asked.expandable_segments),
        device_id="cuda:LOCAL_RANK" if bound else None,
        high_priority=("ring", "ulysses") if asked.high_priority else (),
        max_ctas=asked.max_ctas,
        sm_margin=sm_margin(config, ring),
        connections=connections(asked),
    )


def connections(asked: CudaConfig) -> int:
    """Work queues of the GPU: those of the environment, or else of the configuration."""
    return int(os.environ.get(CONNECTIONS) or asked.connections)


def set_connections(asked: CudaConfig) -> None:
    """Tells CUDA, which reads the environment when it starts, how many work queues the GPU is to have."""
    os.environ[CONNECTIONS] = str(connections(asked))
