"""The attention kernel of a run: on its device or, in a dry run without a GPU, on each family of accelerators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from armillary.attention.kernels import FlashAttn3, Inputs, Kernel, choose_kernel, default_margin, kernel_candidates
from armillary.attention.kernels.limits import FAMILIES
from armillary.models import GPTConfig, LlamaConfig
from armillary.train.config import Config
from armillary.train.config.model_sizes import model_config

Capability = tuple[int, int]
DRY_RUN_CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities that a dry run shows on a machine without a GPU."""


def kernels_of(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, capability: Capability | None = None
) -> list[ChosenKernel]:
    """Returns the attention kernel for each device of a dry run, with the reasons against faster ones.

    The device is the CPU if so configured, else a GPU of this capability: by default this machine's, or one of each
    family. Packages count as installed if they are on this machine.
    """
    if config.train.device == "cpu":
        return [_explain_choice(inputs_of(config, model, dtype, torch.device("cpu")), config.parallel.kernel)]
    inputs = inputs_of(config, model, dtype, torch.device("cuda"))
    known_capability = inputs.capability if capability is None else capability
    return [
        _explain_choice(replace(inputs, capability=each), config.parallel.kernel)
        for each in ([known_capability] if known_capability else DRY_RUN_CAPABILITIES)
    ]


def check_kernel(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    """Checks that the configured kernel can run the model's attention on this device. Communicates nothing.

    Raises:
        ValueError: it cannot; names the flag, the reason, and kernels that can.
    """
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    try:
        choose_kernel(inputs_of(config, model, dtype, device), config.parallel.kernel)
    except ValueError as error:
        raise ValueError(f"--parallel.kernel {config.parallel.kernel}: {error}") from error


def sm_margin(config: Config, ring: int) -> int:
    """Returns the multiprocessors that FlashAttention-3 leaves to NCCL in a run with `ring` ranks on its ring.

    0 in a compiled graph, which looks kernels up by name.
    """
    if config.cuda.sm_margin is not None:
        return config.cuda.sm_margin
    return default_margin(ring) if config.parallel.compiler is None else 0


def kernel_with_margin(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device, ring: int
) -> str | Kernel | None:
    """Returns the kernel of a run's attention method: the name in the configuration, or FlashAttention-3 with a margin.

    The margin matters only if FlashAttention-3 is the kernel that would run.

    Args:
        ring: ranks on the ring.
    """
    # A margin is a field of FlashAttention-3's kernel object. Other kernels have none, and are passed on by name.
    name, margin = config.parallel.kernel, sm_margin(config, ring)
    kernel = choose_kernel(inputs_of(config, model, dtype, device), name) if margin else None
    return replace(kernel, sm_margin=margin) if isinstance(kernel, FlashAttn3) else name


def inputs_of(config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Returns the kernel inputs of the model's layers on this machine's device."""
    head = torch.empty(model.head_dim, dtype=dtype, device="meta")
    has_window = isinstance(model, LlamaConfig) and model.window is not None
    return replace(Inputs.of(head, head, device=device), windowed=has_window, documents=config.data.documents)


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that runs on one kind of device.

    Args:
        device: a description such as "compute capability 9.0 (Hopper)".
        name: name of the kernel; None if the requested kernel is refused for the block.
        rejected: the reasons against kernels that are preferred to it, or against the requested one, by name.
    """

    device: str
    name: str | None
    rejected: dict[str, str]


def _explain_choice(inputs: Inputs, requested_kernel: str | None) -> ChosenKernel:
    """Returns the kernel for these inputs and the reasons against faster ones."""
    device = inputs.device
    if inputs.capability is not None:
        number = ".".join(map(str, inputs.capability))
        device = f"compute capability {number} ({FAMILIES.get(inputs.capability[0], 'newer')})"
    candidates = [
        candidate for candidate in kernel_candidates(inputs) if candidate.kernel.limits.device in (None, inputs.device)
    ]
    if requested_kernel is not None:
        refusal = next(
            (candidate.refusal for candidate in candidates if candidate.kernel.name == requested_kernel),
            "of another device",
        )
        return ChosenKernel(
            device, requested_kernel if refusal is None else None, {requested_kernel: refusal} if refusal else {}
        )
    name = choose_kernel(inputs).name
    better_candidates = candidates[: [candidate.kernel.name for candidate in candidates].index(name)]
    return ChosenKernel(device, name, {candidate.kernel.name: candidate.reason for candidate in better_candidates})
