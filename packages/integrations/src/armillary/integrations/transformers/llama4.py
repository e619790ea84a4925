"""Position-dependent query scale of Llama 4, whose layers without RoPE count positions from a shard's first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_by_position(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Returns queries [B, H, T, D], in Llama 4's layers without RoPE scaled by their positions in the sequence [T].

    The layer has already scaled its queries by their positions in the shard, so this multiplies by the ratio of the two
    scales. Queries of other layers are returned unchanged.
    """
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return query
    local_positions = torch.arange(len(positions), device=query.device)
    local_scale, scale = (_scale(module, x.to(query.device)).double() for x in (local_positions, positions))
    # In float32 or wider: a ratio of two bfloat16 scales would round twice.
    ratio = (scale / local_scale).to(torch.promote_types(query.dtype, torch.float32))
    return (query * ratio[:, None]).to(query.dtype)


def _scale(module: Any, positions: Tensor) -> Tensor:
    """Returns Llama 4's scale [T], constant over `floor_scale` positions ("Scalable-Softmax", arXiv 2501.19399)."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
