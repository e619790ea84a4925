"""A small model that alternates attention and layers with a state."""

from armillary.models import LlamaConfig, StateConfig

STATES = StateConfig(heads=4, key_heads=2, key_dim=6, value_dim=5)
HYBRID = LlamaConfig(
    vocab_size=37,
    dim=32,
    layers=3,
    heads=8,
    kv_heads=4,
    hidden_dim=48,
    head_dim=8,
    mixers=("delta_rule", "mamba2", "attention"),
    states=STATES,
)
