"""Puts the padding of an attention_mask into documents of its own, apart from all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.core.validation import check_tensor

IGNORED = -100
"""The label of a token that predicts nothing, as cross_entropy and transformers have it."""


def set_apart(mask: AttentionMask, attention_mask: Tensor, counted: bool) -> tuple[tuple[int, ...], ...]:
    """The documents of each row, with the hidden tokens in ones of their own.

    Args:
        mask: the documents so far.
        attention_mask: [B, N] of 1 and 0.
        counted: position ids are counted from the start of each document, so that none may begin with padding.

    Raises:
        ValueError: hidden tokens between visible ones of a document, or before them where positions are counted.
    """
    seen = attention_mask.cpu() != 0
    changes = [(row.nonzero().flatten() + 1).tolist() for row in seen[:, 1:] != seen[:, :-1]]
    return tuple(
        _of_row(row, seen[row], changes[row], mask.boundaries(row) or (0, seen.shape[1]), counted)
        for row in range(len(seen))
    )


def _of_row(row: int, seen: Tensor, changes: Sequence[int], ends: Sequence[int], counted: bool) -> tuple[int, ...]:
    """The boundaries of one row; `changes`: where tokens begin to be seen, or end."""
    found = [0]
    for low, high in pairwise(ends):
        inside = [at for at in changes if low < at < high]
        left = inside[:1] if not seen[low] else []  # where padding before the document ends
        if len(inside) > len(left) + 1:
            first, after = inside[len(left)], inside[len(left) + 1]
            raise ValueError(
                f"row {row} of attention_mask hides tokens {first} to {after - 1} between others of one document, "
                "which see each other past them; only padding at an end can be set apart"
            )
        if left and counted:
            raise ValueError(
                f"row {row} of attention_mask hides tokens {low} to {left[0] - 1} before others, and models differ in "
                'whether positions count from there: pad on the right (tokenizer.padding_side = "right"), or give '
                "position_ids"
            )
        found += [*inside, high]
    return tuple(found)


def check_padding(
    ids: Tensor, labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Refuses what does not fit `ids` [B, N], and labels of padding that would count elsewhere."""
    for name, x in (("shift_labels", shift_labels), ("attention_mask", attention_mask)):
        if x is not None:
            check_tensor(name, x)
            if x.shape != ids.shape:
                raise ValueError(f"{name} {tuple(x.shape)} for ids {tuple(ids.shape)}: they need one shape")
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels: give those that are shifted already, or those that are not")
    if attention_mask is None:
        return
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        other = attention_mask[(attention_mask != 0) & (attention_mask != 1)][0].item()
        raise ValueError(f"attention_mask has {other}; 1 for tokens and 0 for padding would do")
    if shift_labels is not None and bool(((attention_mask == 0) & (shift_labels != IGNORED)).any()):
        raise ValueError(
            f"tokens that attention_mask hides have labels: on one device their losses would count, though nothing is "
            f"meant by them; make labels of padding {IGNORED}"
        )
