"""Completes whole rows before they are sharded: documents, position ids and shifted labels.

These depend on tokens of other shards, so they are computed from the whole rows, which every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.attention.mask.content import Documents
from armillary.core.validation import check_tensor, integer

IGNORED = -100
"""The label of a token that predicts nothing, as in cross_entropy and transformers."""


class Rows(NamedTuple):
    """Tensors [B, N] of whole rows and their documents. `labels` are shifted."""

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    documents: Documents

    @property
    def label_count(self) -> int:
        """Number of tokens with a label, over all rows."""
        return int((self.labels != IGNORED).sum())


def complete_rows(
    ids: Tensor,
    labels: Tensor | None,
    *,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    shift_labels: Tensor | None,
    padding_idx: int | None,
) -> Rows:
    """Returns rows with documents, position ids and shifted labels. Arguments are those of `ContextParallel.shard`.

    Args:
        padding_idx: position ids count from padding_idx + 1 (RoBERTa); None: from 0.
    """
    _check_shapes(ids, labels, position_ids, shift_labels, attention_mask)
    row_count, length = ids.shape
    first = 0 if padding_idx is None else 1 + integer("padding_idx", padding_idx, minimum=0)
    if padding_idx is not None and position_ids is None:
        _check_padding_hidden(ids, padding_idx, attention_mask)
    # Collators that pack rows give no boundaries, but position ids that restart in each document.
    if documents is None and position_ids is not None:
        documents = _documents_of_positions(position_ids - first)
    mask = AttentionMask(documents=(0, length) if documents is None else documents)
    mask.check(length, length, row_count)
    # Each run of padding becomes a separate document: then no other token sees it, and no [N, N] mask is needed.
    if attention_mask is not None:
        mask = AttentionMask(documents=_with_padding(mask, attention_mask, counts_positions=position_ids is None))
    boundaries = [mask.boundaries(row) or (0, length) for row in range(row_count)]
    if position_ids is None:
        rows = [torch.cat([torch.arange(end - start) for start, end in pairwise(row)]) for row in boundaries]
        position_ids = torch.stack(rows).to(ids.device) + first
    shifted = shift_labels if shift_labels is not None else _shift(ids if labels is None else labels, boundaries)
    if attention_mask is not None:
        # Collators fill position ids of padding with any number, which may be beyond the model's embedding table.
        hidden, safe_positions = attention_mask == 0, torch.arange(length, device=ids.device) + first
        position_ids = torch.where(hidden, safe_positions, position_ids)
        shifted = shifted.masked_fill(hidden, IGNORED)
    return Rows(ids, position_ids, shifted.long(), attention_mask, mask.documents or (0, length))


def _check_shapes(
    ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    shift_labels: Tensor | None,
    attention_mask: Tensor | None,
) -> None:
    check_tensor("ids", ids)
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"ids {tuple(ids.shape)}: the whole batch is needed, [rows, tokens]")
    for name, x in (("labels", labels), ("shift_labels", shift_labels), ("attention_mask", attention_mask)):
        if x is not None:
            check_tensor(name, x)
            if x.shape != ids.shape:
                raise ValueError(f"{name} {tuple(x.shape)} for ids {tuple(ids.shape)}: they need one shape")
    if position_ids is not None:
        check_tensor("position_ids", position_ids)
        if tuple(position_ids.shape) not in ((1, ids.shape[1]), tuple(ids.shape)):
            raise ValueError(
                f"position_ids {tuple(position_ids.shape)}: [1, {ids.shape[1]}] or {list(ids.shape)} is accepted"
            )
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels: give one of them; shift_labels are shifted already")
    if attention_mask is None:
        return
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        value = attention_mask[(attention_mask != 0) & (attention_mask != 1)][0].item()
        raise ValueError(f"attention_mask has {value}; 1 for tokens and 0 for padding are accepted")
    if shift_labels is not None and bool(((attention_mask == 0) & (shift_labels != IGNORED)).any()):
        raise ValueError(
            "tokens that attention_mask hides have labels, so an unsharded model would count their losses: set labels "
            f"of padding to {IGNORED}"
        )


def _check_padding_hidden(ids: Tensor, padding_idx: int, attention_mask: Tensor | None) -> None:
    """Raises ValueError if a token with id padding_idx is visible: RoBERTa's own position ids would skip it."""
    is_padding = ids == padding_idx
    if bool((is_padding if attention_mask is None else is_padding & (attention_mask != 0)).any()):
        raise ValueError(
            f"ids have padding_idx={padding_idx}, which attention_mask does not hide and the model's positions would "
            "skip; give attention_mask, or position_ids"
        )


def _documents_of_positions(position_ids: Tensor) -> list[list[int]] | list[int]:
    """Returns the boundaries of documents that start wherever position ids [B or 1, N] are 0."""
    starts = [row.nonzero().flatten().tolist() for row in (position_ids == 0).cpu()]
    boundaries = [[0, *(start for start in row if start), position_ids.shape[1]] for row in starts]
    return boundaries if len(boundaries) > 1 else boundaries[0]


def _shift(labels: Tensor, boundaries: Sequence[Sequence[int]]) -> Tensor:
    """Returns labels [B, N] moved one token to the left, so that each token has the label of the next one."""
    shifted = labels.roll(-1, 1)
    # The last token of a document has no label: the next token belongs to another document.
    for row, ends in zip(shifted, boundaries, strict=True):
        row[[end - 1 for end in ends[1:]]] = IGNORED
    return shifted


def _with_padding(mask: AttentionMask, attention_mask: Tensor, counts_positions: bool) -> tuple[tuple[int, ...], ...]:
    """Returns the boundaries of each row, with the padding of an attention_mask [B, N] in documents of its own.

    Args:
        mask: the documents without padding.
        counts_positions: position ids will count from the start of each document, so none of them may begin with
            padding.

    Raises:
        ValueError: hidden tokens between visible ones of a document, or before them if positions are counted.
    """
    visible = attention_mask.cpu() != 0
    rows: list[tuple[int, ...]] = []
    for row, tokens in enumerate(visible):
        changes = (tokens[1:] != tokens[:-1]).nonzero().flatten() + 1  # where padding begins or ends
        boundaries = [0]
        for low, high in pairwise(mask.boundaries(row) or (0, len(tokens))):
            # A document may have padding on the left, ending at `leading`, and on the right: at most two changes.
            document_changes = [position for position in changes.tolist() if low < position < high]
            leading = document_changes[:1] if not tokens[low] else []
            if len(document_changes) > len(leading) + 1:
                first, end = document_changes[len(leading)], document_changes[len(leading) + 1]
                raise ValueError(
                    f"row {row} of attention_mask hides tokens {first} to {end - 1} between others of one document, "
                    "which attend to each other; only padding at an end can be a document of its own"
                )
            if leading and counts_positions:
                raise ValueError(
                    f"row {row} of attention_mask hides tokens {low} to {leading[0] - 1} before others, and models "
                    'differ in whether positions count from there: pad on the right (tokenizer.padding_side = "right")'
                    ", or give position_ids"
                )
            boundaries += [*document_changes, high]
        rows.append(tuple(boundaries))
    return tuple(rows)
