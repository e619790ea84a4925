"""Reads the mask functions of Hugging Face transformers.

They are closures over closures: bands around the diagonal, groups of tokens (images) and chunks, joined by `and` and
`or`. Each is known by the name of the function that made it; what is not known is refused, never evaluated on a shard,
whose indices are not those of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dis import get_instructions
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.attention.mask import Window

FAR = 2**62
Band = tuple[int, int]
"""The smallest and the largest `j - i` at which a query at i sees a key at j; up to FAR where it is not bounded."""

EVERYTHING: Band = (-FAR, FAR)


class Rule(NamedTuple):
    """Who sees whom, in any mask made of bands, of one division into groups and of chunks.

    A key is visible if it is in `within` of its query and both are of one group, or if it is in `apart` and they are
    not; and if both are of one chunk.
    """

    apart: Band | None
    within: Band | None
    groups: Tensor | None = None
    """[B, T], of this rank's tokens and numbered for these alone; -1: of no group."""
    chunk: int | None = None
    bidirectional: bool = False
    """Whether transformers began with everything visible; then it does not look for documents in position ids."""

    @property
    def causal(self) -> bool:
        """Returns whether a query sees later keys only within its group."""
        return self.apart is None or self.apart[1] <= 0

    @property
    def window(self) -> Window | None:
        """Of `apart`; None on a side, or instead of both, is unbounded. Causality is no window."""
        low, high = self.apart or (0, 0)
        sides = (None if low <= -FAR else -low, None if high >= FAR or self.causal else high)
        return None if sides == (None, None) else sides


def rule_of(mask_function: Callable[..., Any] | None) -> Rule:
    """What a mask function of transformers says.

    What transformers adds where it sees packed rows is dropped: a shard's jumps look like that too, and documents are
    found by other means.

    Raises:
        ValueError: part of it is not known, or cannot be joined with the rest; sliding_window below 1.
    """
    try:
        rule = _read(mask_function)
        if rule.apart is None and rule.within is None:
            raise UnknownMaskError("parts that hide every key")
    except UnknownMaskError as unknown:
        raise ValueError(
            f"the model asks for a mask made of {unknown}, which is not known; masks made of "
            f"{', '.join(sorted(MAKERS))} with and_masks and or_masks are. Use another attn_implementation for this "
            "model, or say the mask: `with sequence(layout=..., mask=AttentionMask...)`"
        ) from None
    return rule


class UnknownMaskError(Exception):
    """Part of a mask function that is not known, by name."""


def _read(function: Any) -> Rule:
    if function is None:
        raise UnknownMaskError("none")
    name = _maker(function)
    if name is None:
        return _constant(function)
    held = dict(getclosurevars(function).nonlocals)
    if name in ("and_masks", "or_masks"):
        parts = _without_packing(held["mask_functions"]) if name == "and_masks" else held["mask_functions"]
        rules = [_read(part) for part in parts]
        rule = rules[0]
        for other in rules[1:]:
            rule = _both(rule, other) if name == "and_masks" else _either(rule, other)
        return rule
    if name == PACKED_POSITIONS:
        return _read(held["mask_function"])
    if name not in MAKERS:
        raise UnknownMaskError(name)
    rule = MAKERS[name](held)
    if name == MODELS_OWN:
        _probe(function, rule, name)
    return rule


def _maker(function: Any) -> str | None:
    """The function of `masking_utils`, or a known one of a model, that made a closure, or is it; None: unknown."""
    name, module = (getattr(function, field, "") for field in ("__qualname__", "__module__"))
    name = name.split(".")[0]
    if module == "transformers.masking_utils" or (name == MODELS_OWN and module.startswith("transformers.models.")):
        return name
    return None


PACKED, PACKED_POSITIONS = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"


def _without_packing(functions: tuple[Any, ...]) -> list[Any]:
    """The parts of an `and` but the documents that transformers has seen in position ids, as it adds both at once."""
    names = [_maker(function) for function in functions]
    if PACKED_POSITIONS not in names:
        return list(functions)
    return [function for function, name in zip(functions, names, strict=True) if name != PACKED]


def _constant(function: Any) -> Rule:
    """Of a function that reads no argument, holds nothing, and says that all is visible (Gemma 3's, bidirectional)."""
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    if code is None or code.co_freevars or not set(code.co_names) <= {"torch", "tensor", "bool"}:
        raise UnknownMaskError(name)
    if any(step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) for step in get_instructions(code)):
        raise UnknownMaskError(name)
    of_torch = getattr(function, "__globals__", {}).get("torch", torch) is torch
    if not of_torch or not bool(function(0, 0, 0, 0)):
        raise UnknownMaskError(name)
    return _banded(*EVERYTHING)


def _probe(function: Callable[..., Any], rule: Rule, name: str) -> None:
    """Holds a model's own function to its name: at, and next to, the ends of its band."""
    low, high = rule.apart or (0, 0)
    offsets = torch.tensor([low - 1, low, 0, high, high + 1])
    queries = torch.full_like(offsets, high - low + 2)
    index = torch.tensor(0)
    if function(index, index, queries, queries + offsets).tolist() != [False, True, True, True, False]:
        raise UnknownMaskError(name)


def _banded(low: int, high: int, *, bidirectional: bool = False) -> Rule:
    return Rule((low, high), (low, high), bidirectional=bidirectional)


def _window(held: dict[str, Any]) -> int:
    """Returns the sliding window of a closure, in keys up to and including the query's own."""
    window = int(held["sliding_window"])
    if window < 1:
        raise ValueError(f"sliding_window={window} hides every key; a window of at least 1, or None, is accepted")
    return window


MODELS_OWN = "_bidirectional_window_overlay"
"""Gemma 3's, in the files of several models."""

MAKERS: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "causal_mask_function": lambda held: _banded(-FAR, 0),
    "bidirectional_mask_function": lambda held: _banded(*EVERYTHING, bidirectional=True),
    "sliding_window_overlay": lambda held: _banded(1 - _window(held), FAR),
    "sliding_window_bidirectional_overlay": lambda held: _banded(
        -int(held["sliding_window"]), int(held["sliding_window"])
    ),
    MODELS_OWN: lambda held: _banded(1 - _window(held), _window(held) - 1),
    "blockwise_overlay": lambda held: Rule(None, EVERYTHING, groups=held["block_sequence_ids"]),
    "chunked_overlay": lambda held: Rule(EVERYTHING, EVERYTHING, chunk=int(held["chunk_size"])),
}


def _both(a: Rule, b: Rule) -> Rule:
    if a.chunk is not None and b.chunk is not None and a.chunk != b.chunk:
        raise UnknownMaskError(f"chunks of {a.chunk} and of {b.chunk}")
    return Rule(
        _intersection(a.apart, b.apart),
        _intersection(a.within, b.within),
        _one_division(a, b),
        a.chunk if b.chunk is None else b.chunk,
        a.bidirectional or b.bidirectional,
    )


def _either(a: Rule, b: Rule) -> Rule:
    if a.chunk is not None or b.chunk is not None:
        raise UnknownMaskError("chunks, or something else")
    apart, within = _union(a.apart, b.apart), _union(a.within, b.within)
    return Rule(apart, within, _one_division(a, b), None, a.bidirectional or b.bidirectional)


def _one_division(a: Rule, b: Rule) -> Tensor | None:
    if a.groups is not None and b.groups is not None and a.groups is not b.groups:
        raise UnknownMaskError("blocks of two kinds")
    return a.groups if b.groups is None else b.groups


def _intersection(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return None
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def _union(a: Band | None, b: Band | None) -> Band | None:
    if a is None or b is None:
        return b if a is None else a
    if max(a[0], b[0]) > min(a[1], b[1]) + 1:
        raise UnknownMaskError(f"windows {a} and {b}, which do not meet")
    return min(a[0], b[0]), max(a[1], b[1])
