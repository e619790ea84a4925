"""A training step on fake tensors, with its bytes counted by category."""
