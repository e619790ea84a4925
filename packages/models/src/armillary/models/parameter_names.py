"""Names of parameters without the prefixes of wrappers."""

from __future__ import annotations

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of parameter names that torch's activation checkpointing and torch.compile insert."""


def plain_name(name: str) -> str:
    """Returns the parameter's name in the unwrapped model."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
