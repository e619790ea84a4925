"""Multi-head latent attention, MLA (arXiv 2405.04434), as in DeepSeek V2 and V3 and Youtu-LLM.

A token's keys and values of all heads are made of one latent [L] and one rotary key [Dr]:

    c, r = split(W_a x)      latent = norm(c)      rotary key = RoPE(r)
    k[h] = [W_k[h] latent, rotary key]             v[h] = W_v[h] latent

Norm and RoPE are applied on the rank of the token. What is sent is up to the attention method: latents and rotary keys,
or keys and values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from armillary.models.config import LatentSizes, LlamaConfig
from armillary.models.layers.projections import HeadProjections, ProjectionModule, module_key
from armillary.models.layers.rope import RotaryEmbedding

# Epsilon of the norms of latents. In the published models it does not depend on that of other norms.
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class LatentHeadProjections(HeadProjections):
    """Projections to q [B, T, H, D], and by latents to k [B, T, K, D] and v [B, T, K, Dv].

    Implements `ExpandsLatents` besides the protocols of `HeadProjections`. `key` projects to the latent and the rotary
    key, `key_norm` is the norm of the latent, and `value` expands it to the keys and values of all heads. If queries
    have latents too, `query_down` projects to them, `query_norm` is their norm, and `query` expands them. Each stage of
    heads computes these latents again.
    """

    sizes: LatentSizes
    query_down: nn.Module | None = None
    score_factor: float = 1.0

    @property
    def value_dim(self) -> int:
        return self.sizes.value_dim

    def modules(self) -> tuple[nn.Module | None, ...]:
        return *super().modules(), self.query_down

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        q = self._project(self.query, x, heads, self.heads, self.head_dim)
        q, rotary = q.split((self.sizes.key_dim, self.sizes.rotary_dim), -1)
        q = torch.cat((q, self._rotate(rotary)), -1)
        return q if self.score_factor == 1 else q * self.score_factor

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        rotary, latent = self.rotary_and_latent(x)
        expanded = self._project(self.value, latent, heads, self.key_heads, self.sizes.key_dim + self.value_dim)
        k, v = expanded.split((self.sizes.key_dim, self.value_dim), -1)
        return torch.cat((k, rotary.expand(-1, -1, len(heads), -1)), -1), v

    def latents(self) -> RotaryKeysAndLatents | None:
        """Returns projections to the latents; None if `value` is more than a weight (hooks, adapters, quantization)."""
        if module_key(self.value) is None or cast(Any, self.value).bias is not None:
            return None
        return RotaryKeysAndLatents(**{field.name: getattr(self, field.name) for field in fields(self)})

    def cache_key(self) -> Hashable | None:
        cache_key = super().cache_key()
        return None if cache_key is None else (cache_key, self.sizes)

    def rotary_and_latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rotary keys [B, T, 1, Dr] and the latents [B, T, L]."""
        x = x if self.norm is None else self.norm(x)
        latent, rotary = self.key(x).split((self.sizes.rank, self.sizes.rotary_dim), -1)
        # Under autocast a norm may return a wider dtype.
        return self._rotate(rotary.unsqueeze(2)), cast(nn.Module, self.key_norm)(latent).to(rotary.dtype)

    def _rotate(self, x: Tensor) -> Tensor:
        """Applies RoPE to x [B, T, h, Dr]. Of interleaved pairs, the first dims come first afterwards, in q and k."""
        x = x.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.sizes.interleaved else x
        return cast(RotaryEmbedding, self.rotation)(x)


@dataclass(frozen=True, kw_only=True)
class RotaryKeysAndLatents(LatentHeadProjections):
    """The same projections with rotary keys and latents as `kv`, for attention to expand (`LatentProjections`)."""

    @property
    def key_rows(self) -> int:
        return self.sizes.key_dim

    @property
    def rotary_dim(self) -> int:
        return self.sizes.rotary_dim

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        rotary, latent = self.rotary_and_latent(x)
        return rotary, latent.unsqueeze(2)

    def expansion(self) -> Tensor:
        # Read as an attribute, which is the local part of a sharded weight (`ShardedModule`).
        return cast(Tensor, self.value.weight).unflatten(0, (self.key_heads, -1))


class LatentAttention(ProjectionModule):
    """Projections and attention of multi-head latent attention, with the names of Hugging Face's layers.

    Args:
        config: a config with `latent`.
        attention: as of `Llama`. A method with `projected` gets latents and sends what is fewer bytes; another function
            gets expanded keys and values.
    """

    def __init__(self, config: LlamaConfig, attention: Any) -> None:
        super().__init__(config.heads, config.kv_heads, config.head_dim, attention)
        assert config.latent is not None  # only blocks of such a config have this layer
        self.sizes = sizes = config.latent
        self.value_dim = sizes.value_dim
        self.score_factor = 1.0 if config.rope_scaling is None else config.rope_scaling.latent_score_factor
        if sizes.query_rank is None:
            self.q_proj = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.dim, sizes.query_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(sizes.query_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(sizes.query_rank, config.heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.dim, sizes.rank + sizes.rotary_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(sizes.rank, eps=NORM_EPS)
        self.kv_b_proj = nn.Linear(sizes.rank, config.heads * (sizes.key_dim + sizes.value_dim), bias=False)
        self.o_proj = nn.Linear(config.heads * sizes.value_dim, config.dim, bias=False)

    def projections(self, rotation: RotaryEmbedding | None, norm: nn.Module | None) -> LatentHeadProjections:
        has_query_latents = self.sizes.query_rank is not None
        return LatentHeadProjections(
            query=self.q_b_proj if has_query_latents else self.q_proj,
            key=self.kv_a_proj_with_mqa,
            value=self.kv_b_proj,
            query_down=self.q_a_proj if has_query_latents else None,
            query_norm=self.q_a_layernorm if has_query_latents else None,
            key_norm=self.kv_a_layernorm,
            projector=self.projector,
            heads=self.heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            sizes=self.sizes,
            score_factor=self.score_factor,
            rotation=rotation,
            norm=norm,
        )
