"""The shard of a batch on one rank, with the attention that belongs to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Self, cast

import torch
from torch import Tensor

from armillary.attention.context_parallel.communication import gather_tokens
from armillary.attention.context_parallel.rows import Rows
from armillary.attention.context_parallel.sdpa import in_backward, with_documents
from armillary.attention.context_parallel.sequence import sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout


class ContextParallelBatch:
    """This rank's shard of a batch, with the attention that belongs to it. Made by `ContextParallel.shard`.

    As a context manager it opens the `sequence` block of the batch, for `sdpa_parallel` and models of transformers.

    Attributes:
        owner, method: the `ContextParallel` that made it, and its method.
        ids: token ids [B, T].
        position_ids: [B or 1, T], counted from the start of each document.
        labels: [B, T], shifted; -100 if a token has none.
        attention_mask: [B, T], or None if the batch has no padding.
        documents: boundaries of the documents and of padding, in global positions.
        layout: layout of the sequence over all ranks of the method.
        labelled: number of labels that the loss is a mean over.
        mask: mask of `attend`.
    """

    def __init__(
        self,
        owner: object,
        method: Method,
        rows: Rows,
        layout: SequenceLayout,
        labelled: int,
        mask: AttentionMask,
        replaces_mask: bool,
    ) -> None:
        self.owner, self.method, self.layout, self.labelled, self.mask = owner, method, layout, labelled, mask
        self.ids, self.position_ids, self.labels = (self.take(x) for x in (rows.ids, rows.position_ids, rows.labels))
        self.attention_mask = None if rows.attention_mask is None else self.take(rows.attention_mask)
        self.documents = rows.documents
        self._replaces_mask = replaces_mask  # of the model, inside the `with` block
        self._block: AbstractContextManager[None] | None = None
        self._number, self._attended, self.inputs_read = next(_NUMBERS), False, False

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of transformers, whose loss `cp.loss` takes as this rank's share."""
        self.inputs_read = True
        # transformers divides the sum of losses by num_items_in_batch, and computes no loss without `labels`.
        inputs = {"input_ids": self.ids, "position_ids": self.position_ids, "labels": self.labels}
        inputs |= {"shift_labels": self.labels, "num_items_in_batch": self.labelled}
        return inputs if self.attention_mask is None else {**inputs, "attention_mask": self.attention_mask}

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor of the whole sequence: [B, N, ...] -> [B, T, ...]."""
        return self.layout.take(x, self.method.shard, dim)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers tensors of shards, such as logits, in sequence order: [B, T, ...] -> [B, N, ...], without a gradient.

        Every rank of the sequence must call it, and gets all of it.

        Bytes sent: (P - 1) times those of `x` padded to the longest shard, for P ranks on one axis, kind "all_gather".

        Raises:
            ValueError: x has another number of tokens than the batch.
        """
        return gather_tokens(x, self.method, self.layout)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns attention [B, T, H, Dv] of this rank's queries over the whole sequence, under this batch's mask.

        Activation checkpointing recomputes with this batch, even after the next one was sharded.

        Args:
            q, k, v: local, [B, T, H, D], [B, T, K, D] and [B, T, K, Dv].
            mask: mask of one layer, instead of the batch's; the batch's documents are added to it.
            layout: None, or that of the batch.
            options: options of the method, such as `scale`, `sinks` and `softcap`.

        Bytes sent: those of the method.

        Raises:
            ValueError: another layout; backward recomputes with a batch that no forward has used.
            torch.utils.checkpoint.CheckpointError: backward recomputes a call of another batch (non-reentrant
                checkpointing).
        """
        if layout is not None and layout != self.layout:
            raise ValueError(f"layout={layout}: the batch was sharded by {self.layout}")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            q = cast(Tensor, _BatchMark.apply(q, self._number))
        if not in_backward():
            self._attended = True
        elif not self._attended:
            raise ValueError(
                "activation checkpointing recomputes attention with the attend of a batch that no forward has used: "
                "pass batch.attend to the model as an argument, instead of keeping it where the next batch replaces it"
            )
        layer_mask = self.mask if mask is None else with_documents(mask, self.mask.documents)
        return self.method(q, k, v, mask=layer_mask, layout=self.layout, **options)

    def __enter__(self) -> Self:
        if self._block is not None:
            raise ValueError("this batch is entered already; use one `with` block at a time")
        padded = self.attention_mask is not None
        if self._replaces_mask:
            self._block = sequence(layout=self.layout, mask=self.mask, padded=padded)
        else:
            self._block = sequence(layout=self.layout, documents=self.documents, padded=padded)
        self._block.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(*raised)


class _BatchMark(torch.autograd.Function):
    """The identity, which saves an empty tensor with the batch's number in its shape.

    Non-reentrant checkpointing compares the shapes of saved and recomputed tensors, so it raises if backward recomputes
    a call with another batch, whose documents may differ.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, number: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q.new_empty((0, number)))
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Checkpointing recomputes when saved tensors are read, so this read is the check.
        assert ctx.saved_tensors
        return gradient, None


_NUMBERS = count(1)
