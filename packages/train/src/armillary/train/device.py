"""The device of a rank: settings of CUDA and NCCL, the attention kernel, peak FLOP/s and peak memory."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from armillary.attention.internal import (
    FlashAttn3,
    Inputs,
    Kernel,
    choose_kernel,
    default_margin,
)
from armillary.core.internal import binds_device
from armillary.models import GPTConfig, LlamaConfig

if TYPE_CHECKING:  # checks of a GPU import this module in environments without pydantic
    from armillary.train.config.sections import Config, CudaConfig, TrainConfig


def choose_device(config: TrainConfig, flag: str = "--train.device") -> torch.device:
    """Returns this rank's device: a GPU, made current, if the machine has one for each of its ranks, otherwise the CPU.

    Raises ValueError, with `flag`, on every rank of the machine if `device` is cuda and GPUs are fewer than ranks.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if config.device == "cuda" and gpus < ranks:
        raise ValueError(f"{flag} cuda: {ranks} ranks on this machine, which has {gpus} GPUs; use cpu or auto")
    if config.device == "cpu" or gpus < ranks:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


# Environment variables that torch reads; the second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

EXPANDABLE = "expandable_segments"


def allocator_settings(expandable: bool) -> str | None:
    """Returns the environment's settings with expandable segments added; None if they need no change."""
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if not expandable or EXPANDABLE in settings:  # a setting of expandable segments there takes precedence
        return None
    return ",".join(filter(None, (settings, f"{EXPANDABLE}:True")))


def set_allocator(settings: str | None) -> None:
    """Applies settings in the format of PYTORCH_ALLOC_CONF. Must run before GPU memory is allocated."""
    if settings is not None:
        cast(Any, torch)._C._accelerator_setAllocatorSettings(settings)


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
    return int(os.environ.get(CONNECTIONS) or settings.connections)


def sm_margin(config: Config, ring: int) -> int:
    if config.cuda.sm_margin is not None:
        return config.cuda.sm_margin
    # A compiled graph looks a kernel up by its name, which does not include the margin.
    return default_margin(ring) if config.parallel.compiler is None else 0


def kernel_with_sm_margin(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device, ring: int
) -> str | Kernel | None:
    """Returns the kernel of a run's attention method, to be set as `Method.kernel`.

    If FlashAttention-3 would run with a margin, this is the kernel object, which has the margin as a field. Otherwise
    it is the name in the configuration; None: the fastest kernel.
    """
    name, margin = config.parallel.kernel, sm_margin(config, ring)
    kernel = choose_kernel(inputs_of(config, model, dtype, device), name) if margin else None
    return replace(kernel, sm_margin=margin) if isinstance(kernel, FlashAttn3) else name


def inputs_of(config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device) -> Inputs:
    # `Inputs.of` reads only the dtype of q and the last dims of q and v.
    q, v = (torch.empty(dim, dtype=dtype, device="meta") for dim in (model.head_dim, model.value_dim))
    has_window = isinstance(model, LlamaConfig) and model.window is not None
    return replace(Inputs.of(q, v, device=device), windowed=has_window, documents=config.data.documents)


# Peak of dense bfloat16 FLOP/s, the denominator of MFU, by a word in the device's name; H100 as SXM.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for name_part, peak in PEAK_FLOPS.items() if name_part in name), None)


def peak_memory(device: torch.device) -> int:
    """Returns this rank's peak in bytes: allocated GPU memory on cuda, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
