"""Memory of one layer with a state by itself: `StateMemory` simulates it on few tokens and extrapolates linearly.

A layer with a state has no formula, so the formulas of a step take its memory from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout, short_convolution
from armillary.core.internal import simulating
from armillary.models import Mixer, StateConfig
from armillary.models.internal import STATE_MIXERS, Recurrence
from armillary.plan.memory.live_bytes import LiveBytes
from armillary.plan.memory.torch_private import fake_group
from armillary.states import gathered_elements

# Tokens of a rank in the shortest simulation: so many that its chunks need more memory than the gathered states.
TOKENS = 512
# Width of the simulated hidden states: so narrow that gradients of weights and inputs take almost no memory.
WIDTH = 8
# Bytes of an element of a state.
STATE_BYTES = torch.float32.itemsize


class LinearBytes(NamedTuple):
    """Bytes as a linear function of a rank's tokens and of the bytes of states and maps that the layer gathers."""

    fixed: float
    per_token: float
    per_gathered: float

    def at(self, tokens: float, gathered: float) -> float:
        return self.fixed + self.per_token * tokens + self.per_gathered * gathered


@dataclass(frozen=True)
class StateMemory:
    """Memory of a layer with a state: its outputs [B, T, H, Dv] count, its inputs, weights and their gradients do not.

    Args:
        forward: peak of forward without autograd.
        recording: peak of forward under autograd.
        kept: bytes that are allocated after forward under autograd.
        backward: peak in backward, which is at the gradients of the recurrence's chunks.
    """

    forward: LinearBytes
    recording: LinearBytes
    kept: LinearBytes
    backward: LinearBytes

    @classmethod
    @lru_cache(maxsize=64)  # two for each mixer of a search
    def of(cls, mixer: Mixer, states: StateConfig, precision: torch.dtype, sharded: bool) -> Self:
        """Simulates the layer in `precision`.

        Args:
            sharded: True for a sequence over several ranks. Simulates the second rank, because states of other ranks
                enter all of its chunks, as on every rank except the first.
        """
        # Three simulations give the three coefficients. Doubling the tokens gives `per_token`; doubling the ranks,
        # which gather more states, gives `per_gathered`.
        ranks = 2 if sharded else 1
        short, long = (_peaks(mixer, states, precision, TOKENS * n, ranks) for n in (1, 2))
        wide = _peaks(mixer, states, precision, TOKENS * 2, 2 * ranks) if sharded else long
        gathered, more_gathered = (gathered_bytes(mixer, states, n, zigzag=True) for n in (ranks, 2 * ranks))
        linear = list[LinearBytes]()
        for short_bytes, long_bytes, wide_bytes in zip(short, long, wide, strict=True):
            per_token = (long_bytes - short_bytes) / TOKENS
            per_gathered = (wide_bytes - long_bytes) / (more_gathered - gathered)
            fixed = short_bytes - TOKENS * per_token - gathered * per_gathered
            linear.append(LinearBytes(fixed, per_token, per_gathered))
        return cls(*linear)


@lru_cache(maxsize=1024)
def gathered_bytes(mixer: Mixer, states: StateConfig, ranks: int, zigzag: bool) -> int:
    """Bytes of the states and maps that a layer gathers from all ranks for one row, on zigzag or contiguous shards."""
    if ranks == 1:
        return 0
    # Each rank after the second adds the same number of bytes, so layouts of 2 and of 3 ranks give the bytes of any.
    layer = "ssd" if mixer == "mamba2" else "gated_delta_rule"
    two, three = (
        STATE_BYTES
        * sum(
            gathered_elements(
                layer,
                _layout(1, n) if zigzag else SequenceLayout.contiguous(n, n),
                heads=states.heads,
                key_dim=states.key_dim,
                value_dim=states.value_dim,
            )
        )
        for n in (2, 3)
    )
    return two + (ranks - 2) * (three - two)


def _layout(tokens: int, ranks: int) -> SequenceLayout:
    return SequenceLayout.zigzag(2 * tokens * ranks, ranks)


def _peaks(mixer: Mixer, states: StateConfig, precision: torch.dtype, tokens: int, ranks: int) -> tuple[int, ...]:
    """Simulates one row of `tokens` tokens per rank. Returns bytes in the order of `StateMemory`'s fields."""
    rank = min(1, ranks - 1)
    # Not the default process group, because inside of the tuner the process has a real one.
    axis = Axis("ring", rank, ranks, fake_group(rank, ranks), None)
    with torch.device("meta"):
        layer = STATE_MIXERS[mixer](WIDTH, states, 1e-6, _OnAxis(axis, _layout(tokens // 2, ranks))).to(precision)
    with FakeTensorMode(allow_non_fake_inputs=True), simulating():
        layer.to_empty(device="cpu")
        x = torch.empty(1, tokens, WIDTH, dtype=precision, requires_grad=True)
        dout = torch.empty(1, tokens, states.heads, states.value_dim, dtype=precision)
        with LiveBytes() as forward, torch.no_grad():
            layer(x, mask=AttentionMask(), layout=None)
        with LiveBytes() as live:
            out = layer(x, mask=AttentionMask(), layout=None)
            recording, saved_bytes = live.device.peak, live.device.total
            torch.autograd.grad(out, [x, *layer.parameters()], dout, allow_unused=True)  # `o_proj` is not used
        return forward.device.peak, recording, saved_bytes, live.device.peak


class _OnAxis:
    """Stands in for the attention method in a layer: `StateOperations` on a fixed axis and layout."""

    def __init__(self, axis: Axis, layout: SequenceLayout) -> None:
        self.axis, self.layout = axis, layout

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        return short_convolution(x, weight, self.layout, self.axis, bias, mask=mask)

    def recur(
        self, recurrence: Recurrence, inputs: Sequence[Tensor], mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        return recurrence(*inputs, layout=self.layout, axis=self.axis, mask=mask)[0]
