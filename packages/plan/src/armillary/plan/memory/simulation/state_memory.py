"""`StateMemory`: memory of a layer with a state alone, simulated on few tokens and extrapolated linearly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import torch
import torch.distributed._tools.fake_collectives  # pyright: ignore[reportUnusedImport] - collectives on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask
from armillary.attention.call.token_chunks import simulating
from armillary.attention.planning.states import gathered_elements
from armillary.core import Axis, SequenceLayout, short_convolution
from armillary.models.layers.state_mixers import STATE_MIXERS, Recurrence
from armillary.models.state_config import Mixer, StateConfig
from armillary.plan.memory.simulation.live_bytes import LiveBytes
from armillary.plan.memory.simulation.torch_private import fake_group

TOKENS = 512
"""Tokens of a rank in the shortest simulation: enough that its chunks outweigh the gathered states."""
WIDTH = 8
"""Width of the simulated residual stream: so narrow that weights and inputs take no memory."""
STATE_BYTES = torch.float32.itemsize


class LinearBytes(NamedTuple):
    """A linear function of a rank's tokens and of the bytes of gathered states and maps, with values in bytes."""

    fixed: float
    per_token: float
    per_gathered: float

    def at(self, tokens: float, gathered: float) -> float:
        return self.fixed + self.per_token * tokens + self.per_gathered * gathered


@dataclass(frozen=True)
class StateMemory:
    """Memory of a layer with a state, with its outputs [B, T, H, Dv] and without its inputs, weights and gradients.

    Args:
        forward: peak without autograd.
        recording: peak under autograd.
        kept: bytes after forward under autograd.
        backward: peak in backward, at the gradients of the recurrence's chunks.
    """

    forward: LinearBytes
    recording: LinearBytes
    kept: LinearBytes
    backward: LinearBytes

    @classmethod
    @lru_cache(maxsize=64)  # two for each mixer of a search
    def of(cls, mixer: Mixer, states: StateConfig, precision: torch.dtype, sharded: bool) -> Self:
        """Simulates the layer in `precision`, on one rank or as a rank of a sequence axis.

        The rank is one whose chunks all follow another rank's state, as on all ranks but the first.
        """
        # Three simulations give the three coefficients: twice the tokens for `per_token`, and twice the ranks, which
        # gather more states, for `per_gathered`.
        ranks = 2 if sharded else 1
        short, long = (_peaks(mixer, states, precision, TOKENS * n, ranks) for n in (1, 2))
        wide = _peaks(mixer, states, precision, TOKENS * 2, 2 * ranks) if sharded else long
        gathered, more_gathered = (gathered_bytes(mixer, states, n, zigzag=True) for n in (ranks, 2 * ranks))
        linear = list[LinearBytes]()
        for a, b, c in zip(short, long, wide, strict=True):
            per_token, per_gathered = (b - a) / TOKENS, (c - b) / (more_gathered - gathered)
            linear.append(LinearBytes(a - TOKENS * per_token - gathered * per_gathered, per_token, per_gathered))
        return cls(*linear)


@lru_cache(maxsize=1024)
def gathered_bytes(mixer: Mixer, states: StateConfig, ranks: int, zigzag: bool) -> int:
    """Bytes of the states and maps that a layer gathers from all ranks for a row, on zigzag or contiguous shards.

    Each rank beyond the second adds the same number, so layouts of 2 and 3 ranks are enough.
    """
    if ranks == 1:
        return 0
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
    """Returns the zigzag layout of `tokens` pairs of tokens a rank."""
    return SequenceLayout.zigzag(2 * tokens * ranks, ranks)


def _peaks(mixer: Mixer, states: StateConfig, precision: torch.dtype, tokens: int, ranks: int) -> tuple[int, ...]:
    """Returns the bytes of a `StateMemory` for one row of `tokens` tokens a rank."""
    rank = min(1, ranks - 1)
    # A group of its own, because in the tuner the process already has a default group.
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
    """`StateOperations` on one axis and layout, in place of an attention method."""

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
