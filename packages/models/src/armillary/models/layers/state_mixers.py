"""Layers with a recurrent state in place of attention, Gated DeltaNet and Mamba-2, on a sharded sequence.

Both project to queries, keys and values (C, B and x in Mamba-2's paper), pass these through a short convolution, run a
recurrence along the tokens, and apply a gate and a norm to its outputs. Only convolution and recurrence communicate.
The ranks that share the sequence are those of the layer's attention method, which is not called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import over_all_ranks, sequence_axis
from armillary.core import Axis, SequenceLayout, short_convolution
from armillary.models.config import Mixer, StateConfig
from armillary.states import gated_delta_rule, ssd

# Added to the squared length of queries and keys, as in Qwen3-Next.
NORM_EPS = 1e-6

# `gated_delta_rule` or `ssd`: returns the outputs and the final state.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


@runtime_checkable
class StateOperations(Protocol):
    """Convolution and recurrence with a cache, for decoding. A layer whose `attention` has them calls them."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...

    def recur(
        self, recurrence: Recurrence, inputs: Sequence[Tensor], mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


def convolve(
    attention: object,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: AttentionMask,
    layout: SequenceLayout | None,
) -> Tensor:
    """Computes the causal depthwise convolution of x [B, T, C] with weight [C, W], on the ranks of `attention`."""
    if isinstance(attention, StateOperations):
        return attention.convolve(x, weight, bias, mask, layout)
    layout, axis = _sharding(attention, layout, x.shape[1])
    return short_convolution(x, weight, layout, axis, bias, mask=mask)


def recur(
    attention: object,
    recurrence: Recurrence,
    *inputs: Tensor,
    mask: AttentionMask,
    layout: SequenceLayout | None,
) -> Tensor:
    """Computes the outputs [B, T, H, Dv] of a recurrence on the ranks of `attention`, a method or `StateOperations`."""
    if isinstance(attention, StateOperations):
        return attention.recur(recurrence, inputs, mask, layout)
    layout, axis = _sharding(attention, layout, inputs[0].shape[1])
    return recurrence(*inputs, layout=layout, axis=axis, mask=mask)[0]


def _sharding(attention: object, layout: SequenceLayout | None, tokens: int) -> tuple[SequenceLayout, Axis]:
    """Returns the layout over all ranks of an attention method, and their axis. One rank for other attention."""
    if not isinstance(attention, Method):
        return layout or SequenceLayout.contiguous(tokens, 1), Axis.alone("sequence")
    axis = sequence_axis(attention)
    if layout is None and axis.size > 1:
        raise ValueError(f"layout=None on the {axis.size} ranks of attention: a SequenceLayout is needed")
    return over_all_ranks(layout or SequenceLayout.contiguous(tokens, 1), attention), axis


class StateMixer(nn.Module):
    """A layer with a state: norm(x) [B, T, E] -> [B, T, H, Dv]. The block applies `o_proj` to the result.

    `attention` is the method whose ranks share the sequence, or `StateOperations`. `eps` is for the outputs' norm.
    """

    has_conv_bias: bool

    def __init__(self, dim: int, sizes: StateConfig, eps: float, attention: object) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        self.attention: Any = attention
        self.q_proj, self.k_proj = (nn.Linear(dim, sizes.keys, bias=False) for _ in range(2))
        self.v_proj, self.z_proj = (nn.Linear(dim, sizes.values, bias=False) for _ in range(2))
        self.a_proj = nn.Linear(dim, sizes.heads, bias=False)
        # Three convolutions, so that each can be sharded by its heads.
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(channels, channels, sizes.conv_width, groups=channels, bias=self.has_conv_bias)
            for channels in (sizes.keys, sizes.keys, sizes.values)
        )
        self.A_log = nn.Parameter(torch.zeros(sizes.heads))
        self.dt_bias = nn.Parameter(torch.zeros(sizes.heads))
        self.o_proj = nn.Linear(sizes.values, dim, bias=False)

    def forward(self, x: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None) -> Tensor:
        # 1. Projections and short convolution. One call for q, k and v, so that one exchange of tokens between ranks
        # serves all three.
        convolutions = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
        weights = [conv.weight for conv in convolutions]
        biases = [conv.bias for conv in convolutions if conv.bias is not None]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        weight, bias = torch.cat(weights).squeeze(1), torch.cat(biases) if biases else None
        qkv = F.silu(convolve(self.attention, qkv, weight, bias, mask, layout))
        # Heads are counted by the weights' shapes: under tensor parallelism a rank has only some.
        q, k, v = qkv.split([len(weight) for weight in weights], -1)
        key_dim, value_dim = self.sizes.key_dim, self.sizes.value_dim
        q, k = (y.unflatten(-1, (-1, key_dim)) for y in (q, k))
        v, z = (y.unflatten(-1, (-1, value_dim)) for y in (v, self.z_proj(x)))
        # 2. Step sizes dt and rates A. The decay exp(dt A) may be close to 1, so both are in float32 or wider.
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide))
        # 3. The recurrence, norm and gate.
        call = partial(recur, self.attention, mask=mask, layout=layout)
        return self.gated_outputs(x, q, k, v, z, dt, -self.A_log.to(wide).exp(), call)

    @abstractmethod
    def gated_outputs(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, dt: Tensor, A: Tensor, recur: Callable[..., Tensor]
    ) -> Tensor:
        """Runs the recurrence, and applies norm and gate to its outputs: [B, T, H, Dv].

        Args:
            x: [B, T, E], the layer's input.
            q, k: [B, T, K, Dk], after convolution and SiLU.
            v: [B, T, H, Dv], after convolution and SiLU.
            z: [B, T, H, Dv], the gate before its activation.
            dt: [B, T, H], step sizes, above 0.
            A: [H], rates, below 0. A state decays by exp(dt A) per token.
            recur: runs a recurrence on this rank's tokens, and returns the outputs [B, T, H, Dv].
        """


class GatedDeltaNet(StateMixer):
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next, with separate projections for q, k, v, z, a and b."""

    has_conv_bias = False

    def __init__(self, dim: int, sizes: StateConfig, eps: float, attention: object) -> None:
        super().__init__(dim, sizes, eps, attention)
        self.b_proj = nn.Linear(dim, sizes.heads, bias=False)
        self.norm = nn.RMSNorm(sizes.value_dim, eps=eps)

    def gated_outputs(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, dt: Tensor, A: Tensor, recur: Callable[..., Tensor]
    ) -> Tensor:
        # Queries and keys get length 1. With such keys, the delta rule's I - beta k k^T does not enlarge the state.
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + NORM_EPS) for y in (q, k))
        beta = self.b_proj(x).sigmoid()
        out = recur(gated_delta_rule, q, k, v, dt * A, beta)
        return self.norm(out) * F.silu(z)


class Mamba2(StateMixer):
    """Mamba-2 (arXiv 2405.21060), with separate projections. The paper's C is q here, its B is k and its x is v."""

    has_conv_bias = True

    def __init__(self, dim: int, sizes: StateConfig, eps: float, attention: object) -> None:
        super().__init__(dim, sizes, eps, attention)
        self.D = nn.Parameter(torch.ones(sizes.heads))
        self.norm_weight = nn.Parameter(torch.ones(sizes.values))

    def gated_outputs(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, dt: Tensor, A: Tensor, recur: Callable[..., Tensor]
    ) -> Tensor:
        out = recur(ssd, v, dt, A, k, q)
        gated = (out + self.D.unsqueeze(-1) * v) * F.silu(z)
        # Gate first, then one RMSNorm over all heads of a group, as in Mamba-2 (`norm_before_gate=False`).
        groups = gated.flatten(-2).unflatten(-1, (q.shape[2], -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.eps)
        return (normed.flatten(-2) * self.norm_weight).unflatten(-1, v.shape[-2:])


# Classes of the mixers with a state.
STATE_MIXERS: dict[Mixer, type[StateMixer]] = {"delta_rule": GatedDeltaNet, "mamba2": Mamba2}
