"""Layers with a state along the sequence, over sequences that are sharded across ranks."""

from armillary.attention.states.layers import gated_delta_rule, ssd

__all__ = ["gated_delta_rule", "ssd"]
