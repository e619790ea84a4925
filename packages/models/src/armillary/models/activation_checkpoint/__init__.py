"""Activation checkpointing: tensors that blocks keep for backward, recompute, or offload to the host."""
