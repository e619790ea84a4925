"""Groups of tokens, such as the tokens of one image, over all ranks, and the masks that they imply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention import AttentionMask, Method, Slice
from armillary.attention.parts import check_shards, gather_tokens
from armillary.core import SequenceLayout
from armillary.integrations.transformers.callers import Caller
from armillary.integrations.transformers.masks import FAR, Band, Rule

Runs = list[tuple[int, range]]
"""Adjacent tokens of one group, in order: (group, or -1 for none; positions)."""

MAX_SLICES = 2**16
"""Maximum number of slices in the mask of one row."""

TYPE_IS_GROUP = frozenset({"hrm_text"})
"""Models of transformers in which the group of a token is its type."""


class GroupFinder:
    """Finds the group of each token of a sequence, numbered as on one device.

    Models number images by their order in the row, which cannot be known from a shard. So every rank gathers the token
    types of the whole row and calls the model's own numbering function on them. Results are cached by the tensor of
    token types.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.cache: Any = WeakTensorKeyDictionary()
        """Token types -> ((version, layout), groups)."""

    def find(self, rule: Rule, callers: Sequence[Caller], layout: SequenceLayout) -> Tensor | None:
        """Returns the group of every token [B, N] on the CPU, -1 for no group; None if the rule has no groups.

        Bytes sent: those of `gather_tokens` for the token types. Every rank of the method must call it.

        Raises:
            ValueError: the model numbers groups in an unknown way; on every rank, shards that do not fit the layout.
        """
        if rule.groups is None:
            return None
        if self.method.shards == 1:
            return rule.groups.cpu()
        types, number_groups = _find_numbering(rule.groups, callers)
        # An inference tensor has no version counter, so a change in place cannot be noticed: it is gathered every time.
        version = None if types.is_inference() else types._version
        cached = self.cache.get(types)
        if cached is not None and version is not None and cached[0] == (version, layout):
            return cached[1]
        check_shards(layout.sizes[self.method.shard], types.shape[1], layout, self.method)
        groups = number_groups(gather_tokens(types.int(), self.method, layout).cpu())
        self.cache[types] = ((version, layout), groups)
        return groups


def _find_numbering(groups: Tensor, callers: Sequence[Caller]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns (token types [B, T] in a caller's frame, the function that numbers groups by them)."""
    for caller in callers:
        if caller.module.removeprefix("transformers.models.").split(".")[0] in TYPE_IS_GROUP:
            return groups, torch.clone  # the groups are the token types, so there is nothing to compute
        # The function of transformers from token types to groups, if the caller's file imports it.
        number_groups = caller.globals.get("get_block_sequence_ids_for_mask")
        for name in ("token_type_ids", "mm_token_type_ids"):
            types = caller.locals.get(name)
            # Accept only types that reproduce the groups of this mask: a frame may have the types of another input.
            if (
                number_groups is not None
                and isinstance(types, Tensor)
                and torch.equal(number_groups(types, device=groups.device), groups)
            ):
                return types, partial(number_groups, device=torch.device("cpu"))
    model = callers[-1].module if callers else "a model"
    raise ValueError(
        f"{model} numbers blocks of tokens that see each other in an unknown way, so a shard's numbers do not tell "
        "which tokens of other ranks are in them; give the mask: `cp.shard(ids, mask=AttentionMask.image_spans(...))`"
    )


def mask_of(
    rule: Rule, groups: Tensor | None, documents: Sequence[int] | Sequence[Sequence[int]] | None, length: int
) -> AttentionMask:
    """Returns the mask of a rule for a sequence of `length` tokens. Each document has the mask of a row by itself.

    Raises:
        ValueError: groups so scattered that the mask would have more than MAX_SLICES slices; chunks in a bidirectional
            model or with groups.
    """
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
    runs_of_documents = [_runs(groups, low, high) for low, high in pairwise(documents or (0, length))]
    # The usual case has a compact form, `image_spans`: the layer is causal, each image is one run, and its tokens see
    # the whole image. The band of keys in the group is then that of other keys, without an upper bound.
    contiguous = all(_groups_are_contiguous(runs) for runs in runs_of_documents)
    if rule.causal and rule.other_keys and contiguous and rule.group_keys == (rule.other_keys[0], FAR):
        images = [span for runs in runs_of_documents for group, span in runs if group >= 0 and len(span) > 1]
        if not images:
            return AttentionMask(window=rule.window, documents=documents)
        left, _ = rule.window or (None, None)
        return AttentionMask.image_spans(images, documents, window=None if left is None else (left, None))
    return AttentionMask.of_slices(_slices(rule, runs_of_documents))


def _groups_are_contiguous(runs: Runs) -> bool:
    """Returns True if each group is a single run."""
    groups = [group for group, _ in runs if group >= 0]
    return len(set(groups)) == len(groups)


def _runs(groups: Tensor, low: int, high: int) -> Runs:
    """Returns the runs of tokens low .. high - 1."""
    ids, counts = groups[low:high].unique_consecutive(return_counts=True)
    ends = [low, *(low + counts.cumsum(0)).tolist()]
    return [(max(group, -1), range(a, b)) for group, (a, b) in zip(ids.tolist(), pairwise(ends), strict=True)]


def _slices(rule: Rule, runs_of_documents: Sequence[Runs]) -> list[Slice]:
    """Returns the slices of a row: each run of queries with its group's keys, and with its document's other keys."""
    slices: list[Slice] = []
    for runs in runs_of_documents:
        for group, queries in runs:
            for same_group, keys in _split_keys(group, runs):
                slices += _slice(queries, keys, rule.group_keys if same_group else rule.other_keys)
            if len(slices) > MAX_SLICES:
                raise ValueError(f"groups of tokens in more than {MAX_SLICES} slices of a row: they are too scattered")
    return slices


def _split_keys(group: int, runs: Runs) -> list[tuple[bool, range]]:
    """Returns the keys of a document in the fewest runs: (True for keys of this group, positions)."""
    split: list[tuple[bool, range]] = []
    for key_group, keys in runs:
        same_group = key_group == group and group >= 0  # tokens of no group do not form one
        if split and split[-1][0] == same_group:
            split[-1] = (same_group, range(split[-1][1].start, keys.stop))
        else:
            split.append((same_group, keys))
    return split


def _slice(queries: range, keys: range, band: Band | None) -> list[Slice]:
    """Returns a list with the slice of these queries, keys and band; an empty list if no query sees a key."""
    # key - query lies between keys[0] - queries[-1] and keys[-1] - queries[0].
    if band is None or band[0] > keys[-1] - queries[0] or band[1] < keys[0] - queries[-1]:
        return []
    low, high = (None if abs(bound) >= FAR else bound for bound in band)
    return [Slice(queries, keys, low, high)]
