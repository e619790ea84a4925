"""Names of parameters without the prefixes of wrappers."""

from __future__ import annotations

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile put into the names of a module's parameters."""


def plain_name(name: str) -> str:
    """Returns the parameter's name in the unwrapped model."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
