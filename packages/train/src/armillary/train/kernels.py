"""The attention kernel of a run: on its device or, in a dry run without a GPU, on each family of accelerators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from armillary.attention.parts import (
    FAMILIES,
    FlashAttn3,
    Inputs,
    Kernel,
    choose_kernel,
    default_margin,
    kernel_candidates,
)
from armillary.data.console import flag_in_errors
from armillary.models import GPTConfig, LlamaConfig
from armillary.train.config.check import model_config
from armillary.train.config.sections import Config

Capability = tuple[int, int]
"""Compute capability of a GPU, (major, minor)."""
DRY_RUN_CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities that a dry run shows on a machine without a GPU."""


def kernels_of(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, capability: Capability | None = None
) -> list[ChosenKernel]:
    """Returns the attention kernel on each device of a dry run, with the reasons against faster kernels.

    The device is the CPU if the configuration names it, else a GPU. A kernel's package, such as flash-attn, counts as
    installed if it is installed on this machine.

    Args:
        capability: compute capability of the GPU; by default that of this machine's GPU, without one each of
            `DRY_RUN_CAPABILITIES` in turn.
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
        ValueError: the kernel cannot; the message names the flag, the reason, and kernels that can.
    """
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    with flag_in_errors(f"--parallel.kernel {config.parallel.kernel}"):
        choose_kernel(inputs_of(config, model, dtype, device), config.parallel.kernel)


def sm_margin(config: Config, ring: int) -> int:
    """Returns the number of multiprocessors that FlashAttention-3 leaves to NCCL, with `ring` ranks on the ring."""
    if config.cuda.sm_margin is not None:
        return config.cuda.sm_margin
    # A compiled graph looks a kernel up by its name, which does not include the margin.
    return default_margin(ring) if config.parallel.compiler is None else 0


def kernel_with_sm_margin(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device, ring: int
) -> str | Kernel | None:
    """Returns the kernel of a run's attention method, to be set as `Method.kernel`.

    Args:
        ring: number of ranks on the ring.

    Returns:
        If FlashAttention-3 would run with a margin: the kernel object, which has the margin as a field. Otherwise the
        name in the configuration; None: the fastest kernel.
    """
    name, margin = config.parallel.kernel, sm_margin(config, ring)
    kernel = choose_kernel(inputs_of(config, model, dtype, device), name) if margin else None
    return replace(kernel, sm_margin=margin) if isinstance(kernel, FlashAttn3) else name


def inputs_of(config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Returns the properties of the model's attention calls on a device, by which a kernel is chosen."""
    # `Inputs.of` reads only the dtype of q and the last dims of q and v.
    head = torch.empty(model.head_dim, dtype=dtype, device="meta")
    has_window = isinstance(model, LlamaConfig) and model.window is not None
    return replace(Inputs.of(head, head, device=device), windowed=has_window, documents=config.data.documents)


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that runs on one kind of device.

    Args:
        device: a description such as "compute capability 9.0 (Hopper)".
        name: name of the kernel; None if the requested kernel cannot run there.
        rejected: by kernel name, the reasons why faster kernels, or the requested one, do not run.
    """

    device: str
    name: str | None
    rejected: dict[str, str]


def _explain_choice(inputs: Inputs, requested_kernel: str | None) -> ChosenKernel:
    """Returns the kernel for these inputs, and the reasons against faster kernels or the requested one."""
    device = inputs.device
    if inputs.capability is not None:
        number = ".".join(map(str, inputs.capability))
        device = f"compute capability {number} ({FAMILIES.get(inputs.capability[0], 'newer')})"
    # Candidates for this type of device by name, the most preferred first.
    candidates = {
        c.kernel.name: c for c in kernel_candidates(inputs) if c.kernel.limits.device in (None, inputs.device)
    }
    if requested_kernel is not None:
        candidate = candidates.get(requested_kernel)
        refusal = "of another device" if candidate is None else candidate.refusal
        if refusal is not None:
            return ChosenKernel(device, None, {requested_kernel: refusal})
        return ChosenKernel(device, requested_kernel, {})
    chosen_name = choose_kernel(inputs).name
    preferred = takewhile(lambda name: name != chosen_name, candidates)
    return ChosenKernel(device, chosen_name, {name: candidates[name].reason for name in preferred})
