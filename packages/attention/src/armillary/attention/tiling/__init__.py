"""From masks and layouts to kernel calls: tiles, the grid of blocks, a block, and the merge of results."""
