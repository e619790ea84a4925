"""A call in the types that an op's schema has and torch.compile can guard: numbers and text.

While a graph is traced, nothing may depend on Python objects. So a layout enters the op as text, and the graph is
compiled for it; a method as its registered number; a mask as `causal` and its window, with documents and patterns in a
tensor beside the key, so that other documents need no other graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from armillary.attention.call.interface import AttentionMethod
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.kernels import KERNELS
from armillary.attention.mask import AttentionMask, Window
from armillary.core import SequenceLayout

OP_KEY_SCHEMA = "int call, SymInt[] numbers, float scale, float softcap, str text"
AUTOCAST_DTYPES = {
    "": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
UNBOUNDED = -1
"""A window's side that is None, as a number."""


class OpKey(NamedTuple):
    """The arguments of the op pair besides tensors: `OP_KEY_SCHEMA`.

    Args:
        call: registered number of a call that exists, outside of graphs; -1 in a graph, where the others say the call.
    """

    call: int
    numbers: Sequence[int] = ()
    scale: float = 0.0
    softcap: float = 0.0
    text: str = ""

    @property
    def in_graph(self) -> bool:
        return self.call < 0


class ProjectedDims(NamedTuple):
    """Sizes of a call on hidden states: H, K, D, and how many tensors the projections are made of."""

    heads: int
    key_heads: int
    head_dim: int
    tensors: int


class GraphKey(NamedTuple):
    """A call in a graph, without its tensors.

    Args:
        method: registered number of the method.
        layout, key_layout: as `SequenceLayout.text`; "" for None.
        kernel: its name; "" for None.
        autocast: name of the dtype that autocast computes projections in; "" where it is off.
        projected: for calls on hidden states.
    """

    method: int
    causal: bool
    window: Window
    return_lse: bool
    scale: float
    softcap: float | None
    layout: str
    key_layout: str
    kernel: str
    autocast: str = ""
    projected: ProjectedDims | None = None

    @classmethod
    def of(
        cls,
        method: AttentionMethod,
        head_dim: int,
        options: AttentionOptions,
        autocast: str = "",
        projected: ProjectedDims | None = None,
    ) -> GraphKey:
        """The key of a call.

        Raises:
            ValueError: a kernel object that is none of `KERNELS`: the op finds kernels by name.
        """
        mask, kernel = options.mask, options.kernel
        if kernel is not None and not isinstance(kernel, str) and not any(kernel is each for each in KERNELS):
            names = ", ".join(each.name for each in KERNELS)
            raise ValueError(f"torch.compile takes kernels of {names}; got {kernel}")
        return cls(
            method.registered_id,
            mask.causal,
            mask.window or (None, None),
            options.return_lse,
            head_dim**-0.5 if options.scale is None else float(options.scale),
            options.softcap,
            "" if options.layout is None else options.layout.text,
            "" if options.key_layout is None else options.key_layout.text,
            "" if kernel is None else kernel if isinstance(kernel, str) else kernel.name,
            autocast,
            projected,
        )

    def pack(self) -> OpKey:
        """The op's arguments; `unpack` is its inverse."""
        window = (UNBOUNDED if side is None else side for side in self.window or (None, None))
        return OpKey(
            -1,
            [self.method, int(self.causal), *window, int(self.return_lse), *(self.projected or ())],
            self.scale,
            self.softcap or 0.0,
            "|".join((self.layout, self.key_layout, self.kernel, self.autocast)),
        )

    @classmethod
    def unpack(cls, key: OpKey, shapes_only: bool = False) -> GraphKey:
        """The call that was packed.

        Args:
            shapes_only: leaves the mask out, as a causal one. While tracing, its numbers may be symbols: reading them
                would tie the graph to this very mask, and no result's shape depends on it.
        """
        method, causal, before, after, return_lse, *dims = key.numbers
        if shapes_only:
            causal, before, after = 1, UNBOUNDED, UNBOUNDED
        return cls(
            int(method),
            bool(causal),
            (None if before == UNBOUNDED else int(before), None if after == UNBOUNDED else int(after)),
            bool(return_lse),
            key.scale,
            key.softcap or None,
            *key.text.split("|"),
            projected=ProjectedDims(*dims) if dims else None,
        )

    def options(self, mask_numbers: Tensor | None) -> AttentionOptions:
        """The caller's options, with the mask whose `numbers` are given."""
        numbers = None if mask_numbers is None else mask_numbers.numpy().tobytes()
        return AttentionOptions(
            read_mask(self.causal, self.window, numbers),
            read_layout(self.layout),
            read_layout(self.key_layout),
            self.scale,
            self.softcap,
            self.kernel or None,
            self.return_lse,
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast computed projections in when the op was called; None where it was off."""
        return AUTOCAST_DTYPES[self.autocast]


def autocast_name(x: Tensor) -> str:
    """Name of the dtype that autocast computes projections of x in; "" where it is off."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return ""
    dtype = torch.get_autocast_dtype(device_type)
    return next(name for name, each in AUTOCAST_DTYPES.items() if each == dtype)


@lru_cache(maxsize=256)
def read_layout(text: str) -> SequenceLayout | None:
    return SequenceLayout.read(text) if text else None


@lru_cache(maxsize=16)
def read_mask(causal: bool, window: Window, numbers: bytes | None) -> AttentionMask:
    """Returns the mask with these `numbers`; one object for all layers of a step, and for both passes."""
    if numbers is None:
        return AttentionMask(causal, window)
    return AttentionMask.of_numbers(causal, window, np.frombuffer(numbers, dtype=np.int64).tolist())
