"""Small models with multi-head latent attention."""

from dataclasses import replace

from armillary.models import LatentSizes, LlamaConfig

SIZES = LatentSizes(rank=10, query_rank=14, rotary_dim=4, key_dim=8, value_dim=6)
LATENT = LlamaConfig(vocab_size=37, dim=32, layers=2, heads=8, kv_heads=8, hidden_dim=48, latent=SIZES)
# Without latents of queries, and with RoPE on halves.
DIRECT = replace(LATENT, tied_embeddings=True, latent=replace(SIZES, query_rank=None, interleaved=False))
