"""From a mask function of transformers to the mask of a whole sequence, which layers get as a `ShardMask`.

1. `rule_of` reads a mask function as a `Rule`: bands, groups of tokens and chunks.
2. `mask_of` makes the mask of a whole sequence from a rule, its documents and its groups of tokens, such as images;
   `narrow` narrows a user's own mask by a rule.
3. `ShardMask` goes from the mask function to the layers in place of a mask tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from dis import get_instructions
from functools import reduce
from inspect import getclosurevars
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from armillary.attention import AttentionMask, Slice
from armillary.attention.internal import Documents, SequenceContext
from armillary.core import SequenceLayout
from armillary.core.internal import Window

FAR = 2**62
# (low, high): a query at i sees a key at j if low <= j - i <= high. -FAR and FAR are unbounded.
Band = tuple[int, int]

EVERYTHING: Band = (-FAR, FAR)

# Maximum number of slices in the mask of one row.
MAX_SLICES = 2**16


class Rule(NamedTuple):
    """A mask function as two bands, groups of tokens and chunks.

    A query sees the keys of its own group in the band `group_keys`, and other keys in the band `other_keys`; with
    chunks, only keys of its own chunk. None is an empty band.
    """

    other_keys: Band | None
    group_keys: Band | None
    groups: Tensor | None = None
    """[B, T], the group of each local token, or -1. Ranks number groups independently: see `RowReader.groups`."""
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


class UnknownMaskError(Exception):
    """A part of a mask function is unknown. The message is its name."""


def rule_of(mask_function: Callable[..., Any] | None) -> Rule:
    """Returns a mask function of transformers as a rule.

    The documents that transformers adds for packed rows are dropped, because restarting positions on a shard look like
    documents too; `RowReader.documents` reads them.

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


PACKED, PACKED_POSITIONS = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"
# A mask function of Gemma 3, in the files of several models.
MODEL_FUNCTION = "_bidirectional_window_overlay"


def _read(function: Any) -> Rule:
    # Mask functions are nested closures over (batch, head, query, key) indices: sliding windows, images and chunks,
    # joined by `and` and `or`. Evaluating them on a shard would be wrong, because local indices are not those of the
    # sequence. So each closure is recognized by the name of the function that made it, and its variables are read.
    if function is None:
        raise UnknownMaskError("none")
    name = _maker(function)
    if name is None:
        return _read_constant(function)
    closure = dict(getclosurevars(function).nonlocals)
    if name == "or_masks":
        return reduce(_unite, map(_read, closure["mask_functions"]))
    if name == "and_masks":
        # transformers adds the packed mask, of the documents that it found in position ids, beside PACKED_POSITIONS. It
        # is left out. A packed mask without that comes from the user, and is unknown.
        parts = closure["mask_functions"]
        finds_documents = any(map(_restarts_positions, parts))
        return reduce(_intersect, (_read(part) for part in parts if _maker(part) != PACKED or not finds_documents))
    # transformers wraps a mask so that positions restart in each document: reads the wrapped mask.
    if name == PACKED_POSITIONS:
        return _read(closure["mask_function"])
    if name not in MAKERS:
        raise UnknownMaskError(name)
    rule = MAKERS[name](closure)
    if name == MODEL_FUNCTION:
        # Several model files define a function of this name, and may change it: its values at and beside the ends of
        # the band are compared with the rule.
        low, high = rule.other_keys or (0, 0)
        offsets = torch.tensor([low - 1, low, 0, high, high + 1])
        queries = torch.full_like(offsets, high - low + 2)  # far enough from 0 that no key index is negative
        index = torch.tensor(0)
        if function(index, index, queries, queries + offsets).tolist() != [False, True, True, True, False]:
            raise UnknownMaskError(name)
    return rule


def _restarts_positions(function: Any) -> bool:
    """Returns True for PACKED_POSITIONS, which transformers 5.24 joins by `or` with blocks before the packed mask."""
    if _maker(function) == "or_masks":
        return any(map(_restarts_positions, getclosurevars(function).nonlocals["mask_functions"]))
    return _maker(function) == PACKED_POSITIONS


def _maker(function: Any) -> str | None:
    """Returns the name of the function that made a closure, if it is in `masking_utils` or `MODEL_FUNCTION`."""
    name, module = (getattr(function, field, "") for field in ("__qualname__", "__module__"))
    name = name.split(".")[0]
    if module == "transformers.masking_utils" or (name == MODEL_FUNCTION and module.startswith("transformers.models.")):
        return name
    return None


def _read_constant(function: Any) -> Rule:
    """Reads a function without a closure that returns True for any arguments (Gemma 3, bidirectional)."""
    # The function is called only if its bytecode loads no argument and no closure, so that its value is constant.
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    is_constant = (
        code is not None
        and not code.co_freevars
        and set(code.co_names) <= {"torch", "tensor", "bool"}
        and not any(step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) for step in get_instructions(code))
    )
    if not is_constant or names.get("torch", torch) is not torch or not bool(function(0, 0, 0, 0)):
        name = getattr(function, "__qualname__", repr(function))
        raise UnknownMaskError(f"{getattr(function, '__module__', '')}.{name}")
    return _band_rule(*EVERYTHING)


def _band_rule(low: int, high: int, *, bidirectional: bool = False) -> Rule:
    return Rule((low, high), (low, high), bidirectional=bidirectional)


def _window(closure: dict[str, Any]) -> int:
    # In keys up to and including the query's own.
    window = int(closure["sliding_window"])
    if window < 1:
        raise ValueError(f"sliding_window={window} hides every key; a window of at least 1, or None, is accepted")
    return window


# Functions from a closure's variables to its rule, by the name of the transformers function that made the closure.
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


def _intersect(a: Rule, b: Rule) -> Rule:
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
    if a.chunk is not None or b.chunk is not None:
        raise UnknownMaskError("chunks joined by or")
    other_keys, group_keys = _unite_bands(a.other_keys, b.other_keys), _unite_bands(a.group_keys, b.group_keys)
    return Rule(other_keys, group_keys, _common_groups(a, b), None, a.bidirectional or b.bidirectional)


def _common_groups(a: Rule, b: Rule) -> Tensor | None:
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


# The mask of a sequence.


def mask_of(
    rule: Rule, groups: Tensor | None, documents: Sequence[int] | Sequence[Sequence[int]] | None, length: int
) -> AttentionMask:
    """Returns the mask of a rule for a sequence of `length` tokens. Each document has the mask of a row by itself."""
    if rule.chunk is not None:
        if groups is not None or not rule.causal:
            raise ValueError(f"chunks of {rule.chunk} that are not causal, or contain images, are not supported")
        left, _ = rule.window or (None, None)
        return AttentionMask.chunked(rule.chunk, documents).narrow(left)
    if groups is None:
        return AttentionMask(causal=rule.causal, window=rule.window, documents=documents)
    packed = AttentionMask(documents=documents)
    rows = [_mask_of_row(rule, row, packed.boundaries(n), length) for n, row in enumerate(groups)]
    return rows[0] if all(row == rows[0] for row in rows) else AttentionMask.rows(rows)


def _mask_of_row(rule: Rule, groups: Tensor, documents: Sequence[int] | None, length: int) -> AttentionMask:
    """Returns the mask of a row with groups [N], packed from documents."""
    # 1. The runs of each document: adjacent tokens of one group, as (group, or -1 for none; positions).
    documents_runs: list[list[tuple[int, range]]] = []
    for low, high in pairwise(documents or (0, length)):
        ids, counts = groups[low:high].unique_consecutive(return_counts=True)
        spans = [range(*ends) for ends in pairwise([low, *(low + counts.cumsum(0)).tolist()])]
        documents_runs.append([(max(group, -1), span) for group, span in zip(ids.tolist(), spans, strict=True)])
    # 2. The usual case has a compact form, `image_spans`: the layer is causal, each image is one run, and its tokens
    # see the whole image. The band of keys in the group is then that of other keys, without an upper bound.
    grouped = [[group for group, _ in runs if group >= 0] for runs in documents_runs]
    contiguous = all(len(set(ids)) == len(ids) for ids in grouped)
    if rule.causal and rule.other_keys and contiguous and rule.group_keys == (rule.other_keys[0], FAR):
        images = [span for runs in documents_runs for group, span in runs if group >= 0 and len(span) > 1]
        if not images:
            return AttentionMask(window=rule.window, documents=documents)
        left, _ = rule.window or (None, None)
        return AttentionMask.image_spans(images, documents, window=None if left is None else (left, None))
    # 3. Otherwise slices: each run of queries with its group's keys, and with its document's other keys.
    slices: list[Slice] = []
    for runs in documents_runs:
        for group, queries in runs:
            # The document's keys in the fewest spans; tokens of no group do not form one.
            same_group = [(key_group == group and group >= 0, keys) for key_group, keys in runs]
            for in_group, adjacent in groupby(same_group, itemgetter(0)):
                spans = [keys for _, keys in adjacent]
                keys, band = range(spans[0].start, spans[-1].stop), rule.group_keys if in_group else rule.other_keys
                # key - query lies between keys[0] - queries[-1] and keys[-1] - queries[0].
                if band is not None and band[0] <= keys[-1] - queries[0] and band[1] >= keys[0] - queries[-1]:
                    low, high = (None if abs(bound) >= FAR else bound for bound in band)
                    slices.append(Slice(queries, keys, low, high))
            if len(slices) > MAX_SLICES:
                raise ValueError(f"groups of tokens in more than {MAX_SLICES} slices of a row: they are too scattered")
    return AttentionMask.of_slices(slices)


def narrow(mask: AttentionMask, rule: Rule) -> AttentionMask:
    """Returns the user's mask, which is for all layers, narrowed by the window of the layers of one kind."""
    if rule.chunk is not None:
        raise ValueError(
            f"sequence(mask=...) for layers that see chunks of {rule.chunk}: one mask for all layers cannot have the "
            "chunks of some; remove `mask`: the model's own masks are used"
        )
    if mask.causal and not rule.causal:
        raise ValueError(f"sequence(mask=...) has causal=True, but the model is bidirectional: {mask}")
    if rule.causal and not mask.causal and mask.pattern is None:
        raise ValueError(f"sequence(mask=...) has causal=False, but the model is causal: {mask}")
    left, right = rule.window or (None, None)
    narrowed = mask.narrow(left)
    if right is None:
        return narrowed
    before, after = narrowed.window or (None, None)
    return replace(narrowed, window=(before, right if after is None else min(after, right)))


# The mask that layers get.


class ShardMask:
    """The mask of all layers of one kind, with the layout and documents of the sequence."""

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    def __init__(
        self,
        context: SequenceContext,
        layout: SequenceLayout,
        shard: int,
        rule: Rule | None,
        groups: Tensor | None,
        position_ids: Tensor | None,
        boundaries: tuple[Tensor | None, Tensor | None],
        counts_from_shard: bool,
        first_position: int,
        refusal: str | None,
        batch: int,
        attention: Callable[..., tuple[Tensor, None]],
    ) -> None:
        # Layout, documents and mask given to `with sequence(...)` around the forward.
        self.context, self.layout = context, layout
        self.positions = layout.positions(shard)  # [T], global positions of this rank's tokens, on the CPU
        # The rule is None if the mask function is unknown, so that only a mask given to `sequence` can be used. With
        # groups: [B, N], the group of each token of the whole sequence.
        self.rule, self.groups = rule, groups
        # Position ids, cu_seq_lens_q and cu_seq_lens_k from the frames of the mask function's callers.
        self.position_ids, self.boundaries = position_ids, boundaries
        # True if the model got no position ids, so that it counts from the shard's first token.
        self.counts_from_shard = counts_from_shard
        self.first_position = first_position  # of a document: 0, or padding_idx + 1 (RoBERTa)
        # The first layer that gets the mask raises it, because a model also makes masks of kinds that no layer has
        # (Qwen2-MoE with sliding_window=0).
        self.refusal = refusal
        # For layers that compute attention themselves: the number of rows, and our attention function.
        self.batch, self.attention = batch, attention
        # The mask with the documents of `position_ids` and `boundaries`; None if they are invalid.
        self.finished: AttentionMask | None = None
        self.cached_mask: tuple[Documents | None, AttentionMask] | None = None

    def size(self) -> tuple[int, ...]:
        """Returns the shape of a mask tensor of the shard, with which some layers compare that of their scores."""
        return self.batch, 1, len(self.positions), len(self.positions)

    # A model that computes with its mask tensor would get wrong results on a shard: any use as a tensor raises.
    def __getattr__(self, name: str) -> NoReturn:
        raise NoTensorError(name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise NoTensorError("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        raise NoTensorError(getattr(func, "__name__", str(func)))

    def finished_for(
        self,
        tokens: int,
        position_ids: Tensor | None,
        cu_seq_lens_q: Tensor | None,
        cu_seq_lens_k: Tensor | None,
    ) -> AttentionMask | None:
        """Returns `finished`, or None for a layer that gets other tensors than those from which it was made."""
        same_ids = position_ids is None or position_ids.ndim != 2 or position_ids is self.position_ids
        same_boundaries = cu_seq_lens_q is self.boundaries[0] and cu_seq_lens_k is self.boundaries[1]
        return self.finished if tokens == len(self.positions) and same_ids and same_boundaries else None

    def with_documents(self, documents: Documents | None) -> AttentionMask:
        """Returns the mask of a sequence packed from documents; computed once for all layers of the kind."""
        # `is not` first: comparing thousands of documents in every layer takes time.
        if self.cached_mask is None or (self.cached_mask[0] is not documents and self.cached_mask[0] != documents):
            user_mask = self.context.mask
            if user_mask is None:
                assert self.rule is not None
                mask = mask_of(self.rule, self.groups, documents, self.layout.length)
            else:
                mask = user_mask if self.rule is None else narrow(user_mask, self.rule)
            self.cached_mask = documents, mask
        return self.cached_mask[1]


class NoTensorError(ValueError, AttributeError):
    """A model used a `ShardMask` as a tensor. Also an AttributeError, so that `hasattr` returns False."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model computes with its attention mask ({name}), which on a sharded sequence is no tensor: it "
            "changes the mask, or attends without transformers' attention interface; use another attn_implementation"
        )
