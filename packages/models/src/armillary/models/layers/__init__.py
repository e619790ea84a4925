"""What blocks are made of: rotary embeddings, projections to heads, functions of tokens run in chunks."""
