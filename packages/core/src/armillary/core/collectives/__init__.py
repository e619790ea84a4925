"""Collectives on one axis of a mesh: asynchronous ones, and those with gradients that stand on them."""
