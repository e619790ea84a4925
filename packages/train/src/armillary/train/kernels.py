"""Which attention kernel a run uses: on its device, or, before there is one, on accelerators of each family."""

from __future__ import annotations

from dataclasses import replace

import torch

from armillary.attention.kernels import FlashAttn3, Inputs, Kernel, choose_kernel, default_margin
from armillary.attention.kernels.choice import ChosenKernel, explain_choice
from armillary.models import GPTConfig, LlamaConfig
from armillary.train.config import Config
from armillary.train.model import model_config

Capability = tuple[int, int]
EACH: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities for which a dry run tells it where no GPU is at hand."""


def kernels_of(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, capability: Capability | None = None
) -> list[ChosenKernel]:
    """On the CPU if the configuration asks for it, else on this capability, this machine's GPU, or each family's.

    What is installed is that of this machine.
    """
    if config.train.device == "cpu":
        return [explain_choice(inputs_of(config, model, dtype, torch.device("cpu")), config.parallel.kernel)]
    inputs = inputs_of(config, model, dtype, torch.device("cuda"))
    known = inputs.capability if capability is None else capability
    return [
        explain_choice(replace(inputs, capability=each), config.parallel.kernel)
        for each in ([known] if known else EACH)
    ]


def check_kernel(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a kernel that cannot do what the run is about to ask of it on this device. Communicates nothing.

    Raises:
        ValueError: names the flag, the reason, and kernels that can.
    """
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    try:
        choose_kernel(inputs_of(config, model, dtype, device), config.parallel.kernel)
    except ValueError as error:
        raise ValueError(f"--parallel.kernel {config.parallel.kernel}: {error}") from error


def sm_margin(config: Config, ring: int) -> int:
    """Multiprocessors that FlashAttention-3 leaves to NCCL in a run with so many ranks on its ring.

    None in a compiled graph, which finds kernels by name.
    """
    if config.cuda.sm_margin is not None:
        return config.cuda.sm_margin
    return default_margin(ring) if config.parallel.compiler is None else 0


def kernel_with_margin(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device, ring: int
) -> str | Kernel | None:
    """Returns the kernel of a run's attention method: the name in the configuration, or FlashAttention-3 with a margin.

    The latter where FlashAttention-3 would run, and leaves multiprocessors to NCCL.

    Args:
        ring: ranks on the ring.
    """
    named, margin = config.parallel.kernel, sm_margin(config, ring)
    found = choose_kernel(inputs_of(config, model, dtype, device), named) if margin else None
    return replace(found, sm_margin=margin) if isinstance(found, FlashAttn3) else named


def inputs_of(config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device) -> Inputs:
    """What layers ask of a kernel on a device of this machine; of one without a GPU, what its torch would say."""
    head = torch.empty(model.head_dim, dtype=dtype, device="meta")
    windowed = isinstance(model, LlamaConfig) and model.window is not None
    return replace(Inputs.of(head, head, device=device), windowed=windowed, documents=config.data.documents)
