"""What the mask functions of Hugging Face transformers say, in our terms."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

from armillary.attention.mask import Window


def window_of(mask_function: Callable[..., Any] | None) -> Window | None:
    """The window of a mask function of transformers, in our terms, or None if it is causal and nothing more.

    They are closures, known by their names. What transformers adds where it sees packed rows is dropped: a shard's
    jumps look like that too, and documents are found by other means.

    Raises:
        ValueError: it is anything else.
    """
    parts = _parts(mask_function)
    names = [name for name, _ in parts]
    windows = [held["sliding_window"] for name, held in parts if name == "sliding_window_overlay"]
    unknown = [name for name in names if name not in ("causal_mask_function", "sliding_window_overlay", PACKED)]
    if unknown or names.count("causal_mask_function") != 1 or len(windows) > 1:
        what = ", ".join(unknown or names) or "none"
        raise ValueError(
            f"the model asks for a mask made of {what}; on a sharded sequence only causal attention is done, with or "
            "without a sliding window: use another attn_implementation for this model"
        )
    return (int(windows[0]) - 1, None) if windows else None


PACKED = "packed_sequence_mask_function"


def _parts(mask_function: Callable[..., Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """(name of the maker, what the closure holds) for each condition that must hold, in a flat list."""
    if mask_function is None:
        return []
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    if getattr(mask_function, "__module__", "") != "transformers.masking_utils":
        return [(f"{getattr(mask_function, '__module__', '')}.{name}", {})]
    held = dict(getclosurevars(mask_function).nonlocals)
    if name == "and_masks":
        return [part for inner in held["mask_functions"] for part in _parts(inner)]
    if name == "remap_positions_for_packed_sequence":
        return _parts(held["mask_function"])
    return [(name, held)]
