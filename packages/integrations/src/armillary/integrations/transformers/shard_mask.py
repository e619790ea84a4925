"""`ShardMask`: the object that a model passes from its mask function to its layers in place of a mask tensor.

`mask_of` makes the mask of a whole sequence from a model's rule, documents and groups of tokens, such as images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

from torch import Tensor

from armillary.attention import AttentionMask, Slice
from armillary.attention.parts import Documents, SequenceContext
from armillary.core import SequenceLayout
from armillary.integrations.transformers.masks import FAR, Band, Rule

Runs = list[tuple[int, range]]
"""Adjacent tokens of one group, in order: (group, or -1 for none; positions)."""

MAX_SLICES = 2**16
"""Maximum number of slices in the mask of one row."""


class ShardMask:
    """The mask of all layers of one kind, with the layout and documents of the sequence.

    Args:
        context: layout, documents and mask given to `with sequence(...)` around the forward.
        layout: layout over all ranks of the method.
        shard: this rank's shard.
        rule: the model's mask function; None if it is unknown, so that only a mask given to `sequence` can be used.
        groups: [B, N], the group of each token of the whole sequence, if the rule has groups.
        position_ids: position ids read from the frames of the mask function's callers.
        boundaries: cu_seq_lens_q and cu_seq_lens_k read from these frames; None without.
        counts_from_shard: True if the model got no position ids, so that it counts from the shard's first token.
        first_position: the position id of a document's first token: 0, or padding_idx + 1 (RoBERTa).
        refusal: reason why layers cannot use the mask. The first layer that gets the mask raises it, because a model
            also makes masks of kinds that no layer has (Qwen2-MoE with sliding_window=0).

    Attributes:
        positions: [T], global positions of this rank's tokens, on the CPU.
        finished: the mask with the documents of `position_ids` and `boundaries`; None if they are invalid.
    """

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    __slots__ = (
        "boundaries",
        "cached_mask",
        "context",
        "counts_from_shard",
        "finished",
        "first_position",
        "groups",
        "layout",
        "position_ids",
        "positions",
        "refusal",
        "rule",
    )

    def __init__(
        self,
        context: SequenceContext,
        layout: SequenceLayout,
        shard: int,
        rule: Rule | None,
        groups: Tensor | None = None,
        position_ids: Tensor | None = None,
        boundaries: tuple[Tensor | None, Tensor | None] = (None, None),
        counts_from_shard: bool = False,
        first_position: int = 0,
        refusal: str | None = None,
    ) -> None:
        self.context, self.layout, self.rule, self.groups = context, layout, rule, groups
        self.position_ids, self.counts_from_shard, self.first_position = position_ids, counts_from_shard, first_position
        self.boundaries, self.refusal = boundaries, refusal
        self.positions = layout.positions(shard)
        self.finished: AttentionMask | None = None
        self.cached_mask: tuple[Documents | None, AttentionMask] | None = None

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


def narrow(mask: AttentionMask, rule: Rule) -> AttentionMask:
    """Returns the user's mask, which is for all layers, narrowed by the window of the layers of one kind.

    Raises:
        ValueError: the mask contradicts the model.
    """
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


class NoTensorError(ValueError, AttributeError):
    """A model used a `ShardMask` as a tensor. Also an AttributeError, so that `hasattr` returns False."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model computes with its attention mask ({name}), which on a sharded sequence is no tensor: it "
            "changes the mask, or attends without transformers' attention interface; use another attn_implementation"
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
