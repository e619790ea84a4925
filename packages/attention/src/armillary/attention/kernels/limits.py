"""The inputs that a kernel supports, as data, and the reason for refusing others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.installed import is_installed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Supported dtypes. Narrower ones, such as float8, are not, because their tensors need scales."""
HALVES = (torch.float16, torch.bfloat16)
FAMILIES = {7: "Volta, Turing", 8: "Ampere, Ada", 9: "Hopper", 10: "Blackwell", 11: "Thor", 12: "RTX Blackwell"}
"""GPU architectures by the major number of their compute capability."""


@dataclass(frozen=True)
class HeadDims:
    """Supported head dims of q and k, and of v.

    Args:
        largest: maximum of both head dims; None for no limit.
        multiple: both head dims must be multiples of this.
        equal: True if v must have the head dim of q and k.
        exceptions: further supported pairs (head dim of q and k, head dim of v).
    """

    largest: int | None = None
    multiple: int = 1
    equal: bool = False
    exceptions: tuple[tuple[int, int], ...] = ()

    def refuses(self, qk: int, v: int) -> str | None:
        """Returns the reason why these head dims are not supported, or None."""
        too_large = self.largest is not None and max(qk, v) > self.largest
        wrong_dims = qk % self.multiple or v % self.multiple
        if (qk, v) in self.exceptions or not (too_large or wrong_dims or (self.equal and qk != v)):
            return None
        words, each = (["one head dim for q, k and v"], "") if self.equal else (["head dims"], "each ")
        words += [f"{each}at most {self.largest}"] if self.largest else []
        words += [f"{each}a multiple of {self.multiple}"] if self.multiple > 1 else []
        exceptions = "".join(f", or {a} and {b}" for a, b in self.exceptions)
        return f"needs {', '.join(words)}{exceptions}, not {qk} and {v}"


@dataclass(frozen=True)
class Limits:
    """Supported inputs of a kernel.

    Args:
        device: device type; None: any.
        dtypes: dtypes of q, k and v.
        head_dims: supported head dims.
        head_dims_by_major: pairs of a major compute capability and the head dims supported there, if they differ.
        min_capability: lowest supported compute capability.
        majors: supported major compute capabilities; None: all from `min_capability` on.
        softcap: True if the kernel supports a softcap.
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
        """Returns the reason why the inputs are not supported, or None."""
        if self.device not in (None, inputs.device):
            return f"runs on {'the CPU' if self.device == 'cpu' else 'CUDA'}, not on {inputs.device}"
        if (reason := self._refuses_capability(inputs.capability)) is not None:
            return reason
        major = 0 if inputs.capability is None else inputs.capability[0]
        head_dims = dict(self.head_dims_by_major).get(major, self.head_dims)
        if (reason := head_dims.refuses(inputs.head_dim, inputs.value_dim)) is not None:
            return reason
        if inputs.dtype not in self.dtypes:
            *names, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"takes {', '.join(names)} and {last}, not {inputs.dtype}"
        if inputs.softcap is not None and not self.softcap:
            return "has no softcap"
        if inputs.deterministic and not self.deterministic:
            return "adds gradients up in any order, and deterministic algorithms are required"
        return None if self.module is None or is_installed(self.module) else f"{self.module} is not installed"

    def _refuses_capability(self, capability: tuple[int, int] | None) -> str | None:
        capability_text = "an unknown one" if capability is None else ".".join(map(str, capability))
        if self.majors is not None and (capability or (0, 0))[0] not in self.majors:
            accepted_text = " or ".join(f"{major} ({FAMILIES[major]})" for major in self.majors)
            return f"needs compute capability {accepted_text}, not {capability_text}"
        if capability is None or capability >= self.min_capability:
            return None
        family = FAMILIES.get(self.min_capability[0], "Maxwell")
        minimum = ".".join(map(str, self.min_capability))
        return f"needs compute capability {minimum} ({family}) or above, not {capability_text}"
