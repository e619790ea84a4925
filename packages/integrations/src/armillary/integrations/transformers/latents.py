"""Models with multi-head latent attention (DeepSeek-V3 and others): the method gets latents instead of expanded keys.

Layers of transformers compute one latent and one rotary key per token, and call `expand_kv` for the keys and values of
all heads. In a prepared model `expand_kv` returns what it gets, and the attention function passes the weight of
`kv_b_proj` to the method, which sends the latents and expands them where it attends.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from armillary.core.internal import compat

# Name of the layers' method that expands latents.
EXPAND = "expand_kv"


class UnexpandedKeys:
    """Replaces `expand_kv` of a layer: returns rotary keys and latents where attention can expand them."""

    def __init__(self, layer: Any, implementation: str) -> None:
        self.layer, self.implementation = layer, implementation  # the implementation's name

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k_rot [B, 1, S, Dr] and kv_nope [B, 1, S, L]; or the expanded keys and values, as the layer does."""
        if self.weight() is None:
            return getattr(type(self.layer), EXPAND)(self.layer, kv_nope, k_rot)
        return k_rot, kv_nope

    def weight(self) -> Tensor | None:
        """Returns the expansion [K, D - Dr + Dv, L]; None if attention has to get expanded keys."""
        # They are expanded if another implementation is selected, and where the projection is more than a product with
        # a plain weight: quantized, with an adapter or hooks, sharded by `tp`, or an FSDP unit of its own.
        layer: Any = self.layer
        projection: Any = layer.kv_b_proj
        has_hooks = projection._forward_hooks or projection._forward_pre_hooks
        is_plain = not has_hooks and type(projection) is nn.Linear and cast(Any, projection).bias is None
        if layer.config._attn_implementation != self.implementation or not is_plain:
            return None
        weight: Tensor = cast(Any, projection).weight
        if compat.is_dtensor(weight):
            return None
        return weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))


def send_latents(model: nn.Module, implementation: str) -> None:
    """Makes the layers of a model with `expand_kv` pass latents to the attention implementation of this name."""
    for layer in model.modules():
        if hasattr(type(layer), EXPAND) and hasattr(layer, "kv_b_proj"):
            setattr(layer, EXPAND, UnexpandedKeys(layer, implementation))


def expansion_of(layer: Any) -> Tensor | None:
    """Returns the expansion of the rotary keys and latents that a layer has passed; None if its keys are finished."""
    keys = vars(layer).get(EXPAND)
    return keys.weight() if isinstance(keys, UnexpandedKeys) else None
