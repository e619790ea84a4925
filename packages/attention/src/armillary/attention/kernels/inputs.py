"""The properties of a call that the choice of a kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.core.parts import compat


@dataclass(frozen=True)
class Inputs:
    """Properties of an attention call and of its device, from which the kernels that support it follow.

    They can also be constructed for a GPU that this machine does not have.

    Args:
        device: device type.
        head_dim, value_dim: head dim of q and k, and of v.
        capability: compute capability of a CUDA device; None if it is unknown (a fake tensor) or the device not CUDA.
        cudnn: version of cuDNN, such as 91900 for 9.19; 0 if torch has none; None if unknown.
        deterministic: True if torch raises for algorithms whose results differ from run to run.
        windowed: True if the mask has a window.
        documents: True if the mask has documents or a pattern, which make tiles of many lengths.
        activated: "FA3" or "FA4" if `torch.nn.attention.activate_flash_attention_impl` has replaced torch's flash
            attention by it; None otherwise.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: float | None = None
    capability: tuple[int, int] | None = None
    cudnn: int | None = None
    deterministic: bool = False
    windowed: bool = False
    documents: bool = False
    activated: str | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        softcap: float | None = None,
        mask: AttentionMask | None = None,
        device: torch.device | None = None,
    ) -> Inputs:
        """Returns the inputs of a call on this machine. `device` replaces the device of q."""
        device = device or q.device
        windowed = mask is not None and mask.window is not None
        documents = mask is not None and mask.numbers is not None
        shape = (device.type, q.dtype, q.shape[-1], v.shape[-1], softcap)
        versions = _capability_and_cudnn(device)
        return cls(*shape, *versions, is_deterministic(), windowed, documents, activated=activated_implementation())

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        return f"{self.dtype} on {self.device}, head dims {self.head_dim} (q, k) and {self.value_dim} (v){cap}"


@compat.constant_when_traced
def is_deterministic() -> bool:
    """Returns True if torch raises an error where an algorithm is not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@compat.constant_when_traced
def activated_implementation() -> str | None:
    """Returns the name of the implementation that has replaced torch's flash attention, as in `Inputs.activated`."""
    return cast(Any, torch.nn.attention).current_flash_attention_impl()


@compat.constant_when_traced
def _capability_and_cudnn(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    return _device_versions(device)


@cache
def _device_versions(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    if device.type != "cuda":
        return None, None
    # A fake CUDA tensor may exist on a machine without a GPU.
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return capability, torch.backends.cudnn.version() or 0
