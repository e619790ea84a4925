"""FlashAttention for CUDA: torch's own copy (`CudaFlash`), and versions 2, 3 and 4 of the package flash-attn.

FlashAttention aligns a window at the bottom right: of T rows and S columns, row a sees columns a + S - T - left to
a + S - T + right, and -1 is an unbounded side. FlashAttention-2 and torch's copy of it change some windows:

- A side of S or more becomes unbounded. If T > S, a right side of S or more may still hide columns from the top rows.
- An unbounded side beside a bounded one becomes S. If T > S + 1, the top rows then lose columns that they see.

FlashAttention-3 does neither. `cut_rows` cuts the tiles whose window would hide the wrong pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from armillary.attention.kernels.inputs import HALVES, HeadDims, Inputs, Limits
from armillary.attention.kernels.kernel import (
    ALIGNMENT,
    BackwardTensors,
    Lengths,
    PackingKernel,
    Scores,
    Sequences,
    Tile,
    contiguous_rows,
    pad_head_dims,
)
from armillary.attention.mask import Window

_torch_forward: Any = cast(Any, torch.ops.aten)._flash_attention_forward
_torch_backward: Any = cast(Any, torch.ops.aten)._flash_attention_backward

FLASH = Limits(
    device="cuda", dtypes=HALVES, head_dims=HeadDims(largest=256, multiple=8, pads_values=True), min_capability=(8, 0)
)
"""Limits of torch's FlashAttention-2, from which the other versions' limits are derived."""
WITH_SOFTCAP = replace(FLASH, softcap=True)
FLASH_ATTN_2, FLASH_ATTN_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
FLASH_ATTN_4 = "flash_attn.cute.interface"
"""Modules of the package's versions, which are imported at the first call."""
REPLACEMENTS = {"FA3": "flash_attn_3", "FA4": "flash_attn_4"}
"""Names of our kernels for the implementations that `torch.nn.attention.activate_flash_attention_impl` puts in place of
torch's op."""


class FlashCall(NamedTuple):
    """One call of a FlashAttention kernel, with `window_of`; `lengths` is None if tensors are not packed."""

    window: tuple[int, int]
    scores: Scores
    lengths: Lengths | None = None


class Flash(PackingKernel):
    """Computes nearly any band in one call, and small pieces together in one call.

    Values narrower than q and k are padded, because versions differ in the pairs of head dims that they support: 2 has
    none, and 3 and 4 have (192, 128), of latent attention, in forward earlier than in backward. Head dims 192 and 128
    take 20% more FLOPs in forward and 15% in backward.

    A subclass calls the package's functions, on tensors [B, T, H, D] or, with `FlashCall.lengths`, on packed tensors
    [tokens, H, D].
    """

    limits: ClassVar[Limits] = FLASH

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        """Returns (out, lse [B, H, T] or [H, tokens])."""

    @abstractmethod
    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv)."""

    def pad(self, *tensors: Tensor) -> list[Tensor]:
        """Returns tensors [..., D] of the head dims that the kernel takes: of one."""
        return pad_head_dims(*tensors)

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_rows(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = (contiguous_rows(x, ALIGNMENT) for x in (q, k, v))
        return self._forward(q, k, v, FlashCall(window_of(band, q.shape[1], k.shape[1]), scores))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (contiguous_rows(x, ALIGNMENT) for x in (dout, q, k, v, out))
        tensors = (dout, q, k, v, out, lse)
        return self._backward(tensors, FlashCall(window_of(band, q.shape[1], k.shape[1]), scores))

    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        return window_of(band, queries, keys)  # one call has one window for all of its sequences

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, _packed_call(sequences, scores, q))

    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(tensors, _packed_call(sequences, scores, tensors[1]))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        q, k, padded_v = self.pad(q, k, v)
        out, lse = self.call_forward(q, k, padded_v, call)
        # A copy of a part, so that the padding is not saved for backward.
        return out[..., : v.shape[-1]].contiguous(), lse.mT

    def _backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = self.pad(*tensors[:5])
        lse = tensors[5].mT.contiguous()  # [B, H, T] or [H, tokens]
        dq, dk, dv = self.call_backward((dout, q, k, v, out, lse), call)
        return dq, dk, dv[..., : tensors[3].shape[-1]]


def _packed_call(sequences: Sequences, scores: Scores, x: Tensor) -> FlashCall:
    window = window_of(sequences.band, sequences.queries[0], sequences.keys[0])
    return FlashCall(window, scores, sequences.lengths(x.device))


def window_of(band: Window, queries: int, keys: int) -> tuple[int, int]:
    """Returns FlashAttention's (left, right) for the band of a trimmed tile; -1 is an unbounded side."""
    low, high = band
    # A trimmed tile has low <= S - T <= high, so a bounded side is not negative.
    corner = keys - queries
    return -1 if low is None else corner - low, -1 if high is None else high - corner


def cut_rows(tile: Tile) -> tuple[Tile, ...]:
    """Cuts a tile by rows into pieces for which FlashAttention-2 keeps the window. Most tiles need no cut."""
    low, high = tile.offsets
    queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    left_width, right_width = window_of((low, high), queries, keys)
    # The two changes of the module's docstring: a right side of S or more, and a left side alone if T > S + 1.
    is_kept = right_width < keys if right_width >= 0 else left_width < 0 or queries <= keys + 1
    if is_kept:
        return (tile,)
    # Cut where a bound begins or ceases to hide columns: `low` hides some from row a if low > -a, `high` if high < S -
    # 1 - a. Then no piece with a bound has T > S + 1.
    ends = {tile.q0, tile.q1}
    ends |= set() if low is None else {tile.q0 + 1 - low}
    ends |= set() if high is None else {tile.q0 + keys - 1 - high}
    pieces = (tile.rows(start, stop) for start, stop in pairwise(sorted(ends)))
    return tuple(piece for piece in pieces if piece)


# -- torch ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaFlash(Flash):
    """torch's own FlashAttention-2 (arXiv 2307.08691). Needs no package besides torch. Without softcap."""

    name: str = "cuda_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        reason, replacement = super().refuses(inputs), REPLACEMENTS.get(inputs.activated or "")
        if reason is None and replacement is not None:
            return (
                f"{inputs.activated} is activated in place of torch's op; {replacement} calls it with all its features"
            )
        # Backward of head dims 193 to 224 needs more shared memory than these GPUs have.
        small = inputs.capability is not None and ((8, 6) <= inputs.capability <= (8, 9) or inputs.capability[0] == 12)
        if reason is None and small and 192 < inputs.head_dim <= 224:
            return f"has no backward for head dim {inputs.head_dim} on compute capabilities 8.6 to 8.9 and 12.x"
        return reason

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        lengths_or_sizes = call.lengths or (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = _torch_forward(q, k, v, *lengths_or_sizes, 0.0, False, False, **self._options(call))
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        q, k = tensors[1:3]
        lengths_or_sizes = call.lengths or (None, None, q.shape[1], k.shape[1])
        rng_state = q.new_empty(2, dtype=torch.uint64)  # unused without dropout
        options = (0.0, False, rng_state, rng_state)
        return _torch_backward(*tensors, *lengths_or_sizes, *options, **self._options(call))

    def _options(self, call: FlashCall) -> dict[str, float]:
        left_width, right_width = call.window
        return {"scale": call.scores.scale, "window_size_left": left_width, "window_size_right": right_width}


# -- flash-attn -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlashAttn2(Flash):
    """Version 2 (arXiv 2307.08691): `CudaFlash` with softcap."""

    name: str = "flash_attn_2"
    limits: ClassVar[Limits] = replace(WITH_SOFTCAP, module=FLASH_ATTN_2)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        package, options = import_module(FLASH_ATTN_2), self._options(call) | {"return_softmax": False}
        if call.lengths is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(q, k, v, *call.lengths, **options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        options = self._options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        package = import_module(FLASH_ATTN_2)
        if call.lengths is None:
            package._flash_attn_backward(*tensors, dq, dk, dv, **options)
        else:
            package._flash_attn_varlen_backward(*tensors, dq, dk, dv, *call.lengths, **options)
        return dq, dk, dv

    def _options(self, call: FlashCall) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": call.scores.scale,
            "causal": False,
            "window_size_left": call.window[0],
            "window_size_right": call.window[1],
            "softcap": call.scores.softcap or 0.0,
            "alibi_slopes": None,
        }


@dataclass(frozen=True)
class FlashAttn3(Flash):
    """Version 3 (arXiv 2407.08608): the fastest kernel on Hopper (H100, H200), and only for Hopper. With softcap.

    Args:
        sm_margin: number of multiprocessors that forward leaves to other kernels. Forward occupies all others until it
            ends, so with a margin of 0 NCCL's kernels wait for its end.
    """

    name: str = "flash_attn_3"
    sm_margin: int = 0
    limits: ClassVar[Limits] = replace(WITH_SOFTCAP, majors=(9,), module=FLASH_ATTN_3)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        options = {"softmax_scale": call.scores.scale, "causal": False}
        if call.lengths is not None:
            options |= call.lengths.by_name
        out, lse, *_ = self._call("_flash_attn_forward", (q, k, v), call, options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
        ends_q, ends_k, longest_q, longest_k = call.lengths or (None, None, None, None)
        # The two None between them are `seqused_q` and `seqused_k`: all tokens of each sequence are used.
        lengths_args = (ends_q, ends_k, None, None, longest_q, longest_k)
        causal = False  # passed by position, because releases name the parameter differently
        arguments = (*tensors, *lengths_args, dq, dk, dv, call.scores.scale, causal)
        options = {"deterministic": torch.are_deterministic_algorithms_enabled()}
        self._call("_flash_attn_backward", arguments, call, options)
        return dq, dk, dv

    def _call(self, name: str, arguments: tuple[Any, ...], call: FlashCall, options: dict[str, Any]) -> Any:
        function = getattr(import_module(FLASH_ATTN_3), name)
        # Releases until November 2025 take the window as one argument `window_size`, and have no defaults for unused
        # parameters, which get None here.
        accepted = parameters(function)
        options = options | {"softcap": call.scores.softcap or 0.0, "sm_margin": self.sm_margin}
        if any(p.name == "window_size" for p in accepted):
            options["window_size"] = call.window
        else:
            options["window_size_left"], options["window_size_right"] = call.window
        defaults = {p.name: None for p in accepted[len(arguments) :] if p.default is p.empty and p.name not in options}
        return function(*arguments, **defaults, **options)


@cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    # `torch.library.custom_op` keeps the function that it wraps as `_init_fn`.
    return tuple(signature(getattr(function, "_init_fn", function)).parameters.values())


@dataclass(frozen=True)
class FlashAttn4(Flash):
    """Version 4, for Blackwell (arXiv 2603.05451). torch's `activate_flash_attention_impl("FA4")` installs it too.

    Called directly, its backward supports windows in every release of torch.
    """

    name: str = "flash_attn_4"
    limits: ClassVar[Limits] = replace(
        FLASH,
        majors=(9, 10),
        head_dims_by_major=((10, HeadDims(largest=128, multiple=8, pads_values=True, exceptions=((256, 256),))),),
        module=FLASH_ATTN_4,
    )

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        options = self._options(call) | {"return_lse": True}
        out, lse, *_ = import_module(FLASH_ATTN_4)._flash_attn_fwd(q, k, v, **options)
        return out, lse

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        options = self._options(call) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        dq, dk, dv, *_ = import_module(FLASH_ATTN_4)._flash_attn_bwd(q, k, v, out, dout, lse, **options)
        return dq, dk, dv

    def _options(self, call: FlashCall) -> dict[str, Any]:
        # This interface takes None for an unbounded side, not -1, and no window beside `causal`.
        left_width, right_width = (None if side < 0 else side for side in call.window)
        is_causal = left_width is None and right_width == 0
        options: dict[str, Any] = {"softmax_scale": call.scores.scale, "causal": is_causal}
        if not is_causal:
            options |= {"window_size_left": left_width, "window_size_right": right_width}
        return options if call.lengths is None else options | call.lengths.by_name
