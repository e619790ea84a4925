"""Llama 4 scales the queries of layers without RoPE by their position, which it counts from a shard's first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scaled_by_position(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries [B, H, T, D] of such a layer scaled by their positions in the row [T], as on one device; others as is."""
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return query
    counted = torch.arange(len(positions), device=query.device)
    wrong, right = (_scale(module, its.to(query.device)).double() for its in (counted, positions))
    ratio = (right / wrong).to(torch.promote_types(query.dtype, torch.float32))
    return (query * ratio[:, None]).to(query.dtype)


def _scale(module: Any, positions: Tensor) -> Tensor:
    """As in "Scalable-Softmax Is Superior for Attention" (arXiv 2501.19399), in steps, as Llama 4 has it."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
