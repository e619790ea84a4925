"""The object that replaces the attention mask between a model's mask function and its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from armillary.attention.context_parallel.sequence import Documents, Sharding
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.integrations.transformers.groups import mask_of
from armillary.integrations.transformers.masks import Rule


class ShardMask:
    """Who sees whom in the layers of one kind, and how the sequence is sharded.

    Args:
        rule: the mask function of the model; None where it is not known and `sequence(mask=...)` replaces it.
        groups: [B, N], as the rule has them for the whole sequence.
        position_ids: those that the maker of masks, or its caller, knows.
        uncounted: the model was given no position ids and would count from the first token of the shard.
        first_position: the position id of a document's first token: 0, or padding_idx + 1 (RoBERTa).
        refusal: reason for which layers cannot use the mask. A model makes masks of kinds that no layer has
            (Qwen2-MoE with sliding_window=0), so it is raised by the first layer that is handed the mask.
    """

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    __slots__ = (
        "first_position",
        "groups",
        "layout",
        "made",
        "position_ids",
        "refusal",
        "rule",
        "sharding",
        "uncounted",
    )

    def __init__(
        self,
        sharding: Sharding,
        layout: SequenceLayout,
        rule: Rule | None,
        groups: Tensor | None = None,
        position_ids: Tensor | None = None,
        uncounted: bool = False,
        first_position: int = 0,
        refusal: str | None = None,
    ) -> None:
        self.sharding, self.layout, self.rule, self.groups = sharding, layout, rule, groups
        self.position_ids, self.uncounted, self.first_position = position_ids, uncounted, first_position
        self.refusal = refusal
        self.made: tuple[Documents | None, AttentionMask] | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise NoTensorError(name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise NoTensorError("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        raise NoTensorError(getattr(func, "__name__", str(func)))

    def with_documents(self, documents: Documents | None) -> AttentionMask:
        """The mask of a sequence packed from these; made once for all layers of the kind."""
        if self.made is None or (self.made[0] is not documents and self.made[0] != documents):
            self.made = documents, self._make(documents)
        return self.made[1]

    def _make(self, documents: Documents | None) -> AttentionMask:
        told = self.sharding.mask
        if told is not None:
            return told if self.rule is None else narrowed(told, self.rule)
        assert self.rule is not None
        return mask_of(self.rule, self.groups, documents, self.layout.length)


def narrowed(told: AttentionMask, rule: Rule) -> AttentionMask:
    """A mask that was said for all layers, with the window of those of one kind.

    Raises:
        ValueError: it contradicts what the model says.
    """
    if rule.chunk is not None:
        raise ValueError(
            f"sequence(mask=...) for layers that see chunks of {rule.chunk}: one mask for all layers cannot say those "
            "of each; leave mask out, the model says its own"
        )
    if told.causal and not rule.causal:
        raise ValueError(f"sequence(mask=...) has causal=True, but the model is bidirectional: {told}")
    if rule.causal and not told.causal and told.pattern is None:
        raise ValueError(f"sequence(mask=...) has causal=False, but the model is causal: {told}")
    left, right = rule.window or (None, None)
    mask = told.narrowed(left)
    if right is None:
        return mask
    before, after = mask.window or (None, None)
    return replace(mask, window=(before, right if after is None else min(after, right)))


class NoTensorError(ValueError, AttributeError):
    """A model computes with what stands for its mask. An AttributeError too, for code that asks what it can do."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model computes with its attention mask ({name}), which on a sharded sequence is no tensor: it "
            "changes the mask, or attends without transformers' attention interface; use another attn_implementation"
        )
