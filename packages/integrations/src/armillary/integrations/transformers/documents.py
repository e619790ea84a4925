"""The documents of packed rows in a model of Hugging Face transformers, and checks of the positions of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.context_parallel.batch import whole_sequence
from armillary.attention.context_parallel.packing import REMEDY, check_positions, check_shards, find_documents, gather
from armillary.attention.context_parallel.sequence import Documents, check_tokens
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.integrations.transformers.shard_mask import ShardMask


class DocumentFinder:
    """Finds documents, once for all layers, and for all steps that are given the same tensor."""

    def __init__(self, attend: Method) -> None:
        self.attend = attend
        self.found: Any = WeakTensorKeyDictionary()
        """By position_ids: (its version, layout, what was told, whether bidirectional, documents)."""

    def find(self, name: str, mask: ShardMask, tokens: int, given: Tensor | None, told: Documents | None) -> Any:
        """The documents: those told, else those seen in position ids; None where each row is one.

        Args:
            name: of the layer, for messages.
            given: its position ids, if it has some.

        Raises:
            ValueError: position ids that do not fit, or none where they are needed; on every rank.
        """
        position_ids = given if given is not None and given.ndim == 2 else mask.position_ids
        if position_ids is None or not (position_ids.ndim == 2 or (position_ids.ndim == 3 and len(position_ids) == 3)):
            return self._without_positions(name, mask, tokens, told)
        bidirectional = mask.rule is not None and mask.rule.bidirectional
        version = None if position_ids.is_inference() else position_ids._version
        key = (version, mask.layout, told, bidirectional)
        known = self.found.get(position_ids)
        if known is not None and version is not None and known[0] == key:
            return known[1]
        check_shards(tokens, position_ids.shape[-1], mask.layout, self.attend)
        if mask.first_position:
            check_least(name, position_ids, mask.first_position, self.attend)
        documents = self._look(position_ids, mask, told, bidirectional)
        self.found[position_ids] = (key, documents)
        return documents

    def _look(self, position_ids: Tensor, mask: ShardMask, told: Documents | None, bidirectional: bool) -> Any:
        layout = mask.layout
        if position_ids.ndim == 3:
            if told is None:
                check_multimodal(position_ids, layout, self.attend)
            return told
        if told is None and not bidirectional:
            return find_documents(position_ids, layout, self.attend, mask.first_position)
        try:
            check_positions(position_ids, layout, self.attend, told or (0, layout.length))
        except ValueError as refused:
            if told is not None:
                raise
            raise ValueError(
                f"{refused}. In position ids of a bidirectional model transformers does not look for documents: say "
                "them with sequence(documents=...)"
            ) from None
        return told

    def _without_positions(self, name: str, mask: ShardMask, tokens: int, told: Documents | None) -> Documents | None:
        check_tokens(self.attend.shard, tokens, mask.layout)
        if mask.unplaced and self.attend.shards > 1:
            first = mask.first_position
            remedy = f"shard_batch(attend, ids, padding_idx={first - 1}) makes them" if first else REMEDY
            raise ValueError(
                f"{name} is given no position ids, and the model makes them for its tokens as if they were the first "
                f"of the sequence; {remedy}"
            )
        if told is None and not (mask.rule is not None and mask.rule.bidirectional):
            raise ValueError(
                f"{name} is given no position ids [batch, tokens], so that documents cannot be seen; say them with "
                f"`with sequence(layout=..., documents=...)`: [0, {mask.layout.length}] if there is only one"
            )
        return told


def check_least(name: str, position_ids: Tensor, first: int, attend: Method) -> None:
    """Refuses, on every rank, position ids below those that a model gives to tokens (RoBERTa: padding_idx + 1).

    Communicates: every rank of `attend` must call it.
    """
    least = min(least for (least,) in gather([[int(position_ids.min())]], attend))
    if least < first:
        raise ValueError(
            f"{name} is given position id {least}, but the model counts tokens from {first} (padding_idx + 1): "
            f"shard_batch(attend, ids, padding_idx={first - 1}) makes its position ids"
        )


def of_cu_seq_lens(queries: Tensor, keys: Tensor | None, layout: SequenceLayout) -> Documents | None:
    """The documents that flash attention's boundaries say."""
    documents = AttentionMask(documents=queries).documents
    if keys is not None and AttentionMask(documents=keys).documents != documents:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: no cross-attention on a sharded sequence")
    if int(queries[-1]) != layout.length:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(queries[-1])}; it must be that of the whole sequence, of {layout.length}"
        )
    return documents


def check_multimodal(position_ids: Tensor, layout: SequenceLayout, attend: Method) -> None:
    """Refuses position ids [3, B, T] of time, height and width (M-RoPE) that are not those of the layout's tokens.

    They rise from token to token, time first, width last. Only after a video, whose time runs faster than positions,
    they may go back, to beyond its height and width. Communicates: every rank of `attend` must call it.

    Raises:
        ValueError: on every rank, with the first token whose ids are not beyond those before it.
    """
    ids = whole_sequence(position_ids.permute(1, 2, 0).contiguous(), attend, layout).cpu()
    before, after = ids[:, :-1], ids[:, 1:]
    (t, h, w), (t2, h2, w2) = before.unbind(-1), after.unbind(-1)
    rising = (t2 > t) | ((t2 == t) & ((h2 > h) | ((h2 == h) & (w2 > w))))
    seen = (t != h) | (h != w)  # a token of an image or a video
    beyond = seen & (after.amin(-1) > torch.maximum(h, w))
    wrong = (~(rising | beyond)).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise ValueError(
            f"the token at position {at + 1} of row {row} has position ids {ids[row, at + 1].tolist()}, which are not "
            f"beyond {ids[row, at].tolist()} of the token before it: pass the shard of the whole sequence's "
            "(`layout.take(position_ids, attend.shard, dim=2)`), or, of packed rows, say sequence(documents=...)"
        )
