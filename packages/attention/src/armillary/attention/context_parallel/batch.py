"""A batch: its whole rows with documents, position ids and shifted labels, then one rank's shard of it.

A shard is not enough to complete rows: the label of its last token, for example, is a token of another shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from armillary.attention.context_parallel.communication import (
    AveragingCheck,
    gather_tokens,
    method_axes,
    record_ddp,
    sum_over_axes,
)
from armillary.attention.context_parallel.random_numbers import draws_of_rank
from armillary.attention.context_parallel.rank_comparison import RankComparison
from armillary.attention.context_parallel.sdpa import in_backward, with_documents
from armillary.attention.context_parallel.sequence import current_sequence, sequence
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.attention_mask import Documents, documents_from_positions
from armillary.attention.methods.base import Method
from armillary.core import Axis, SequenceLayout, to_device
from armillary.core.internal import check_choice, check_tensor, integer

IGNORED = -100
"""Label of a token that the loss skips, as in cross_entropy and transformers."""


GatherGradients = Literal["none", "replicated", "shares"]
"""The gradient of a gathered tensor (`ContextParallelBatch.gather`)."""


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
    """Returns rows with documents, position ids and shifted labels. Arguments as in `ContextParallel.shard`.

    Args:
        shifts_labels: False for a model that does not predict the next token: `labels` are refused.
        packed: False if position ids do not say where documents begin: in a tree, they jump within a row.
    """
    _check_shapes(ids, labels, position_ids, shift_labels, attention_mask)
    if labels is not None and not shifts_labels:
        raise ValueError(LABELS_ERROR)
    row_count, length = ids.shape
    first_position = 0 if padding_idx is None else 1 + integer("padding_idx", padding_idx, minimum=0)
    if padding_idx is not None and position_ids is None:
        # RoBERTa's own position ids would skip a visible token with id padding_idx.
        is_padding = ids == padding_idx
        if bool((is_padding if attention_mask is None else is_padding & (attention_mask != 0)).any()):
            raise ValueError(
                f"ids have padding_idx={padding_idx}, which attention_mask does not hide and the model's positions "
                "would skip; give attention_mask, or position_ids"
            )
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
        position_ids = to_device(torch.stack(counts), ids.device) + first_position
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
    if attention_mask is None:
        return documents_from_positions(position_ids)
    length, steps = position_ids.shape[1], position_ids.diff(dim=1)
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
    """Returns labels [B, N] moved one token to the left."""
    shifted = labels.roll(-1, 1)
    # The last token of a document has no label: the next token belongs to another document.
    for row_labels, ends in zip(shifted, boundaries, strict=True):
        row_labels[[end - 1 for end in ends[1:]]] = IGNORED
    return shifted


def _documents_with_padding(
    mask: AttentionMask, attention_mask: Tensor, needs_positions: bool
) -> tuple[tuple[int, ...], ...]:
    """Returns the boundaries of each row's documents, cut so that each run of padding is a document.

    Args:
        needs_positions: True if position ids are not given and will be counted in each document. Models disagree on
            whether the position of a document's first token counts the padding before it, so this is an error then.

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


# -- the shard of a rank -----------------------------------------------------------------------------------------------


class ContextParallelBatch:
    """This rank's shard of a batch, and attention under the batch's mask and layout (`attend`).

    `ContextParallel.shard` returns it. As a context manager it opens a `sequence` block, for `sdpa_parallel` and models
    of transformers, with the batch's layout and with the mask that `shard` was given, or else the documents. Inside the
    block, torch's default generator draws other random numbers on each rank of the sequence and of the data axes, so
    that dropout is independent for all tokens (`draws_of_rank`). Entering a batch again before it is left raises
    ValueError. So does the end of the block if ranks sharded different rows, or the generator was seeded inside it.

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
        total_labelled: as `labelled`, without setting `label_count_read`; None if the caller counts labels.
        axes: the axes of the method and of the data, over which losses are summed.
        comparison: of the batch's rows between the ranks of the sequence; None if they are not compared.
        label_count_read: True once `labelled`, or `inputs` with it, was read, so that a scalar loss can be a share.
    """

    owner: object
    method: Method
    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    has_labels: bool
    attention_mask: Tensor | None
    documents: Documents
    layout: SequenceLayout
    mask: AttentionMask
    total_labelled: int | None
    label_count_read: bool
    axes: Sequence[Axis]
    comparison: RankComparison | None

    def __init__(
        self,
        owner: object,
        method: Method,
        rows: Rows,
        layout: SequenceLayout,
        labelled: int | None,
        mask: AttentionMask,
        replaces_mask: bool,
        averaging: AveragingCheck,
        axes: Sequence[Axis],
        comparison: RankComparison | None,
    ) -> None:
        self.owner, self.method, self.layout, self.mask = owner, method, layout, mask
        self.ids, self.position_ids = self.take(rows.ids), self.take(rows.position_ids)
        self._shifts_labels, self.has_labels = rows.shifts_labels, rows.labels is not None
        self.labels = torch.full_like(self.ids, IGNORED) if rows.labels is None else self.take(rows.labels)
        self.attention_mask = None if rows.attention_mask is None else self.take(rows.attention_mask)
        self.documents, self._inferred = rows.documents, rows.inferred
        self._replaces_mask = replaces_mask  # True: inside `with batch`, `mask` replaces the model's own mask
        self.axes, self.comparison = axes, comparison
        self._block: ExitStack | None = None  # the contexts of `with batch`
        self._number = next(_NUMBERS)  # 1, 2, ...: tells batches apart when backward recomputes attention
        self._attended = False  # True after the first call of `attend` in a forward
        self.ddp_modules: set[DistributedDataParallel] = set()
        self.averaging = averaging
        # A caller who counts labels gives shares of its own.
        self.total_labelled, self.label_count_read = labelled, labelled is None

    @property
    def labelled(self) -> int:
        """Number of labels, over all ranks, by which the loss divides the sum over all ranks.

        The sum of losses over this rank's labels, divided by it, is a share that `cp.loss` takes.

        Raises:
            ValueError: `shard` was called with labelled=False.
        """
        self.label_count_read = True
        return self._counted()

    def _counted(self) -> int:
        if self.total_labelled is None:
            raise ValueError("labelled=False: the labels of this batch were not counted; divide by your own count")
        return self.total_labelled

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of transformers. `cp.loss` takes the loss that the model returns for them.

        Without labels, if the batch has none or the model does not predict the next token: give `cp.loss` its logits.
        Without `num_items_in_batch`, if `shard` was called with labelled=False: pass your own count.
        """
        inputs: dict[str, Any] = {"input_ids": self.ids, "position_ids": self.position_ids}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        # transformers computes a loss if `labels` are given; it uses `shift_labels` as they are, and divides the sum of
        # losses by `num_items_in_batch`. Losses of other kinds are means over the labels given, those of one shard.
        if self._shifts_labels:
            inputs |= {"labels": self.labels, "shift_labels": self.labels}
            if self.total_labelled is not None:
                inputs["num_items_in_batch"] = self.labelled
        return inputs

    def share_of(self, logits: Tensor) -> Tensor:
        """Returns this rank's share of the loss, []: the sum over its labels, divided by the labels of all ranks.

        Args:
            logits: [B, T, V], of the batch's tokens.

        Raises:
            ValueError: the batch has no labels, or they were not counted.
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
        return total / self._counted()

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor of the whole sequence: [B, N, ...] -> [B, T, ...]."""
        return self.layout.take(x, self.method.shard, dim)

    def gather(self, x: Tensor, *, gradients: GatherGradients = "none") -> Tensor:
        """Gathers tensors of shards, such as logits, in sequence order: [B, T, ...] -> [B, N, ...].

        Every rank of the sequence must call `gather`, and gets the whole tensor.

        Args:
            gradients: "none": the result has no gradient. "replicated": every rank computes the same loss from the
                result, and calls its backward; a rank's gradient is that of its own tokens, times the ranks of the
                sequence, so that the average of FSDP2, DDP or `cp.reduce_gradients` is the gradient of the loss (with
                data axes, of the mean over groups). "shares": each rank computes another share of a loss, which
                `cp.loss` sums; the gradients of all ranks are summed in backward, and the average of `cp.ranks` ranks
                is again the gradient of the loss.

        Bytes sent by a method on one axis, kind "all_gather", to each other rank: those of `x` padded to the longest
        shard, and 16. For "shares", in backward an all-reduce of the gradient of the whole tensor on each axis.

        Raises:
            ValueError: x has another number of tokens than the batch; another `gradients`.
        """
        check_choice("gradients", gradients, get_args(GatherGradients))
        if gradients == "none":
            return gather_tokens(x, self.method, self.layout)
        return cast(Tensor, _Gather.apply(x, self, gradients))

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
        after the next batch was sharded. torch.compile traces it without a break; a graph does not notice that backward
        recomputes with another batch, and its parameters are not seen by the check of DDP's averages.

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
        if not torch.compiler.is_compiling():  # a graph sees neither the module nor the batch of the forward
            q = self._mark(q)
        layer_mask = self.mask if mask is None else with_documents(mask, self.mask.documents)
        return self.method(q, k, v, mask=layer_mask, layout=self.layout, **options)

    def _mark(self, q: Tensor) -> Tensor:
        """Returns q, so that a recompute with another batch raises, and records DDP."""
        if torch.is_grad_enabled():
            q = cast(Tensor, _BatchMark.apply(q, self._number))
        if not in_backward():
            self._attended = True
            record_ddp(self.ddp_modules)
        elif not self._attended:
            raise ValueError(
                "activation checkpointing recomputes attention with the attend of a batch that no forward has used: "
                "pass batch.attend to the model as an argument, instead of keeping it where the next batch replaces it"
            )
        return q

    def __enter__(self) -> Self:
        if self._block is not None:
            raise ValueError("this batch is entered already; use one `with` block at a time")
        padded = self.attention_mask is not None
        mask = {"mask": self.mask} if self._replaces_mask else {"documents": self.documents}
        with ExitStack() as block:
            block.enter_context(draws_of_rank(self.axes, self.ids.device))
            block.enter_context(sequence(layout=self.layout, padded=padded, **cast(Any, mask)))
            self._block = block.pop_all()
        self.method.was_called = False
        context = current_sequence()
        assert context is not None
        context.ddp_modules, context.averaging = self.ddp_modules, self.averaging
        context.position_ids, context.attention_mask = self.position_ids, self.attention_mask
        context.inferred = self._inferred and not self._replaces_mask
        return self

    def __exit__(self, *raised: Any) -> None:
        (block, self._block), context = (self._block, None), current_sequence()
        assert block is not None and context is not None
        context.used |= self.method.was_called  # by `attend`, perhaps in a compiled graph
        # After an error, such as that of a peer which has raised, only if it does not wait: a rank that failed may
        # never start its comparison.
        compared = self.comparison is not None and (raised[0] is None or self.comparison.complete)
        try:
            block.__exit__(*raised)
        finally:
            if self.comparison is not None and compared:
                self.comparison.check()


class _Gather(torch.autograd.Function):
    """`ContextParallelBatch.gather` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: ContextParallelBatch, gradients: GatherGradients) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.batch, ctx.gradients = batch, gradients
        return gather_tokens(x, batch.method, batch.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), batch = grads, ctx.batch
        if ctx.gradients == "shares":
            return batch.take(sum_over_axes(gradient, method_axes(batch.method))), None, None
        return batch.take(gradient) * batch.method.shards, None, None


class _BatchMark(torch.autograd.Function):
    """The identity; it saves a tensor of shape [0, batch number].

    Non-reentrant checkpointing compares shapes of saved tensors: it raises if backward recomputes with another batch.
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
