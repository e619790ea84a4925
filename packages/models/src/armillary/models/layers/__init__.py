"""Layers of blocks: rotary embeddings, projections to heads, token-wise functions in chunks."""
