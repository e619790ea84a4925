"""A training step on fake tensors, with its live bytes counted by category."""
