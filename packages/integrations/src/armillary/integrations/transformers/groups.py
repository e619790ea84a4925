"""Groups of tokens that belong to one image, over all ranks, and their masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.context_parallel.communication import gather_tokens
from armillary.attention.context_parallel.documents import check_shards
from armillary.attention.mask import AttentionMask, Slice
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.integrations.transformers.callers import Caller
from armillary.integrations.transformers.masks import FAR, Band, Rule

Runs = list[tuple[int, range]]
"""(group, -1 for none; positions) of a row from start to end."""

SLICES = 2**16
"""So many slices of a row at most."""

BY_VALUE = frozenset({"hrm_text"})
"""Models of transformers in which a token's type alone says its group."""


class GroupFinder:
    """Numbers the groups of all ranks' tokens as one device would, which a shard cannot.

    Where images are numbered by where they start, the model's own function is asked again, about the token types of all
    ranks. Once for all layers, and for all steps that are given the same token types.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.found: Any = WeakTensorKeyDictionary()
        """By token types: (their version, layout, groups)."""

    def find(self, rule: Rule, around: Sequence[Caller], layout: SequenceLayout) -> Tensor | None:
        """The groups of all tokens [B, N] on the CPU, -1 for those of none; None where a rule has none.

        Communicates: every rank of the method must call it.

        Raises:
            ValueError: it is not known how the model numbers them; on every rank, shards that do not fit the layout.
        """
        if rule.groups is None:
            return None
        if self.method.shards == 1:
            return rule.groups.cpu()
        types, number = _numbering(rule.groups, around)
        key = (types._version, layout)
        known = None if types.is_inference() else self.found.get(types)
        if known is not None and known[0] == key:
            return known[1]
        check_shards(layout.sizes[self.method.shard], types.shape[1], layout, self.method)
        groups = number(gather_tokens(types.int(), self.method, layout).cpu())
        self.found[types] = (key, groups)
        return groups


def _numbering(groups: Tensor, around: Sequence[Caller]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(what to gather of each token, what makes groups of it)."""
    for caller in around:
        if caller.module.removeprefix("transformers.models.").split(".")[0] in BY_VALUE:
            return groups, torch.clone
        number = caller.globals.get("get_block_sequence_ids_for_mask")
        for name in ("token_type_ids", "mm_token_type_ids"):
            types = caller.locals.get(name)
            if (
                number is not None
                and isinstance(types, Tensor)
                and torch.equal(number(types, device=groups.device), groups)
            ):
                return types, partial(number, device=torch.device("cpu"))
    made = around[-1].module if around else "a model"
    raise ValueError(
        f"{made} gives tokens to blocks that see each other, numbered in a way that is not known, so that a shard's "
        "numbers do not say which tokens of other ranks are in them; say them: `with sequence(layout=..., "
        "mask=AttentionMask.image_spans(...))`"
    )


def mask_of(
    rule: Rule, groups: Tensor | None, documents: Sequence[int] | Sequence[Sequence[int]] | None, length: int
) -> AttentionMask:
    """A rule for a sequence of `length` tokens packed from documents, each of which is as it would be alone.

    Raises:
        ValueError: groups in so many parts that their mask would have more than SLICES slices.
    """
    if rule.chunk is not None:
        if groups is not None or not rule.causal:
            raise ValueError(f"chunks of {rule.chunk} that are not causal, or have images in them: they are not known")
        return AttentionMask.chunked(rule.chunk, documents).narrowed((rule.window or (None, None))[0])
    if groups is None:
        return AttentionMask(causal=rule.causal, window=rule.window, documents=documents)
    per_row = AttentionMask(documents=documents)
    rows = [_of_row(rule, row, per_row.boundaries(n), length) for n, row in enumerate(groups)]
    alike = all(row == rows[0] for row in rows)
    return rows[0] if alike else AttentionMask.rows(rows)


def _of_row(rule: Rule, groups: Tensor, ends: Sequence[int] | None, length: int) -> AttentionMask:
    of_documents = [_runs(groups, low, high) for low, high in pairwise(ends or (0, length))]
    images = [(group, span) for runs in of_documents for group, span in runs if group >= 0]
    left = (rule.window or (None,))[0]
    whole = all(_once_each(runs) for runs in of_documents)
    if rule.causal and rule.apart and whole and rule.within == (rule.apart[0], FAR):
        spans = [span for _, span in images if len(span) > 1]
        if not spans:
            return AttentionMask(window=rule.window, documents=ends)
        return AttentionMask.image_spans(spans, ends, window=None if left is None else (left, None))
    return AttentionMask.of_slices(_slices(rule, of_documents))


def _once_each(runs: Runs) -> bool:
    """Whether no group is in two runs."""
    named = [group for group, _ in runs if group >= 0]
    return len(set(named)) == len(named)


def _runs(groups: Tensor, low: int, high: int) -> Runs:
    ids, counts = groups[low:high].unique_consecutive(return_counts=True)
    ends = [low, *(low + counts.cumsum(0)).tolist()]
    return [(max(group, -1), range(a, b)) for group, (a, b) in zip(ids.tolist(), pairwise(ends), strict=True)]


def _slices(rule: Rule, of_documents: Sequence[Runs]) -> list[Slice]:
    """Each run of queries, and the keys of its document, those of its group apart from the others."""
    found: list[Slice] = []
    for runs in of_documents:
        for group, queries in runs:
            for same, keys in _told_apart(group, runs):
                found += _slice(queries, keys, rule.within if same else rule.apart)
            if len(found) > SLICES:
                raise ValueError(f"blocks of tokens in more than {SLICES} slices of a row: they lie too far apart")
    return found


def _told_apart(group: int, runs: Runs) -> list[tuple[bool, range]]:
    """The keys of a document in as few runs as are needed: (whether they are of this group, positions)."""
    found: list[tuple[bool, range]] = []
    for other, keys in runs:
        same = other == group and group >= 0
        if found and found[-1][0] == same:
            found[-1] = (same, range(found[-1][1].start, keys.stop))
        else:
            found.append((same, keys))
    return found


def _slice(queries: range, keys: range, band: Band | None) -> list[Slice]:
    """At most one slice; none where no pair is in the band."""
    if band is None or band[0] > keys[-1] - queries[0] or band[1] < keys[0] - queries[-1]:
        return []
    low, high = (None if abs(bound) >= FAR else bound for bound in band)
    return [Slice(queries, keys, low, high)]
