"""Shards of a batch and their loss, for models that know nothing of shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.attention.call.validation import check_layout
from armillary.attention.context_parallel.packing import all_gather_over, gather, sum_over_ranks
from armillary.attention.context_parallel.padding import IGNORED, check_padding, set_apart
from armillary.attention.context_parallel.sequence import Documents, Sharding, check_method, sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.validation import check_tensor, integer


class ShardedBatch(NamedTuple):
    """One rank's tokens. `labelled` is how many labels all ranks have together.

    Where an attention_mask was given, tokens that it hides are in documents of their own.
    """

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    documents: Documents
    layout: SequenceLayout
    labelled: int
    attention_mask: Tensor | None = None
    label_count: int = 0
    """Labels of this batch on all ranks of its sequence."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments for a model of Hugging Face transformers, whose loss is then this rank's share of the whole one."""
        shifted = {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": self.labelled}
        masked = {} if self.attention_mask is None else {"attention_mask": self.attention_mask}
        return {"input_ids": self.ids, "position_ids": self.position_ids, **shifted, **masked}

    def sequence(self) -> AbstractContextManager[None]:
        """`sequence(layout=..., documents=...)` of this batch."""
        return sequence(layout=self.layout, documents=self.documents, padded=self.attention_mask is not None)


def shard_batch(
    attend: Method,
    ids: Tensor,
    labels: Tensor | None = None,
    *,
    layout: SequenceLayout | None = None,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    shift_labels: Tensor | None = None,
    labelled: int | None = None,
    padding_idx: int | None = None,
) -> ShardedBatch:
    """This rank's tokens, position ids and shifted labels, of a batch that all ranks of `attend` have whole.

        batch = shard_batch(attend, ids, documents=[0, 130, 700, 1000])
        with batch.sequence():
            loss = model(**batch.inputs, use_cache=False).loss  # this rank's share
            loss.backward()  # gradients are shares too: sum them over ranks (`armillary.core.sum_gradients`)
        print(whole_loss(loss, attend))  # the same on every rank

    Labels are shifted here, where the whole row is at hand: a shard does not have the token after its last one. The
    last token of a document gets no label, because what follows it in the row was not written after it; one rank alone
    gets the same from the labels of a collator that ignores the first token of each document.

    Args:
        ids: [B, N].
        labels: [B, N], before shifting: that of a token is the token itself, or -100. By default, ids.
        layout: by default `attend.layout(N)`.
        documents: boundaries, as `AttentionMask` takes them. By default a document starts wherever position ids are 0.
        position_ids: [B or 1, N]; by default they count from the start of each document.
        attention_mask: [B, N] of 1 and 0, as tokenizers make it: those that it hides are padding. It becomes documents
            of its own, which nothing else sees, and has no labels; what the model says of it means nothing.
        shift_labels: [B, N], instead of labels, those that are shifted already; taken as they are.
        labelled: labels that the loss is a mean over, by default those of this batch; with several micro-batches or
            data-parallel ranks, those of all. A batch without labels has loss 0.
        padding_idx: position ids count from padding_idx + 1 instead of 0, as in RoBERTa (`padding_idx_of(model)`).

    Raises:
        ValueError: shapes that differ, documents that do not end at N, a layout of another length or number of shards,
            `labelled` below 1, labels and shift_labels. An attention_mask of other numbers or that hides tokens between
            those of one document, or before them where no position_ids are given; shift_labels of hidden tokens; ids
            equal to padding_idx that attention_mask does not hide.
    """
    check_method(attend)
    _check(ids, labels, layout, position_ids, labelled)
    check_padding(ids, labels, shift_labels, attention_mask)
    rows, length = ids.shape
    first = 0 if padding_idx is None else 1 + integer("padding_idx", padding_idx, least=0)
    if padding_idx is not None and position_ids is None:
        _check_padding_hidden(ids, padding_idx, attention_mask)
    told = documents if documents is not None or position_ids is None else _restarts(position_ids - first)
    mask = AttentionMask(documents=told if told is not None else (0, length))
    mask.check(length, length, rows)
    if attention_mask is not None:
        mask = AttentionMask(documents=set_apart(mask, attention_mask, counted=position_ids is None))
    boundaries = [mask.boundaries(row) or (0, length) for row in range(rows)]
    if position_ids is None:
        counted = [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in boundaries]
        position_ids = torch.stack(counted).to(ids.device) + first
    shifted = shift_labels if shift_labels is not None else _shift(ids if labels is None else labels, boundaries)
    if attention_mask is not None:
        hidden, counting = attention_mask == 0, torch.arange(length, device=ids.device) + first
        position_ids = torch.where(hidden, counting, position_ids)  # collators pad them with anything
        shifted = shifted.masked_fill(hidden, IGNORED)
    label_count = int((shifted != IGNORED).sum())
    total = label_count if labelled is None else integer("labelled", labelled)
    over = Sharding(layout if layout is not None else attend.layout(length)).layout_for(attend, length)
    mine = [over.take(x, attend.shard) for x in (ids, position_ids, shifted.long())]
    seen = None if attention_mask is None else over.take(attention_mask, attend.shard)
    told = mask.documents or (0, length)
    return ShardedBatch(
        *mine, documents=told, layout=over, labelled=max(total, 1), attention_mask=seen, label_count=label_count
    )


def _check_padding_hidden(ids: Tensor, padding_idx: int, attention_mask: Tensor | None) -> None:
    """Refuses visible tokens of id padding_idx, which models that count position ids after it leave out."""
    padding = ids == padding_idx
    if bool((padding if attention_mask is None else padding & (attention_mask != 0)).any()):
        raise ValueError(
            f"ids have padding_idx={padding_idx}, which no attention_mask hides and the model would not count; give "
            "attention_mask, or position_ids"
        )


def _shift(labels: Tensor, boundaries: Sequence[Sequence[int]]) -> Tensor:
    """Labels [B, N] of the next token, none for the last of each document."""
    shifted = labels.roll(-1, 1)
    for row, ends in zip(shifted, boundaries, strict=True):
        row[[end - 1 for end in ends[1:]]] = IGNORED
    return shifted


def whole_loss(share: Tensor, attend: Method) -> Tensor:
    """The sum of all ranks' shares of a loss, to the bit the same on every rank; its gradient is that of `share`.

    For logs and evaluation; one may as well call backward on it. Every rank of `attend` must call it.

    Args:
        share: [], the sum of losses of this rank's tokens, divided by the number of all ranks' labels.

    Raises:
        ValueError: it is no floating-point scalar, or `attend` no method.
    """
    check_method(attend)
    check_tensor("share", share)
    if share.ndim or not share.is_floating_point():
        raise ValueError(
            f"a loss of shape {tuple(share.shape)} and {share.dtype}: each rank gives one floating-point number, its "
            "share of the loss"
        )
    return with_value(sum_over_ranks(share.detach(), attend), share)


def with_value(value: Tensor, share: Tensor) -> Tensor:
    """A loss of this value, with the gradient of a rank's share of it."""
    nothing = torch.where(share.isfinite(), share - share.detach(), share)  # inf - inf would be NaN, on this rank alone
    return value + nothing


def whole_sequence(x: Tensor, attend: Method, layout: SequenceLayout) -> Tensor:
    """Returns a tensor of the whole sequence, in sequence order, from the shards of all ranks.

        logits = whole_sequence(model(**batch.inputs, use_cache=False).logits, attend, batch.layout)  # [B, N, V]

    Without a gradient, for predictions; DTensors have `armillary.core.gather_sequence`. Every rank of `attend` must
    call it, and then holds all of it.

    Args:
        x: [B, T, ...], this rank's shard.
        layout: as that of the batch.

    Raises:
        ValueError: x has other tokens than the layout's shard, or the layout is over another number of ranks.
    """
    check_method(attend)
    check_tensor("x", x)
    over = Sharding(layout).layout_for(attend, layout.length)
    if x.ndim < 2 or x.shape[1] != over.sizes[attend.shard]:
        raise ValueError(
            f"x {tuple(x.shape)}: shard {attend.shard} of the layout is [B, {over.sizes[attend.shard]}, ...]"
        )
    if attend.shards == 1:
        return x.detach()
    padded = x.new_zeros((x.shape[0], max(over.sizes), *x.shape[2:]))
    padded[:, : x.shape[1]] = x.detach()
    places = [place for (place,) in gather([[attend.shard]], attend)]
    parts = dict(zip(places, all_gather_over(padded, attend), strict=True))
    return over.join([parts[place][:, : over.sizes[place]] for place in range(over.shards)])


def _restarts(position_ids: Tensor) -> list[list[int]] | list[int]:
    """The documents that start wherever position ids are 0."""
    starts = [row.nonzero().flatten().tolist() for row in (position_ids == 0).cpu()]
    ends = [[0, *(start for start in row if start), position_ids.shape[1]] for row in starts]
    return ends if len(ends) > 1 else ends[0]


def _check(
    ids: Tensor, labels: Tensor | None, layout: SequenceLayout | None, position_ids: Tensor | None, labelled: int | None
) -> None:
    for name, x in (("ids", ids), ("labels", labels), ("position_ids", position_ids)):
        if x is not None or name == "ids":
            check_tensor(name, x)
    check_layout("layout", layout)
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"ids {tuple(ids.shape)}: shard_batch takes the whole batch, [rows, tokens]")
    rows, length = ids.shape
    if labels is not None and labels.shape != ids.shape:
        raise ValueError(f"labels {tuple(labels.shape)} for ids {tuple(ids.shape)}: they need one shape, unshifted")
    if position_ids is not None and tuple(position_ids.shape) not in ((1, length), (rows, length)):
        raise ValueError(f"position_ids {tuple(position_ids.shape)}: [1, {length}] or [{rows}, {length}] would do")
    if layout is not None and layout.length != length:
        raise ValueError(f"the layout has {layout.length} tokens, the batch {length}: pass attend.layout({length})")
    if labelled is not None:  # the number of labels that the loss is a mean over
        integer("labelled", labelled, least=1)
