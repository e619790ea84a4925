"""`DocumentFinder`: documents of packed rows by the rules of transformers, with checks of position ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention import AttentionMask, Method
from armillary.attention.parts import (
    POSITIONS_HINT,
    Documents,
    check_positions,
    check_shards,
    check_tokens,
    find_documents,
    gather_integers,
    gather_tokens,
)
from armillary.core import SequenceLayout
from armillary.integrations.transformers.shard_mask import ShardMask


class DocumentFinder:
    """Finds the documents of a batch, once for all layers and for all steps with the same position_ids tensor."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.cache: Any = WeakTensorKeyDictionary()
        """Position ids -> ((version, layout, given documents, bidirectional), documents)."""

    def find(
        self, name: str, mask: ShardMask, tokens: int, position_ids: Tensor | None, documents: Documents | None
    ) -> Documents | None:
        """Returns `documents` or, if they are None, the documents in position ids; None if each row is one document.

        Args:
            name: name of the layer, for error messages.
            tokens: tokens of this rank.
            position_ids: position ids of the layer, if it gets any.
            documents: documents of `sequence` or of cu_seq_lens_q; None if neither has any.

        Raises:
            ValueError: on every rank: position ids do not fit the layout or the documents, are below the model's first
                position, or are missing but needed. Without position ids, a wrong number of tokens raises on its own
                rank only.
        """
        # Some models pass their layers no position ids, or M-RoPE's [3, B, T]. The mask function may have found
        # position ids [B, T] in the model's frame.
        if position_ids is None or position_ids.ndim != 2:
            position_ids = mask.position_ids
        if position_ids is None or not (position_ids.ndim == 2 or (position_ids.ndim == 3 and len(position_ids) == 3)):
            return self._find_without_positions(name, mask, tokens, documents)
        bidirectional = mask.rule is not None and mask.rule.bidirectional
        # An inference tensor has no version counter, so a change in place cannot be noticed: it is checked every time.
        version = None if position_ids.is_inference() else position_ids._version
        key = (version, mask.layout, documents, bidirectional)
        cached = self.cache.get(position_ids)
        if cached is not None and version is not None and cached[0] == key:
            return cached[1]
        # The checks communicate before they raise, so that all ranks raise the same error and none hangs.
        check_shards(tokens, position_ids.shape[-1], mask.layout, self.method)
        if mask.first_position:
            check_first_position(name, position_ids, mask.first_position, self.method)
        documents = self._check_or_find(position_ids, mask, documents, bidirectional)
        self.cache[position_ids] = (key, documents)
        return documents

    def _check_or_find(
        self, position_ids: Tensor, mask: ShardMask, documents: Documents | None, bidirectional: bool
    ) -> Documents | None:
        """Checks position ids against documents; without documents, finds them in the position ids."""
        layout = mask.layout
        if position_ids.ndim == 3:  # M-RoPE: time, height, width
            if documents is None:
                check_multimodal(position_ids, layout, self.method)
            return documents
        if documents is None and not bidirectional:
            return find_documents(position_ids, layout, self.method, mask.first_position)
        try:
            check_positions(position_ids, layout, self.method, documents or (0, layout.length))
        except ValueError as error:
            if documents is not None:
                raise
            raise ValueError(
                f"{error}. In position ids of a bidirectional model transformers does not look for documents: give "
                "them to cp.shard or sequence(documents=...)"
            ) from None
        return documents

    def _find_without_positions(
        self, name: str, mask: ShardMask, tokens: int, documents: Documents | None
    ) -> Documents | None:
        """Returns the given documents for a layer that gets no position ids. Raises ValueError if it needs some."""
        check_tokens(self.method.shard, tokens, mask.layout)
        if mask.counts_from_shard and self.method.shards > 1:
            hint = POSITIONS_HINT
            if mask.first_position:
                hint = f"padding_idx={mask.first_position - 1}: {PADDED_POSITIONS_HINT}"
            raise ValueError(
                f"{name} gets no position ids, and the model counts its tokens as if they were the first of the "
                f"sequence; {hint}"
            )
        if documents is None and not (mask.rule is not None and mask.rule.bidirectional):
            raise ValueError(
                f"{name} gets no position ids [batch, tokens], so its documents are unknown; pass them to cp.shard or "
                f"`with sequence(layout=..., documents=...)`: [0, {mask.layout.length}] if there is only one"
            )
        return documents


PADDED_POSITIONS_HINT = "after cp.prepare(model), cp.shard(ids) has position ids that count from padding_idx + 1"


def check_first_position(name: str, position_ids: Tensor, first: int, method: Method) -> None:
    """Raises ValueError on every rank if position ids are below `first`, the model's lowest (RoBERTa: padding_idx + 1).

    Every rank of the method must call it. Bytes sent: a `gather_integers` of one integer.
    """
    lowest = min(rank_lowest for (rank_lowest,) in gather_integers([[int(position_ids.min())]], method))
    if lowest < first:
        raise ValueError(
            f"{name} gets position id {lowest}, but the model counts tokens from {first}: padding_idx={first - 1}; "
            f"{PADDED_POSITIONS_HINT}"
        )


def documents_of_boundaries(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, layout: SequenceLayout
) -> Documents | None:
    """Returns the documents whose boundaries in the whole sequence are cu_seq_lens, as in flash attention.

    Raises:
        ValueError: the two tensors differ, fall, do not start at 0, or do not end at the layout's length.
    """
    documents = AttentionMask(documents=cu_seq_lens_q).documents
    if cu_seq_lens_k is not None and AttentionMask(documents=cu_seq_lens_k).documents != documents:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: no cross-attention on a sharded sequence")
    if int(cu_seq_lens_q[-1]) != layout.length:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(cu_seq_lens_q[-1])}; it must end with the whole sequence, at {layout.length}"
        )
    return documents


def check_multimodal(position_ids: Tensor, layout: SequenceLayout, method: Method) -> None:
    """Raises ValueError unless position ids [3, B, T] of time, height and width (M-RoPE) fit the layout's tokens.

    The ids of a token must be greater than those of the token before it, compared by time, then height, then width. An
    exception is the first token after a video. In a video, time can be ahead of height and width, and the next token's
    ids need only be greater than the last height and width.

    Bytes sent: those of `gather_tokens`. Every rank of the method must call it.

    Raises:
        ValueError: on every rank, with the first token whose ids are not greater.
    """
    ids = gather_tokens(position_ids.permute(1, 2, 0).contiguous(), method, layout).cpu()
    before, after = ids[:, :-1], ids[:, 1:]
    (time, height, width), (next_time, next_height, next_width) = before.unbind(-1), after.unbind(-1)
    same_time, same_height = next_time == time, next_height == height
    rising = (next_time > time) | (same_time & ((next_height > height) | (same_height & (next_width > width))))
    in_image = (time != height) | (height != width)  # text has three equal ids
    beyond_image = in_image & (after.amin(-1) > torch.maximum(height, width))
    errors = (~(rising | beyond_image)).nonzero()
    if len(errors):
        row, position = errors[0].tolist()
        raise ValueError(
            f"the token at position {position + 1} of row {row} has position ids {ids[row, position + 1].tolist()}, "
            f"which are not beyond {ids[row, position].tolist()} of the token before it: pass this rank's shard of the "
            "whole sequence's ids, `layout.take(position_ids, attend.shard, dim=2)`, or, for packed rows, "
            "sequence(documents=...)"
        )
