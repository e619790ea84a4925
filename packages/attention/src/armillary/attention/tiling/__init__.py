"""From masks and layouts to kernel calls.

tiles            the tiles of a query shard and all key shards: slices intersected with spans, joined
grid             `Grid`: tiles, visible tokens and numbers of pairs of each block, cached; layouts of some positions
block_attention  `BlockAttention`: the kernel calls of one block, small ones packed
accumulators     accumulators of partial results and of gradients
latents          keys and values of latents, made where a block attends
"""
