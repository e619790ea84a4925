"""The object that replaces the attention mask between a model's mask function and its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from armillary.attention.context_parallel.sequence import SequenceContext
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.content import Documents
from armillary.core import SequenceLayout
from armillary.integrations.transformers.groups import mask_of
from armillary.integrations.transformers.masks import Rule


class ShardMask:
    """The mask of the layers of one kind, and the sharding of the sequence.

    Args:
        sharding: the `sequence` block of the forward.
        layout: layout over all ranks of the method.
        rule: the mask function of the model; None if it is unknown and the mask of the block replaces it.
        groups: [B, N], the rule's groups for the whole sequence.
        position_ids: position ids in the functions that called the mask function.
        counts_from_shard: True if the model got no position ids, so that it counts from the shard's first token.
        first_position: the position id of a document's first token: 0, or padding_idx + 1 (RoBERTa).
        refusal: reason for which layers cannot use the mask. A model makes masks of kinds that no layer has
            (Qwen2-MoE with sliding_window=0), so it is raised by the first layer that gets the mask.
    """

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    __slots__ = (
        "cached_mask",
        "counts_from_shard",
        "first_position",
        "groups",
        "layout",
        "position_ids",
        "refusal",
        "rule",
        "sharding",
    )

    def __init__(
        self,
        sharding: SequenceContext,
        layout: SequenceLayout,
        rule: Rule | None,
        groups: Tensor | None = None,
        position_ids: Tensor | None = None,
        counts_from_shard: bool = False,
        first_position: int = 0,
        refusal: str | None = None,
    ) -> None:
        self.sharding, self.layout, self.rule, self.groups = sharding, layout, rule, groups
        self.position_ids, self.counts_from_shard, self.first_position = position_ids, counts_from_shard, first_position
        self.refusal = refusal
        self.cached_mask: tuple[Documents | None, AttentionMask] | None = None

    # Models that compute with their mask would compute nonsense on a shard: any use as a tensor raises.
    def __getattr__(self, name: str) -> NoReturn:
        raise NoTensorError(name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise NoTensorError("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        raise NoTensorError(getattr(func, "__name__", str(func)))

    def with_documents(self, documents: Documents | None) -> AttentionMask:
        """Returns the mask of a sequence packed from documents; computed once for all layers of the kind."""
        if self.cached_mask is None or (self.cached_mask[0] is not documents and self.cached_mask[0] != documents):
            block_mask = self.sharding.mask
            if block_mask is None:
                assert self.rule is not None
                mask = mask_of(self.rule, self.groups, documents, self.layout.length)
            else:
                mask = block_mask if self.rule is None else narrow(block_mask, self.rule)
            self.cached_mask = documents, mask
        return self.cached_mask[1]


def narrow(mask: AttentionMask, rule: Rule) -> AttentionMask:
    """Returns a mask for all layers, narrowed by the window of the layers of one kind.

    Raises:
        ValueError: the mask contradicts the model.
    """
    if rule.chunk is not None:
        raise ValueError(
            f"sequence(mask=...) for layers that see chunks of {rule.chunk}: one mask for all layers cannot have the "
            "chunks of some; remove mask, the model has its own"
        )
    if mask.causal and not rule.causal:
        raise ValueError(f"sequence(mask=...) has causal=True, but the model is bidirectional: {mask}")
    if rule.causal and not mask.causal and mask.pattern is None:
        raise ValueError(f"sequence(mask=...) has causal=False, but the model is causal: {mask}")
    left, right = rule.window or (None, None)
    narrow = mask.narrow(left)
    if right is None:
        return narrow
    before, after = narrow.window or (None, None)
    return replace(narrow, window=(before, right if after is None else min(after, right)))


class NoTensorError(ValueError, AttributeError):
    """A model computes with the object in place of its mask. An AttributeError too, for code that probes attributes."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model computes with its attention mask ({name}), which on a sharded sequence is no tensor: it "
            "changes the mask, or attends without transformers' attention interface; use another attn_implementation"
        )
