"""One rank's shard of a batch, and attention under the batch's mask and layout."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from armillary.attention.context_parallel.averaging import AveragingCheck, record_ddp
from armillary.attention.context_parallel.communication import gather_tokens
from armillary.attention.context_parallel.rows import IGNORED, Rows
from armillary.attention.context_parallel.sdpa import in_backward, with_documents
from armillary.attention.context_parallel.sequence import current_sequence, sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout


class ContextParallelBatch:
    """This rank's shard of a batch, and attention under the batch's mask and layout (`attend`).

    `ContextParallel.shard` returns it. As a context manager it opens a `sequence` block, for `sdpa_parallel` and models
    of transformers, with the batch's layout and with the mask that `shard` was given, or else the documents. Entering a
    batch again before it is left raises ValueError.

    Attributes:
        owner: the `ContextParallel` that sharded the batch.
        method: the owner's attention method.
        ids: token ids [B, T].
        position_ids: [B or 1, T], those given to `shard`, or else counted from the start of each document. Padding has
            its position in the row.
        labels: [B, T], of the tokens' outputs: shifted, if the model predicts the next token; -100 without a label.
        has_labels: False if `ContextParallel.shard` was given no labels and could not take those of the next tokens.
        attention_mask: [B, T]; None if `ContextParallel.shard` was given none.
        documents: boundaries of the documents and of runs of padding, in global positions.
        layout: layout of the sequence over all ranks of the method.
        mask: mask of `attend`; with the documents, unless it cannot have any.
        ddp_modules: DDP modules in whose forward the batch was attended.
        averaging: the owner's check of FSDP2 and DDP.
        label_count_read: True once `labelled`, or `inputs` with it, was read, so that a scalar loss can be a share.
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
        averaging: AveragingCheck,
    ) -> None:
        self.owner, self.method, self.layout, self.mask = owner, method, layout, mask
        self.ids, self.position_ids = self.take(rows.ids), self.take(rows.position_ids)
        self._shifts_labels, self.has_labels = rows.shifts_labels, rows.labels is not None
        self.labels = torch.full_like(self.ids, IGNORED) if rows.labels is None else self.take(rows.labels)
        self.attention_mask = None if rows.attention_mask is None else self.take(rows.attention_mask)
        self.documents, self._inferred = rows.documents, rows.inferred
        self._replaces_mask = replaces_mask  # True: inside `with batch`, `mask` replaces the model's own mask
        self._block: AbstractContextManager[None] | None = None
        self._number = next(_NUMBERS)  # 1, 2, ...: tells batches apart when backward recomputes attention
        self._attended = False  # True after the first call of `attend` in a forward
        self.ddp_modules: set[DistributedDataParallel] = set()
        self.averaging = averaging
        self._labelled, self.label_count_read = labelled, False

    @property
    def labelled(self) -> int:
        """Number of labels, over all ranks, by which the loss divides the sum over all ranks.

        The sum of losses over this rank's labels, divided by it, is a share that `cp.loss` takes.
        """
        self.label_count_read = True
        return self._labelled

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of transformers. `cp.loss` takes the loss that the model returns for them.

        Without labels, if the batch has none or the model does not predict the next token: give `cp.loss` its logits.
        """
        inputs: dict[str, Any] = {"input_ids": self.ids, "position_ids": self.position_ids}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        # transformers computes a loss if `labels` are given; it uses `shift_labels` as they are, and divides the sum of
        # losses by `num_items_in_batch`. Losses of other kinds are means over the labels given, those of one shard.
        if self._shifts_labels:
            inputs |= {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": self.labelled}
        return inputs

    def share_of(self, logits: Tensor) -> Tensor:
        """Returns this rank's share of the loss, []: the sum over its labels, divided by the labels of all ranks.

        Args:
            logits: [B, T, V], of the batch's tokens.

        Raises:
            ValueError: the batch has no labels.
        """
        if not self.has_labels:
            raise ValueError(
                "the batch has no labels, and those of the next tokens are not of a model with another loss: "
                "cp.shard(ids, shift_labels=...), with the label of each token's own output"
            )
        # Sums and not means: a rank without labels contributes 0, and its mean would be NaN.
        flat = logits.flatten(0, 1)
        sum_dtype = torch.promote_types(flat.dtype, torch.float32)
        total = F.cross_entropy(flat.to(sum_dtype), self.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / self._labelled

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor of the whole sequence: [B, N, ...] -> [B, T, ...]."""
        return self.layout.take(x, self.method.shard, dim)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers tensors of shards, such as logits, in sequence order: [B, T, ...] -> [B, N, ...], without a gradient.

        Every rank of the sequence must call `gather`, and gets the whole tensor.

        Bytes sent by a method on one axis, kind "all_gather", to each other rank: those of `x` padded to the longest
        shard, and 16.

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

        Pass `batch.attend` to the model as an argument: activation checkpointing then recomputes with this batch, even
        after the next batch was sharded.

        Args:
            q, k, v: local, [B, T, H, D], [B, T, K, D] and [B, T, K, Dv].
            mask: mask of one layer, instead of the batch's; the batch's documents are added if it can have any.
            layout: None, or the batch's layout.
            options: options of the method's call, such as `scale`, `sinks` and `softcap`.

        Bytes sent: as by the method.

        Raises:
            ValueError: a layout other than the batch's; a mask with other documents; errors of the method's call;
                backward recomputes with a batch that no forward has used.
            torch.utils.checkpoint.CheckpointError: backward recomputes with another batch than forward used
                (non-reentrant checkpointing).
        """
        if layout is not None and layout != self.layout:
            raise ValueError(f"layout={layout}: the batch was sharded by {self.layout}")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            q = cast(Tensor, _BatchMark.apply(q, self._number))
        if not in_backward():
            self._attended = True
            if not torch.compiler.is_compiling():  # a graph does not see the module
                record_ddp(self.ddp_modules)
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
        context = current_sequence()
        assert context is not None
        context.ddp_modules, context.averaging = self.ddp_modules, self.averaging
        context.inferred = self._inferred and not self._replaces_mask
        return self

    def __exit__(self, *raised: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(*raised)


class _BatchMark(torch.autograd.Function):
    """The identity; it saves a tensor of shape [0, batch number].

    Non-reentrant checkpointing compares the shapes of the tensors that forward and recomputation save. So it raises if
    backward recomputes a call with another batch, whose documents may differ.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, number: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q.new_empty((0, number)))
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Checkpointing recomputes and compares shapes when saved tensors are read, so they are read here.
        assert ctx.saved_tensors
        return gradient, None


_NUMBERS = count(1)
