"""Collectives on one axis of a mesh: asynchronous ones, and differentiable ones on top of them."""
