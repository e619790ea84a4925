"""Documents, position ids and shifted labels of whole rows, before the rows are sharded.

A shard is not enough to compute them: the label of its last token, for example, is a token of another shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.mask import AttentionMask, Documents
from armillary.core.parts import check_tensor, integer

IGNORED = -100
"""Label of a token that the loss skips, as in cross_entropy and transformers."""


class Rows(NamedTuple):
    """Whole rows of a batch: tensors [B, N] (position_ids also [1, N]) and the documents.

    `labels` are those of the model's outputs: shifted, if it predicts the next token (`shifts_labels`); None without
    labels. `inferred` is True if nothing but position ids says that a row has several documents.
    """

    ids: Tensor
    position_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    documents: Documents
    shifts_labels: bool
    inferred: bool

    @property
    def label_count(self) -> int:
        """Number of tokens with a label, over all rows."""
        return 0 if self.labels is None else int((self.labels != IGNORED).sum())


def complete_rows(
    ids: Tensor,
    labels: Tensor | None,
    *,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    shift_labels: Tensor | None,
    padding_idx: int | None,
    shifts_labels: bool = True,
    packed: bool = True,
) -> Rows:
    """Returns rows with documents, position ids and shifted labels. Arguments are those of `ContextParallel.shard`.

    Args:
        padding_idx: position ids count from padding_idx + 1 (RoBERTa); None: they count from 0.
        shifts_labels: False for a model that does not predict the next token: `labels` are refused, and rows without
            `shift_labels` have no labels.
        packed: False if position ids do not say where documents begin: in a tree, they jump within a row.
    """
    _check_shapes(ids, labels, position_ids, shift_labels, attention_mask)
    if labels is not None and not shifts_labels:
        raise ValueError(LABELS_ERROR)
    row_count, length = ids.shape
    first_position = 0 if padding_idx is None else 1 + integer("padding_idx", padding_idx, minimum=0)
    if padding_idx is not None and position_ids is None:
        _check_padding_hidden(ids, padding_idx, attention_mask)
    # Collators that pack several documents into a row give no boundaries: their position ids restart instead.
    inferred = documents is None and position_ids is not None and packed
    if inferred:
        assert position_ids is not None
        documents = documents_of_positions(position_ids, attention_mask)
    mask = AttentionMask(documents=(0, length) if documents is None else documents)
    mask.check(length, length, row_count)
    inferred = inferred and any(mask.boundaries(row) != (0, length) for row in range(row_count))
    # Each run of padding becomes a separate document: then no other token sees it, and no [N, N] mask is needed.
    if attention_mask is not None:
        needs_positions = position_ids is None
        mask = AttentionMask(documents=_documents_with_padding(mask, attention_mask, needs_positions))
    boundaries = [mask.boundaries(row) or (0, length) for row in range(row_count)]
    if position_ids is None:
        # Position ids count from the start of each document.
        counts = [torch.cat([torch.arange(end - start) for start, end in pairwise(ends)]) for ends in boundaries]
        position_ids = torch.stack(counts).to(ids.device) + first_position
    output_labels = shift_labels
    if output_labels is None and shifts_labels:
        output_labels = _shift(ids if labels is None else labels, boundaries)
    if attention_mask is not None:
        # Collators give padding any position id, even one beyond the model's embedding table. So padding gets its
        # position in the row, which is always valid.
        hidden, row_positions = attention_mask == 0, torch.arange(length, device=ids.device) + first_position
        position_ids = torch.where(hidden, row_positions, position_ids)
        output_labels = None if output_labels is None else output_labels.masked_fill(hidden, IGNORED)
    output_labels = None if output_labels is None else output_labels.long()
    return Rows(
        ids, position_ids, output_labels, attention_mask, mask.documents or (0, length), shifts_labels, inferred
    )


LABELS_ERROR = (
    "labels for a model whose loss is not of the next token, such as a masked language model: labels would be shifted "
    "by one token; give the label of each token's own output as shift_labels="
)


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


def documents_of_positions(position_ids: Tensor, attention_mask: Tensor | None) -> Documents:
    """Returns the boundaries of documents by the rule of transformers, for each row, or once if rows are alike.

    A document begins wherever a position is not that of the previous token plus 1. With an attention_mask, each row is
    one document.

    Args:
        position_ids: [B or 1, N], of whole rows.
        attention_mask: [B, N]; 0 for padding.

    Raises:
        ValueError: position ids that restart between visible tokens of an attention_mask. Packed rows are then most
            likely meant, which transformers would take for one document.
    """
    length, steps = position_ids.shape[1], position_ids.diff(dim=1)
    if attention_mask is None:
        rows = tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in (steps != 1).cpu())
        return rows[0] if len(set(rows)) == 1 else rows
    visible = attention_mask != 0
    restarts = ((steps < 1) & visible[:, 1:] & visible[:, :-1]).nonzero()
    if len(restarts):
        row, position = restarts[0].tolist()
        raise ValueError(
            f"position_ids restart at token {position + 1} of row {row}, but with an attention_mask transformers takes "
            "each row for one document: leave attention_mask out of packed rows, or give documents="
        )
    return 0, length


def _shift(labels: Tensor, boundaries: Sequence[Sequence[int]]) -> Tensor:
    """Returns labels [B, N] moved one token to the left, so that each token has the label of the next one."""
    shifted = labels.roll(-1, 1)
    # The last token of a document has no label: the next token belongs to another document.
    for row_labels, ends in zip(shifted, boundaries, strict=True):
        row_labels[[end - 1 for end in ends[1:]]] = IGNORED
    return shifted


def _documents_with_padding(
    mask: AttentionMask, attention_mask: Tensor, needs_positions: bool
) -> tuple[tuple[int, ...], ...]:
    """Cuts the documents of each row where padding begins or ends, so that each run of padding is a document.

    Args:
        mask: mask with the documents before they are cut.
        attention_mask: [B, N].
        needs_positions: True if position ids are not given and will be counted in each document. Models disagree on
            whether the position of a document's first token counts the padding before it, so this is an error then.

    Returns:
        The boundaries of each row.

    Raises:
        ValueError: padding between visible tokens of one document, or before them if position ids are needed.
    """
    rows: list[tuple[int, ...]] = []
    for row, visible in enumerate(attention_mask.cpu() != 0):
        changes = ((visible[1:] != visible[:-1]).nonzero().flatten() + 1).tolist()  # where padding begins or ends
        boundaries = [0]
        for start, end in pairwise(mask.boundaries(row) or (0, len(visible))):
            cuts = [position for position in changes if start < position < end]
            # Padding on the left of the document ends at its first cut, padding on the right begins at the next cut.
            left_end = cuts[:1] if not visible[start] else []
            if len(cuts) > len(left_end) + 1:
                hole_start, hole_end = cuts[len(left_end) :][:2]
                raise ValueError(
                    f"row {row} of attention_mask hides tokens {hole_start} to {hole_end - 1} between others of one "
                    "document, which attend to each other; padding may only be at the start or the end of a document"
                )
            if left_end and needs_positions:
                raise ValueError(
                    f"row {row} of attention_mask hides tokens {start} to {left_end[0] - 1} before others, and models "
                    "differ in whether position ids count these tokens: pad on the right "
                    '(tokenizer.padding_side = "right"), or give position_ids'
                )
            boundaries += [*cuts, end]
        rows.append(tuple(boundaries))
    return tuple(rows)
