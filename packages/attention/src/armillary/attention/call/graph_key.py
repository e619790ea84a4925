"""Attention calls encoded as numbers and strings, which an op may take and on which torch.compile can guard.

A graph must not depend on Python objects, so the key of a call has, instead of each object:

    method    -> its registered number
    mask      -> `AttentionMask.sides`, with documents and patterns in a separate tensor: one graph for all documents
    layout    -> a separate tensor: one graph for all layouts, and so for all lengths
    kernel    -> its name
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
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.parts import layout_of_text

NUMBERS_SCHEMA = "Tensor? mask_numbers, Tensor? layout_numbers, Tensor? key_layout_numbers"
OP_KEY_SCHEMA = "int call, SymInt[] numbers, float scale, float softcap, str text"
AUTOCAST_DTYPES = {
    "": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Dtypes of autocast by name; "" is autocast off."""


class CallNumbers(NamedTuple):
    """The parts of a call that are tensors of integers on the CPU, so that other values need no new graph.

    The arguments of the ops in the order of `NUMBERS_SCHEMA`; all None in eager mode.

    Args:
        mask: `AttentionMask.numbers`; None without documents and pattern.
        layout, key_layout: `SequenceLayout.numbers`; None for no layout.
    """

    mask: Tensor | None = None
    layout: Tensor | None = None
    key_layout: Tensor | None = None

    @classmethod
    def of(cls, options: AttentionOptions) -> CallNumbers:
        layouts = (None if layout is None else layout.numbers for layout in (options.layout, options.key_layout))
        return cls(options.mask.numbers, *layouts)


class OpKey(NamedTuple):
    """The arguments of the ops that describe a call, in the order of `OP_KEY_SCHEMA`.

    Args:
        call: registered number of the call in eager mode; -1 in a graph, where the other fields describe the call.
        numbers, scale, softcap, text: set by `GraphKey.pack`.
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
    """Sizes of a call on hidden states: H, K, D, and the number of `ProjectionParts.tensors`."""

    heads: int
    key_heads: int
    head_dim: int
    tensors: int


class GraphKey(NamedTuple):
    """The description of a call in a graph, without its tensors.

    Args:
        method: registered number of the method.
        sides: `AttentionMask.sides`, three numbers.
        shard_tokens: `shard_tokens`, numbers of queries and of keys.
        kernel: its name; "" for None.
        autocast: name of autocast's dtype for projections (`autocast_name`).
        projected: the sizes of a call on hidden states; None for calls on q, k and v.
    """

    method: int
    sides: Sequence[int]
    return_lse: bool
    scale: float
    softcap: float | None
    shard_tokens: Sequence[int]
    kernel: str
    autocast: str = ""
    projected: ProjectedDims | None = None

    @classmethod
    def of(
        cls,
        method: AttentionMethod,
        head_dim: int,
        options: AttentionOptions,
        shard_tokens: Sequence[int] = (0, 0),
        autocast: str = "",
        projected_dims: ProjectedDims | None = None,
    ) -> GraphKey:
        """Returns the key of a call.

        Raises:
            ValueError: the kernel is an object that is not in `KERNELS`, where the op looks up its name.
        """
        mask, kernel = options.mask, options.kernel
        if not (isinstance(kernel, str | None) or any(kernel is known_kernel for known_kernel in KERNELS)):
            names = ", ".join(known_kernel.name for known_kernel in KERNELS)
            raise ValueError(f"torch.compile takes kernels of {names}; got {kernel}")
        return cls(
            method.registered_id,
            mask.sides,
            options.return_lse,
            head_dim**-0.5 if options.scale is None else float(options.scale),  # the schema has no optional float
            options.softcap,
            shard_tokens,
            "" if kernel is None else kernel if isinstance(kernel, str) else kernel.name,
            autocast,
            projected_dims,
        )

    def pack(self) -> OpKey:
        """Returns the op's arguments. `unpack` is the inverse."""
        return OpKey(
            -1,  # no registered call
            # Seven numbers, because a mask has three sides; then the dims if it is a call on hidden states.
            [self.method, *self.sides, int(self.return_lse), *self.shard_tokens, *(self.projected or ())],
            self.scale,
            self.softcap or 0.0,  # a softcap is above 0, so 0 is free to mean None
            "|".join((self.kernel, self.autocast)),
        )

    @classmethod
    def unpack(cls, key: OpKey, shapes_only: bool = False) -> GraphKey:
        """Returns the key from the op's arguments.

        Args:
            shapes_only: True takes a causal mask instead of the call's, for callers that need only shapes. While a
                graph is traced, the sides of the mask may be symbols, and reading them would specialize the graph to
                this mask.
        """
        method, *sides, return_lse, tokens, key_tokens = key.numbers[:7]
        dims = key.numbers[7:]
        return cls(
            int(method),
            AttentionMask().sides if shapes_only else sides,
            bool(return_lse),
            key.scale,
            key.softcap or None,
            (tokens, key_tokens),
            *key.text.split("|"),
            projected=ProjectedDims(*dims) if dims else None,
        )

    def options(self, numbers: CallNumbers) -> AttentionOptions:
        """Returns the options of the call."""
        return AttentionOptions(
            AttentionMask.read(self.sides, numbers.mask),
            layout_of_numbers(numbers.layout),
            layout_of_numbers(numbers.key_layout),
            self.scale,
            self.softcap,
            self.kernel or None,
            self.return_lse,
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Autocast's dtype for projections when the call was traced; None for `autocast` ""."""
        return AUTOCAST_DTYPES[self.autocast]


def autocast_name(x: Tensor) -> str:
    """Returns the name of autocast's dtype for projections of x; "" if autocast is off or x is float64."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return ""
    dtype = torch.get_autocast_dtype(device_type)
    return next(name for name, candidate in AUTOCAST_DTYPES.items() if candidate == dtype)


def read_layout(text: str) -> SequenceLayout | None:
    """Returns the layout of a `SequenceLayout.text`; None for ""."""
    return layout_of_text(text) if text else None


def layout_of_numbers(numbers: Tensor | None) -> SequenceLayout | None:
    """Returns the layout of a `SequenceLayout.numbers`, the same object for all layers of a step; None for None."""
    return None if numbers is None else _decode_layout(numbers.numpy().tobytes())


@lru_cache(maxsize=256)
def _decode_layout(encoded: bytes) -> SequenceLayout:
    return SequenceLayout.of_numbers(np.frombuffer(encoded, dtype=np.int64).tolist())


def shard_tokens(method: AttentionMethod, layout: SequenceLayout | None, tokens: int) -> int:
    """Returns the number of tokens of this rank's sequence shard, from which an op computes the shapes of its results.

    While a graph is traced it is a symbol, unlike the values of `CallNumbers`.

    Args:
        layout: layout over all ranks of the method or over its sequence axis; None if there is one shard.
        tokens: number of tokens of this rank.
    """
    if layout is None:
        return tokens
    # Not a sum of `sizes`: torch.compile would make each of them a symbol at the first length that changes it.
    head_ranks = method.shards // method.sequence_shards
    shard, ranks = method.shard // head_ranks, head_ranks if len(layout.sizes) == method.shards else 1
    return layout.ends[(shard + 1) * ranks] - layout.ends[shard * ranks]
