"""Settings of CUDA and NCCL, made before either is used."""

from __future__ import annotations

import os
from dataclasses import dataclass

from armillary.core.parts import binds_device
from armillary.train.config.sections import Config, CudaConfig
from armillary.train.kernels import sm_margin
from armillary.train.runtime.device import allocator_settings

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class CudaSetup:
    """Settings of a run on GPUs.

    Args:
        allocator: settings of torch's allocator; None: those of the environment.
        device_id: argument of `init_process_group`. With a device NCCL connects eagerly, and a new communicator is
            split off an existing one; None: NCCL connects at the first collective.
        high_priority: mesh axes whose communicators run on streams of high priority.
        max_ctas: maximum number of thread blocks of an NCCL kernel on these axes; None: NCCL decides.
        sm_margin: number of multiprocessors that FlashAttention-3 leaves to NCCL.
        connections: number of the GPU's hardware work queues. Streams that share a queue wait for each other.
    """

    allocator: str | None
    device_id: str | None
    high_priority: tuple[str, ...]
    max_ctas: int | None
    sm_margin: int
    connections: int


def cuda_setup(config: Config, ring: int) -> CudaSetup:
    """Returns the CUDA and NCCL settings of a run with `ring` ranks on the ring, equal on every rank."""
    settings = config.cuda
    device_is_bound = binds_device(settings.bind_device, with_gloo=config.optimizer.cpu_offload)
    return CudaSetup(
        allocator=allocator_settings(settings.expandable_segments),
        device_id="cuda:LOCAL_RANK" if device_is_bound else None,
        high_priority=("ring", "ulysses") if settings.high_priority else (),
        max_ctas=settings.max_ctas,
        sm_margin=sm_margin(config, ring),
        connections=connections(settings),
    )


def connections(settings: CudaConfig) -> int:
    """Returns the number of the GPU's work queues, from the environment or else from the configuration."""
    return int(os.environ.get(CONNECTIONS) or settings.connections)


def set_connections(settings: CudaConfig) -> None:
    """Sets the number of the GPU's work queues in the environment, which CUDA reads when it starts."""
    os.environ[CONNECTIONS] = str(connections(settings))
