"""Floating-point operations of training steps and of attention, for the time limits of checks."""

from __future__ import annotations

from armillary.models import LlamaConfig

FORWARD, BACKWARD = 4, 10
"""Operations of attention per visible pair, head and element of the head dim: 2 products in forward, 5 in backward."""
RECOMPUTED = 4 / 3
"""A step that computes forward twice, relative to one that computes it once: the most that a policy recomputes."""
HEADS, KEY_HEADS, DIM = 32, 8, 128
"""Heads and head dim of an 8B model."""


def causal_pairs(tokens: int) -> int:
    """Pairs of a query and a visible key in a causal sequence."""
    return tokens * (tokens + 1) // 2


def attention_flops(pairs: float, factor: int = FORWARD + BACKWARD, heads: int = HEADS, dim: int = DIM) -> float:
    """Operations of attention over `pairs`, by default of forward and backward in an 8B model."""
    return factor * pairs * heads * dim


def step_flops(config: LlamaConfig, length: int) -> float:
    """Operations of a training step on one sequence, without recomputation."""
    return length * config.flops_per_token(length)


def head_flops(config: LlamaConfig, length: int) -> float:
    """Operations of the LM head in a training step: one product in forward, two in backward."""
    return 6.0 * length * config.vocab_size * config.dim
