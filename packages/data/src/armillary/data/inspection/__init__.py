"""Statistics of stores, packings and layouts, their tables and plots."""
