"""All that the choice of a kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.core import compat


@dataclass(frozen=True)
class Inputs:
    """What attention is asked for, and on what: enough to say of each kernel whether it can be used, without a GPU.

    Args:
        device: its type.
        head_dim, value_dim: of q and k, and of v.
        capability: compute capability of a CUDA device; None: not CUDA, or not to be asked (a fake tensor's).
        cudnn: its version, as 91900 for 9.19; None: not to be asked.
        deterministic: whether torch is to refuse algorithms that give other bits on each run.
        windowed, documents: whether the mask has a window; documents, or a pattern, and so pieces of many lengths.
        single: whether queries come one at a time, as in generation.
        activated: the implementation by which `torch.nn.attention.activate_flash_attention_impl` has replaced torch's.
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
    single: bool = False
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
        """Of a call on this machine, or on a device of it that the tensors are not on."""
        device = device or q.device
        windowed = mask is not None and mask.window is not None
        documents = mask is not None and mask.numbers is not None
        shape = (device.type, q.dtype, q.shape[-1], v.shape[-1], softcap)
        return cls(*shape, *_machine(device), windowed=windowed, documents=documents, activated=_activated())

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        return f"{self.dtype} on {self.device}, head dims {self.head_dim} (q, k) and {self.value_dim} (v){cap}"


@compat.constant_when_traced
def is_deterministic() -> bool:
    """Whether torch is to raise an error where an algorithm is not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@compat.constant_when_traced
def _activated() -> str | None:
    return cast(Any, torch.nn.attention).current_flash_attention_impl()


@compat.constant_when_traced
def _machine(device: torch.device) -> tuple[tuple[int, int] | None, int | None, bool]:
    """(capability, cudnn, deterministic)."""
    return (*_asked(device), is_deterministic())


@cache
def _asked(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    if device.type != "cuda":
        return None, None
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return capability, torch.backends.cudnn.version() or 0
