"""What the FlashAttention kernels for CUDA share: torch's own and those of the flash-attn package, versions 2 and 3."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels.kernel import Backward, Forward, Inputs, Kernel, Scores, in_rows, refuses_dtype
from armillary.attention.kernels.packing import Lengths, lengths, packed, packs, unpacked, window
from armillary.attention.kernels.windows import cut_rows, window_of
from armillary.attention.mask import Window
from armillary.attention.tiling.tiles import Tile
from armillary.core import compat

ALIGNED = 8
"""Elements of 16 bits: the kernels read 16 bytes at once, from where a row begins."""


class Flash(Kernel):
    """float16 and bfloat16, head dims up to 256 in steps of 8, nearly any band in one call, small pieces together.

    A subclass makes the call, of tensors [B, T, H, D], or, with `lengths`, of packed ones [tokens, H, D]. lse then has
    its heads first: [B, H, T], or [H, tokens].
    """

    @abstractmethod
    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    @abstractmethod
    def call_backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        window: tuple[int, int],
        scores: Scores,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), from (dout, q, k, v, out, lse)."""

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.device != "cuda":
            return f"runs on CUDA, not on {inputs.device}"
        if inputs.capability is not None and inputs.capability < (8, 0):
            return f"needs compute capability 8.0 (Ampere) or above, not {'.'.join(map(str, inputs.capability))}"
        if inputs.head_dim != inputs.value_dim or inputs.head_dim > 256 or inputs.head_dim % 8:
            dims = f"{inputs.head_dim} and {inputs.value_dim}"
            return f"needs one head dim for q, k and v, at most 256 and a multiple of 8, not {dims}"
        return refuses_dtype(inputs.dtype, (torch.float16, torch.bfloat16))

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_rows(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = (in_rows(x, ALIGNED) for x in (q, k, v))
        out, lse = self.call_forward(q, k, v, window_of(band, q.shape[1], k.shape[1]), scores, None)
        return out, lse.mT

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (in_rows(x, ALIGNED) for x in (dout, q, k, v, out))
        tensors = (dout, q, k, v, out, lse.mT.contiguous())
        return self.call_backward(tensors, window_of(band, q.shape[1], k.shape[1]), scores, None)

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[list[int]]:
        return packs(pieces)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
        queries, keys, values, _ = zip(*pieces, strict=True)
        q, k, v = packed(queries), packed(keys), packed(values)
        out, lse = self.call_forward(q, k, v, window(pieces[0]), scores, lengths(pieces))
        return zip(unpacked(out, queries), unpacked(lse.mT, queries), strict=True)

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        douts, queries, keys, values, outs, lses, _ = zip(*pieces, strict=True)
        dout, q, k, v, out = packed(douts), packed(queries), packed(keys), packed(values), packed(outs)
        tensors = (dout, q, k, v, out, packed(lses).mT.contiguous())
        dq, dk, dv = self.call_backward(tensors, window(pieces[0]), scores, lengths(pieces))
        return zip(unpacked(dq, queries), unpacked(dk, keys), unpacked(dv, values), strict=True)


@compat.constant_when_traced
def installed(module: str) -> bool:
    """Whether a module, of a package or by itself, can be imported; imports neither."""
    return found(module)


@cache
def found(module: str) -> bool:
    """`installed`, asked once: looking takes longer than launching a kernel.

    A package alone says little: of flash-attn 4 there is `flash_attn` too, a namespace with nothing of version 2.
    """
    package = module.rpartition(".")[0]
    if module in sys.modules or not package:
        return find_spec(module) is not None
    parent = find_spec(package)
    return parent is not None and PathFinder.find_spec(module, parent.submodule_search_locations or ()) is not None


@cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """What a function of an installed release takes; also of one that `torch.library.custom_op` has made."""
    return tuple(signature(getattr(function, "_init_fn", function)).parameters.values())
