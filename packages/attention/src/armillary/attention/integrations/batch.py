"""What one rank needs of a batch, and the loss that goes with it: for models that know nothing of shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.attention.checks import check_layout
from armillary.attention.integrations.packing import sum_over_ranks
from armillary.attention.integrations.sequence import Documents, Sharding, check_method, sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.checked import check_tensor, integer

IGNORED = -100
"""The label of a token that predicts nothing, as cross_entropy and transformers have it."""


class ShardedBatch(NamedTuple):
    """One rank's tokens. `labelled` is how many labels all ranks have together."""

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    documents: Documents
    layout: SequenceLayout
    labelled: int

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments for a model of Hugging Face transformers, whose loss is then this rank's share of the whole one."""
        shifted = {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": self.labelled}
        return {"input_ids": self.ids, "position_ids": self.position_ids, **shifted}

    def sequence(self) -> AbstractContextManager[None]:
        """`sequence(layout=..., documents=...)` of this batch."""
        return sequence(layout=self.layout, documents=self.documents)


def shard_batch(
    attend: Method,
    ids: Tensor,
    labels: Tensor | None = None,
    *,
    layout: SequenceLayout | None = None,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    position_ids: Tensor | None = None,
    labelled: int | None = None,
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
        labelled: labels that the loss is a mean over, by default those of this batch; with several micro-batches or
            data-parallel ranks, those of all. A batch without labels has loss 0.

    Raises:
        ValueError: shapes that differ, documents that do not end at N, a layout of another length or number of shards,
            `labelled` below 1.
    """
    check_method(attend)
    _check(ids, labels, layout, position_ids, labelled)
    rows, length = ids.shape
    told = documents if documents is not None or position_ids is None else _restarts(position_ids)
    mask = AttentionMask(documents=told if told is not None else (0, length))
    mask.check(length, rows)
    boundaries = [mask.boundaries(row) or (0, length) for row in range(rows)]
    if position_ids is None:
        counted = [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in boundaries]
        position_ids = torch.stack(counted).to(ids.device)
    shifted = (ids if labels is None else labels).roll(-1, 1).long()
    for row, ends in zip(shifted, boundaries, strict=True):
        row[[end - 1 for end in ends[1:]]] = IGNORED
    total = int((shifted != IGNORED).sum()) if labelled is None else integer("labelled", labelled)
    over = Sharding(layout if layout is not None else attend.layout(length)).layout_for(attend, length)
    mine = [over.take(x, attend.shard) for x in (ids, position_ids, shifted)]
    return ShardedBatch(*mine, documents=mask.documents or (0, length), layout=over, labelled=max(total, 1))


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
    whole = sum_over_ranks(share.detach(), attend)
    nothing = torch.where(share.isfinite(), share - share.detach(), share)  # inf - inf would be NaN, on this rank alone
    return whole + nothing


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
