"""Statistics of stores and of sequence layouts, and their tables."""
