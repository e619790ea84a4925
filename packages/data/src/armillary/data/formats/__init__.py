"""Formats of token files: our own, and those of other libraries."""
