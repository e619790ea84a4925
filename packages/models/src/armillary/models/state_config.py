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
        heads: H, value heads, each with a state of its own.
        key_heads: K, heads of queries and keys of the delta rule, or groups of B and C of Mamba-2; value head h reads
            key head h // (H / K).
        key_dim: Dk, channels of a key head (Ns of Mamba-2).
        value_dim: Dv, channels of a value head (D of Mamba-2).
        conv_width: W, tokens that the short convolution sees.

    Raises:
        ValueError: a size below 1, or value heads that key heads do not divide.
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
        """Number of parameters of a mixer on a residual stream of width `dim`."""
        channels = 2 * self.keys + self.values
        shared = dim * (channels + 2 * self.values + self.heads) + channels * self.conv_width + 2 * self.heads
        if mixer == "delta_rule":
            return shared + dim * self.heads + self.value_dim
        return shared + channels + self.heads + self.values

    def flops_per_token(self, mixer: Mixer) -> int:
        """Operations of the recurrence, forward and backward, for a token.

        The state is read once by the query and written once (2 Dk Dv each); the delta rule also reads it by the key.
        """
        per_state = {"attention": 0, "mamba2": 4, "delta_rule": 6}[mixer]
        return 3 * per_state * self.heads * self.key_dim * self.value_dim


def check_sizes(config: object, names: Sequence[str]) -> None:
    """Raises ValueError for sizes that are not whole numbers of at least 1."""
    for name in names:
        size = getattr(config, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1")
