"""What a kernel takes, as data, and why it does not take some inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.installed import installed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What attention is computed in here; narrower ones need scales of their own."""
HALVES = (torch.float16, torch.bfloat16)
FAMILIES = {7: "Volta, Turing", 8: "Ampere, Ada", 9: "Hopper", 10: "Blackwell", 11: "Thor", 12: "RTX Blackwell"}
"""Accelerators, by the major number of their compute capability."""


@dataclass(frozen=True)
class Dims:
    """Head dims, of q and k and of v.

    Args:
        most: the largest.
        multiple: of elements.
        equal: whether v's must be that of q and k.
        besides: pairs that are taken too.
    """

    most: int | None = None
    multiple: int = 1
    equal: bool = False
    besides: tuple[tuple[int, int], ...] = ()

    def refuses(self, qk: int, v: int) -> str | None:
        """Why these are not taken."""
        apart = self.equal and qk != v
        uneven = bool(qk % self.multiple or v % self.multiple)
        if (qk, v) in self.besides or not (apart or uneven or max(qk, v) > (self.most or max(qk, v))):
            return None
        words = ["one head dim for q, k and v" if self.equal else "head dims"]
        words += [f"at most {self.most}"] if self.most else []
        words += [f"a multiple of {self.multiple}"] if self.multiple > 1 else []
        besides = "".join(f", or {a} and {b}" for a, b in self.besides)
        return f"needs {', '.join(words)}{besides}, not {qk} and {v}"


@dataclass(frozen=True)
class Limits:
    """What a kernel takes.

    Args:
        device: its type; None: any.
        dtypes: of q, k and v.
        dims: head dims; `dims_of` has those of some major compute capabilities.
        least: compute capability.
        majors: major numbers of compute capabilities; None: all from `least` on.
        softcap: whether it has one.
        deterministic: whether it adds gradients up in one order when asked to.
        module: that must be installed.
    """

    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    dims: Dims = Dims()
    dims_of: tuple[tuple[int, Dims], ...] = ()
    least: tuple[int, int] = (0, 0)
    majors: tuple[int, ...] | None = None
    softcap: bool = False
    deterministic: bool = True
    module: str | None = None

    def refuses(self, inputs: Inputs) -> str | None:
        """Why the inputs are not taken, or None if they are."""
        checks: tuple[Callable[[Inputs], str | None], ...] = (
            self._device,
            self._capability,
            self._dims,
            self._dtype,
            self._rest,
        )
        return next((reason for check in checks if (reason := check(inputs)) is not None), None)

    def _device(self, inputs: Inputs) -> str | None:
        where = {"cpu": "the CPU", "cuda": "CUDA", None: ""}[self.device]
        return None if self.device in (None, inputs.device) else f"runs on {where}, not on {inputs.device}"

    def _capability(self, inputs: Inputs) -> str | None:
        found, got = inputs.capability, "an unknown one"
        if found is not None:
            got = ".".join(map(str, found))
        if self.majors is not None and (found or (0, 0))[0] not in self.majors:
            wanted = " or ".join(f"{major} ({FAMILIES[major]})" for major in self.majors)
            return f"needs compute capability {wanted}, not {got}"
        least = f"{'.'.join(map(str, self.least))} ({FAMILIES.get(self.least[0], 'Maxwell')})"
        return None if found is None or found >= self.least else f"needs compute capability {least} or above, not {got}"

    def _dims(self, inputs: Inputs) -> str | None:
        major = None if inputs.capability is None else inputs.capability[0]
        return dict(self.dims_of).get(major or 0, self.dims).refuses(inputs.head_dim, inputs.value_dim)

    def _dtype(self, inputs: Inputs) -> str | None:
        if inputs.dtype in self.dtypes:
            return None
        *names, last = (str(known).removeprefix("torch.") for known in self.dtypes)
        return f"takes {', '.join(names)} and {last}, not {inputs.dtype}"

    def _rest(self, inputs: Inputs) -> str | None:
        if inputs.softcap is not None and not self.softcap:
            return "has no softcap"
        if inputs.deterministic and not self.deterministic:
            return "adds gradients up in any order, and deterministic algorithms are asked for"
        return None if self.module is None or installed(self.module) else f"{self.module} is not installed"
