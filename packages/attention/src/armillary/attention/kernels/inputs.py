"""The inputs that a kernel supports: the properties of a call and its device, and a kernel's limits as data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.core.internal import compat

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Supported dtypes. Narrower ones, such as float8, are not, because their tensors need scales."""
HALVES = (torch.float16, torch.bfloat16)
FAMILIES = {7: "Volta, Turing", 8: "Ampere, Ada", 9: "Hopper", 10: "Blackwell", 11: "Thor", 12: "RTX Blackwell"}
"""GPU architectures by the major number of their compute capability."""


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
        """Returns the inputs of a call on this machine; `device` replaces that of q."""
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
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@compat.constant_when_traced
def activated_implementation() -> str | None:
    """Name of the implementation that has replaced torch's flash attention, as in `Inputs.activated`."""
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


# -- limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadDims:
    """Supported head dims of q and k, and of v: at most `largest`, and multiples of `multiple`.

    Args:
        pads_values: True if the kernel has one head dim, so that v is padded to that of q and k, and must not be wider.
        exceptions: further supported pairs (head dim of q and k, head dim of v).
    """

    largest: int | None = None
    multiple: int = 1
    pads_values: bool = False
    exceptions: tuple[tuple[int, int], ...] = ()

    def refuses(self, qk: int, v: int) -> str | None:
        too_large = self.largest is not None and max(qk, v) > self.largest
        wrong_dims = qk % self.multiple or v % self.multiple
        if (qk, v) in self.exceptions or not (too_large or wrong_dims or (self.pads_values and qk < v)):
            return None
        words = ["head dims", *(["that of v at most that of q and k"] if self.pads_values else [])]
        words += [f"each at most {self.largest}"] if self.largest else []
        words += [f"each a multiple of {self.multiple}"] if self.multiple > 1 else []
        exceptions = "".join(f", or {a} and {b}" for a, b in self.exceptions)
        return f"needs {', '.join(words)}{exceptions}, not {qk} and {v}"


@dataclass(frozen=True)
class Limits:
    """Supported inputs of a kernel.

    Args:
        device: device type; None: any.
        head_dims_by_major: pairs of a major compute capability and the head dims supported there, if they differ.
        majors: supported major compute capabilities; None: all from `min_capability` on.
        deterministic: True if the kernel can add gradients in a fixed order.
        module: Python module that must be installed; None for kernels of torch.
    """

    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dims: HeadDims = HeadDims()
    head_dims_by_major: tuple[tuple[int, HeadDims], ...] = ()
    min_capability: tuple[int, int] = (0, 0)
    majors: tuple[int, ...] | None = None
    softcap: bool = False
    deterministic: bool = True
    module: str | None = None

    def refuses(self, inputs: Inputs) -> str | None:
        # 1. The device. An unknown compute capability passes a minimum, but not a list of majors.
        capability = inputs.capability
        if self.device not in (None, inputs.device):
            return f"runs on {'the CPU' if self.device == 'cpu' else 'CUDA'}, not on {inputs.device}"
        major, capability_text = (0, "an unknown one") if capability is None else (capability[0], _dotted(capability))
        if self.majors is not None and major not in self.majors:
            accepted_text = " or ".join(f"{accepted} ({FAMILIES[accepted]})" for accepted in self.majors)
            return f"needs compute capability {accepted_text}, not {capability_text}"
        if capability is not None and capability < self.min_capability:
            family = FAMILIES.get(self.min_capability[0], "Maxwell")
            return f"needs compute capability {_dotted(self.min_capability)} ({family}) or above, not {capability_text}"
        # 2. Shapes and dtypes.
        head_dims = dict(self.head_dims_by_major).get(major, self.head_dims)
        if (reason := head_dims.refuses(inputs.head_dim, inputs.value_dim)) is not None:
            return reason
        if inputs.dtype not in self.dtypes:
            *names, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"takes {', '.join(names)} and {last}, not {inputs.dtype}"
        # 3. Features, and the package itself.
        if inputs.softcap is not None and not self.softcap:
            return "has no softcap"
        if inputs.deterministic and not self.deterministic:
            return "adds gradients up in any order, and deterministic algorithms are required"
        return None if self.module is None or is_installed(self.module) else f"{self.module} is not installed"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@compat.constant_when_traced
def is_installed(module: str) -> bool:
    """Returns True if a module can be imported, without importing it or its parent packages."""
    return module_exists(module)


@cache
def module_exists(module: str) -> bool:
    """Cached `is_installed`: the search takes longer than a kernel launch."""
    # flash-attn 4 also installs a `flash_attn`, but without the modules of version 2, so it is not enough to find the
    # parent package. `find_spec` would import the parents; `PathFinder` searches their folders instead.
    package = module.rpartition(".")[0]
    if module in sys.modules or not package:
        return find_spec(module) is not None
    return module_exists(package) and PathFinder.find_spec(module, _folders(package)) is not None


def _folders(package: str) -> list[str]:
    outer = package.rpartition(".")[0]
    spec = PathFinder.find_spec(package, _folders(outer)) if outer else find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())
