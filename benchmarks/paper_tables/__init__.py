"""Tables of `benchmarks/papers.py`, one module for each paper."""
