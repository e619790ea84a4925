"""The mixers of a hybrid's blocks, and the sizes of those that have a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention", "delta_rule", "mamba2"]
"""The part of a block that mixes tokens: attention, Gated DeltaNet (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060)."""


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The sizes of layers with a state.

    Args:
        heads: H, number of value heads. Each has its own state [Dk, Dv].
        key_heads: K, number of heads of queries and keys (in Mamba-2, groups of B and C). Value head h uses key head
            h // (H / K).
        key_dim: Dk, channels of a key head (in Mamba-2, the state size Ns).
        value_dim: Dv, channels of a value head (in Mamba-2, the head dim D).
        conv_width: W, the number of tokens that the short convolution sees.

    Raises:
        ValueError: a size is not an integer of at least 1, or key heads do not divide value heads.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, ("heads", "key_heads", "key_dim", "value_dim", "conv_width"))
        if self.heads % self.key_heads:
            raise ValueError(f"states.key_heads {self.key_heads} must divide states.heads {self.heads}")

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.heads * self.value_dim

    def parameters(self, mixer: Mixer, dim: int) -> int:
        """Number of parameters of a mixer with a state (`StateMixer`) on a residual stream of width `dim`."""
        channels = 2 * self.keys + self.values  # of q, k and v
        projections = dim * (channels + 2 * self.values + self.heads)  # to q, k, v; z and o; a
        shared = projections + channels * self.conv_width + 2 * self.heads  # convolutions; A_log and dt_bias
        if mixer == "delta_rule":
            return shared + dim * self.heads + self.value_dim  # projection to b; norm
        return shared + channels + self.heads + self.values  # biases of the convolutions; D; norm

    def flops_per_token(self, mixer: Mixer) -> int:
        """Floating-point operations of the recurrence per token, forward and backward.

        Per token and head, the query reads the state once and the state is updated once, 2 Dk Dv operations each. The
        delta rule also reads the state by the key, another 2 Dk Dv. Backward counts twice as much as forward.
        """
        forward_flops = {"attention": 0, "mamba2": 4, "delta_rule": 6}[mixer]  # per element of a state
        return 3 * forward_flops * self.heads * self.key_dim * self.value_dim


def check_sizes(config: object, names: Sequence[str]) -> None:
    """Raises ValueError for sizes that are not whole numbers of at least 1."""
    for name in names:
        size = getattr(config, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1")
