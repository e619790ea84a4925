"""Converts mask functions of Hugging Face transformers to a `Rule`: bands, groups of tokens and chunks.

Mask functions are nested closures over (batch, head, query, key) indices: sliding windows, images and chunks, joined by
`and` and `or`. Evaluating them on a shard would be wrong, because local indices are not those of the sequence. So each
closure is recognized by the name of the function that made it, and its variables are read. Unknown closures are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dis import get_instructions
from functools import reduce
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.core.parts import Window

FAR = 2**62
Band = tuple[int, int]
"""(low, high): a query at i sees a key at j if low <= j - i <= high. -FAR and FAR are unbounded."""

EVERYTHING: Band = (-FAR, FAR)


class Rule(NamedTuple):
    """A mask function as two bands, groups of tokens and chunks.

    A query sees the keys of its own group in the band `group_keys`, and other keys in the band `other_keys`; with
    chunks, only keys of its own chunk. None is an empty band.
    """

    other_keys: Band | None
    group_keys: Band | None
    groups: Tensor | None = None
    """[B, T], the group of each local token, or -1. Ranks number groups independently: see `GroupReader`."""
    chunk: int | None = None
    """Size of a chunk; None without chunks."""
    bidirectional: bool = False
    """True for a bidirectional mask: transformers does not infer documents for it from position ids that restart."""

    @property
    def causal(self) -> bool:
        """True if a query sees later keys only within its group."""
        return self.other_keys is None or self.other_keys[1] <= 0

    @property
    def window(self) -> Window | None:
        """The window (left, right) of `other_keys`. A side is None if it is unbounded or causal.

        The window is None if both sides are.
        """
        low, high = self.other_keys or (0, 0)
        sides = (None if low <= -FAR else -low, None if high >= FAR or self.causal else high)
        return None if sides == (None, None) else sides


def rule_of(mask_function: Callable[..., Any] | None) -> Rule:
    """Returns a mask function of transformers as a rule.

    The documents that transformers adds for packed rows are dropped, because restarting positions on a shard look like
    documents too; `DocumentReader` reads them.

    Raises:
        ValueError: a part of the mask is unknown, or cannot be joined with the other parts; sliding_window below 1.
    """
    try:
        rule = _read(mask_function)
        if rule.other_keys is None and rule.group_keys is None:
            raise UnknownMaskError("parts that hide every key")
    except UnknownMaskError as unknown:
        raise ValueError(
            f"the model asks for a mask made of {unknown}, which is unknown; masks made of "
            f"{', '.join(sorted(MAKERS))} with and_masks and or_masks are supported. Use another attn_implementation "
            "for this model, or give the mask: `cp.shard(ids, mask=AttentionMask...)`"
        ) from None
    return rule


class UnknownMaskError(Exception):
    """A part of a mask function is unknown. The message is its name."""


def _read(function: Any) -> Rule:
    """Returns the rule of a mask function, recursively. Raises UnknownMaskError with the name of an unknown part."""
    if function is None:
        raise UnknownMaskError("none")
    name = _maker(function)
    if name is None:
        return _read_constant(function)
    closure = dict(getclosurevars(function).nonlocals)
    if name in ("and_masks", "or_masks"):
        parts = _without_packing(closure["mask_functions"]) if name == "and_masks" else closure["mask_functions"]
        join = _intersect if name == "and_masks" else _unite
        return reduce(join, map(_read, parts))
    # transformers wraps a mask so that positions restart in each document: reads the wrapped mask.
    if name == PACKED_POSITIONS:
        return _read(closure["mask_function"])
    if name not in MAKERS:
        raise UnknownMaskError(name)
    rule = MAKERS[name](closure)
    # Several model files define a function of this name, and may change it: its values are compared with the rule.
    if name == MODEL_FUNCTION:
        _probe(function, rule, name)
    return rule


def _maker(function: Any) -> str | None:
    """Returns the name of the function that made a closure, if it is in `masking_utils` or `MODEL_FUNCTION`."""
    name, module = (getattr(function, field, "") for field in ("__qualname__", "__module__"))
    name = name.split(".")[0]
    if module == "transformers.masking_utils" or (name == MODEL_FUNCTION and module.startswith("transformers.models.")):
        return name
    return None


PACKED, PACKED_POSITIONS = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"


def _without_packing(functions: tuple[Any, ...]) -> list[Any]:
    """Returns the parts of an `and` without the documents that transformers found in position ids.

    transformers adds the packed mask together with `PACKED_POSITIONS`. A packed mask without it comes from the user,
    and is not removed.
    """
    names = [_maker(function) for function in functions]
    if PACKED_POSITIONS not in names:
        return list(functions)
    return [function for function, name in zip(functions, names, strict=True) if name != PACKED]


def _read_constant(function: Any) -> Rule:
    """Reads a function without a closure that returns True for any arguments (Gemma 3, bidirectional)."""
    # The function is called only if its bytecode loads no argument and no closure, so that its value is constant.
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    if code is None or code.co_freevars or not set(code.co_names) <= {"torch", "tensor", "bool"}:
        raise UnknownMaskError(name)
    if any(instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) for instruction in get_instructions(code)):
        raise UnknownMaskError(name)
    is_real_torch = getattr(function, "__globals__", {}).get("torch", torch) is torch
    if not is_real_torch or not bool(function(0, 0, 0, 0)):
        raise UnknownMaskError(name)
    return _band_rule(*EVERYTHING)


def _probe(function: Callable[..., Any], rule: Rule, name: str) -> None:
    """Raises UnknownMaskError if a model's own function differs from the rule at or beside the ends of its band."""
    low, high = rule.other_keys or (0, 0)
    offsets = torch.tensor([low - 1, low, 0, high, high + 1])
    queries = torch.full_like(offsets, high - low + 2)  # far enough from 0 that no key index is negative
    index = torch.tensor(0)
    if function(index, index, queries, queries + offsets).tolist() != [False, True, True, True, False]:
        raise UnknownMaskError(name)


def _band_rule(low: int, high: int, *, bidirectional: bool = False) -> Rule:
    """Returns the rule of one band for all keys."""
    return Rule((low, high), (low, high), bidirectional=bidirectional)


def _window(closure: dict[str, Any]) -> int:
    """Returns the sliding window of a closure, in keys up to and including the query's own."""
    window = int(closure["sliding_window"])
    if window < 1:
        raise ValueError(f"sliding_window={window} hides every key; a window of at least 1, or None, is accepted")
    return window


MODEL_FUNCTION = "_bidirectional_window_overlay"
"""A mask function of Gemma 3, in the files of several models."""

MAKERS: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "causal_mask_function": lambda closure: _band_rule(-FAR, 0),
    "bidirectional_mask_function": lambda closure: _band_rule(*EVERYTHING, bidirectional=True),
    # Windows count the query's own key, except in the bidirectional overlay, which counts neighbours on each side.
    "sliding_window_overlay": lambda closure: _band_rule(1 - _window(closure), FAR),
    "sliding_window_bidirectional_overlay": lambda closure: _band_rule(
        -int(closure["sliding_window"]), int(closure["sliding_window"])
    ),
    MODEL_FUNCTION: lambda closure: _band_rule(1 - _window(closure), _window(closure) - 1),
    "blockwise_overlay": lambda closure: Rule(None, EVERYTHING, groups=closure["block_sequence_ids"]),
    "chunked_overlay": lambda closure: Rule(EVERYTHING, EVERYTHING, chunk=int(closure["chunk_size"])),
}
"""Functions from a closure's variables to its rule, by the name of the transformers function that made the closure."""


def _intersect(a: Rule, b: Rule) -> Rule:
    """Returns the rule of `a and b`."""
    if a.chunk is not None and b.chunk is not None and a.chunk != b.chunk:
        raise UnknownMaskError(f"chunks of {a.chunk} and of {b.chunk}")
    return Rule(
        _intersect_bands(a.other_keys, b.other_keys),
        _intersect_bands(a.group_keys, b.group_keys),
        _common_groups(a, b),
        a.chunk if b.chunk is None else b.chunk,
        a.bidirectional or b.bidirectional,
    )


def _unite(a: Rule, b: Rule) -> Rule:
    """Returns the rule of `a or b`."""
    if a.chunk is not None or b.chunk is not None:
        raise UnknownMaskError("chunks joined by or")
    other_keys, group_keys = _unite_bands(a.other_keys, b.other_keys), _unite_bands(a.group_keys, b.group_keys)
    return Rule(other_keys, group_keys, _common_groups(a, b), None, a.bidirectional or b.bidirectional)


def _common_groups(a: Rule, b: Rule) -> Tensor | None:
    """Returns the groups of two rules of which one may have none."""
    # Compared by identity: two tensors that are equal on this rank may differ on another one.
    if a.groups is not None and b.groups is not None and a.groups is not b.groups:
        raise UnknownMaskError("blocks of two kinds")
    return a.groups if b.groups is None else b.groups


def _intersect_bands(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return None
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def _unite_bands(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return b if a is None else a
    # Two bands with a gap between them are no band.
    if max(a[0], b[0]) > min(a[1], b[1]) + 1:
        raise UnknownMaskError(f"windows {a} and {b}, which do not meet")
    return min(a[0], b[0]), max(a[1], b[1])
