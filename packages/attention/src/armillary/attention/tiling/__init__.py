"""From masks and layouts to kernel calls: tiles, the grid of blocks, one block, and the merge of partial results."""
