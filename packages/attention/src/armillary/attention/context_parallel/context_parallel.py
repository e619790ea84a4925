"""One object for context parallelism in a training loop: it shards batches and reduces losses and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from armillary.attention.call.validation import check_layout, over_all_ranks
from armillary.attention.context_parallel.batch import ContextParallelBatch, complete_rows
from armillary.attention.context_parallel.communication import AveragingCheck, method_axes, sum_over_axes
from armillary.attention.context_parallel.random_numbers import SharedDraws
from armillary.attention.context_parallel.rank_comparison import RowsCheck
from armillary.attention.context_parallel.sdpa import with_documents
from armillary.attention.context_parallel.sequence import check_method, takes_documents
from armillary.attention.context_parallel.verification import observe_shard
from armillary.attention.mask import AttentionMask
from armillary.attention.method_registry import build_attention
from armillary.attention.methods.base import Method
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import check_tensor, compat, integer

PREPARERS = "armillary.prepare"
"""Group of entry points, each named after a library, that `ContextParallel.prepare` calls as (model, cp, **options)."""

Model = TypeVar("Model", bound=nn.Module)


class ContextParallel:
    """Context parallelism for a training loop of your own.

        cp = ContextParallel("ring", mesh)
        for ids in rows:  # [B, N], the same on all ranks that share a sequence
            batch = cp.shard(ids)
            logits = model(batch.ids, batch.position_ids, attention=batch.attend)
            loss = cp.loss(logits, batch)  # the mean over all labels, the same on every rank
            loss.backward()  # FSDP2 and DDP average: gradients are those of the whole loss

    FSDP2 or DDP must average over exactly the ranks of the method and of `data`, which `loss` checks; do not call
    `armillary.core.sum_gradients`. Without FSDP2 and DDP, call `reduce_gradients` after `backward`.

    Args:
        method: the attention method, or its name (`build_attention`).
        mesh: a mesh with the axes of the method, such as `build_mesh` returns, or one axis with any name
            (`build_attention`). Not needed if `method` is a `Method` and `data` is empty.
        data: names of the mesh axes whose ranks have different rows.

    Attributes:
        method: the attention method.
        axes: the axes of the method and of `data` that have more than one rank.
        padding_idx: position ids count from padding_idx + 1 (RoBERTa); None: they count from 0. `prepare` sets it, and
            refuses a model that counts otherwise than one prepared before.
        shifts_labels: False for models whose loss is not of the next token (masked language models, classification of
            tokens): `shard` then takes `shift_labels` alone. `prepare` sets it to False for such a model, and never
            back to True.
        rows_check: compares the arguments of `shard` between the ranks of a sequence.

    Raises:
        ValueError: `method` is no method, an unknown name, or a name without a mesh; the method's axes are unknown;
            `data` without a mesh, or with axes that the mesh does not have or that the method shards the sequence over.
    """

    def __init__(self, method: Method | str, mesh: DeviceMesh | None = None, data: str | Sequence[str] = ()) -> None:
        data_names = (data,) if isinstance(data, str) else tuple(data)
        if mesh is None and (isinstance(method, str) or data_names):
            raise ValueError(f"method={method!r}, data={data_names} without a mesh: give one, such as build_mesh(...)")
        if isinstance(method, str):
            assert mesh is not None
            method = build_attention(method, mesh)
        self.method = method
        check_method(self.method)
        mesh_names = () if mesh is None else mesh.mesh_dim_names or ()
        if missing := [name for name in data_names if name not in mesh_names]:
            raise ValueError(f"data={missing}: the mesh has axes {mesh_names}")
        sequence_axes = method_axes(self.method)
        if shared := sorted({axis.name for axis in sequence_axes} & set(data_names)):
            raise ValueError(f"data={shared}: rows cannot differ on axes over which the method shards the sequence")
        data_axes = [Axis.of(mesh[name]) for name in data_names] if mesh is not None else []
        self._data_axes = [axis for axis in data_axes if axis.size > 1]
        self.axes: list[Axis] = [*sequence_axes, *self._data_axes]
        self.padding_idx: int | None = None
        self._counting_model: str | None = None  # name of the model for which `count_positions_as` set padding_idx
        self._averaging = AveragingCheck(self.axes, mesh)
        self.rows_check: RowsCheck = RowsCheck(method)
        self.shifts_labels = True

    @property
    def ranks(self) -> int:
        """Number of ranks that `loss` reduces over: the ranks that share a sequence times the ranks of `data`."""
        return prod(axis.size for axis in self.axes)

    def shard(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
        documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        shift_labels: Tensor | None = None,
        labelled: int | Literal[False] | None = None,
    ) -> ContextParallelBatch:
        """Shards whole rows: returns this rank's tokens with their position ids and shifted labels.

        Labels are shifted before rows are sharded, because a shard does not have the token after its last one. The last
        token of a document gets no label.

        Ranks that share a sequence compare all arguments. The comparison runs while the model computes: its result is
        read at the end of `with batch`, and in the next call of `loss`, `reduce_gradients` or `shard`. It is read at
        once for the first batch and for rows of another shape than those before, because attention on different lengths
        would not return. A thread other than the one that made this object compares nothing.

        Args:
            ids: [B, N], the whole rows; the same on all ranks that share a sequence.
            labels: [B, N], unshifted: each token itself, or -100. By default `ids`. If `shifts_labels` is False,
                labels are refused, and without `shift_labels` the batch has none.
            mask: attention mask, to which `documents` are added. By default `batch.attend` is causal, and a model
                called inside `with batch` uses its own mask.
            layout: layout over all ranks of the method, or over its sequence axis only; by default `method.layout(N)`.
            documents: boundaries, as `AttentionMask` takes them. By default those of `mask`; without them, a document
                starts wherever a position id is not the previous one plus 1, as in transformers. Without position_ids,
                or with an attention_mask, each row is one.
            position_ids: [B or 1, N]; by default they count from the start of each document.
            attention_mask: [B, N] of 1 for tokens and 0 for padding, as tokenizers make it. Each run of padding becomes
                a separate document, which no other token sees and which has no labels. The model's output for padding
                is meaningless. `mask` must then be of a kind that can have documents.
            shift_labels: [B, N], instead of `labels`, the label of each token's output: shifted already, or the label
                of the token itself for a masked language model.
            labelled: number of labels that the loss is averaged over; by default the labels of this batch on all data
                axes. For several micro-batches, give the number of labels in all of them. A batch without labels has
                loss 0. False: the caller counts labels and gives `loss` its own shares; nothing is counted, and the
                host does not wait for a GPU.

        Bytes sent: an `all_gather` of 80 bytes over the ranks of the sequence, on one axis after another; an all-reduce
        of one integer on each data axis, if `labelled` is not given. Every rank must call `shard`.

        Raises:
            ValueError: ranks that share a sequence were given different arguments, for this batch or the one before; it
                is raised on each of these ranks. Tensors whose shapes differ from that of `ids`; documents that do not
                end at N, or differ from those of `mask`; a layout of another length or number of shards; `labelled`
                below 1; both labels and shift_labels; labels although `shifts_labels` is False; position ids that
                restart between visible tokens of an attention_mask, without documents; a mask that cannot have
                documents (a tree, slices, blocks, a mask per row) beside padding, or without position_ids or
                shift_labels; image spans or a prefix beside padding or documents of each row; an attention_mask with
                values other than 0 and 1, with zeros between tokens of a document, or before them if position_ids are
                missing; shift_labels of padding other than -100; visible ids equal to padding_idx if position_ids are
                missing.
        """
        arguments: dict[str, Any] = {
            "ids": ids,
            "labels": labels,
            "mask": mask,
            "layout": layout,
            "documents": documents,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "shift_labels": shift_labels,
            "labelled": labelled,
        }
        # First of all: a rank that raises for another reason takes part, so that the others do not wait for it.
        with self.rows_check.comparing(arguments):
            check_layout("layout", layout)
            if labelled is not None and labelled is not False:
                integer("labelled", labelled, minimum=1)
            if mask is not None:  # raises if the mask's documents differ from the given ones
                documents = with_documents(mask, AttentionMask(documents=documents).documents).documents or documents
            rows = complete_rows(
                ids,
                labels,
                documents=documents,
                position_ids=position_ids,
                attention_mask=attention_mask,
                shift_labels=shift_labels,
                padding_idx=self.padding_idx,
                shifts_labels=self.shifts_labels,
                packed=mask is None or takes_documents(mask),
            )
            if mask is not None and not takes_documents(mask):
                _check_rows_complete(mask, position_ids, attention_mask, shift_labels)
            length = ids.shape[1]
            if layout is not None and layout.length != length:
                raise ValueError(
                    f"the layout has {layout.length} tokens, the batch {length}: pass attend.layout({length})"
                )
            layout = over_all_ranks(self.method.layout(length) if layout is None else layout, self.method)
            if labelled is None:
                count = torch.tensor(rows.label_count, device=ids.device)
                labelled = max(
                    int(sum_over_axes(count, self._data_axes)), 1
                )  # at least 1: without labels, the loss is 0
            batch_mask = AttentionMask(causal=True) if mask is None else mask
            has_boundaries = documents is not None or position_ids is not None or attention_mask is not None
            if has_boundaries and takes_documents(batch_mask):
                # The rows' documents replace the mask's: they also separate runs of padding.
                batch_mask = with_documents(replace(batch_mask, documents=None), rows.documents)
            return ContextParallelBatch(
                self,
                self.method,
                rows,
                layout,
                None if labelled is False else labelled,
                batch_mask,
                replaces_mask=mask is not None,
                averaging=self._averaging,
                axes=self.axes,
                comparison=self.rows_check.newest,
            )

    def loss(self, logits_or_share: Tensor, batch: ContextParallelBatch) -> Tensor:
        """Returns the mean loss over all labels of all ranks and data axes, the same bits on every rank.

        The average of the ranks' gradients, which FSDP2 or DDP computes, is the gradient of this mean. The first loss
        of a model with gradients checks over which ranks they average; a loss inside a compiled graph does not.

        Args:
            logits_or_share: logits [B, T, V] of the batch's tokens, or this rank's share of the loss, []: the sum over
                this rank's labels divided by `batch.labelled`. The loss of a model of transformers called with
                `batch.inputs` is such a share, because the model divides by `num_items_in_batch`.

        Bytes sent: an `all_reduce` of one number on each axis, in forward and in backward.

        Raises:
            ValueError: on every rank of the sequence, ranks sharded different rows. A batch that another
                `ContextParallel` sharded; logits whose [B, T] differs from the batch's; a scalar loss that is not
                floating-point, or given before `batch.labelled` or `batch.inputs` was read: without the number of
                labels it cannot be a share, but may be a mean over this rank's labels; logits for a batch without
                labels.
                On every rank, before the sum: FSDP2 or DDP averages the gradient of a parameter over other ranks than
                those of `axes`, without `set_gradient_divide_factor`, `set_all_reduce_hook` or a communication hook; or
                beside parameters under FSDP2, another one is trained that is not, without a hook of its own. Ranks
                outside of the constructor's mesh may take part in the average. Not seen: DDP around modules without
                attention or with compiled attention, FSDP1, and of a model that was not prepared, DDP or parameters
                inside reentrant checkpoints.
        """
        self.rows_check.check()
        if logits_or_share is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(
                "logits_or_share is a NoneType: models that do not predict the next token return no loss for "
                "batch.inputs; give cp.loss the logits"
            )
        check_tensor("logits_or_share", logits_or_share)
        if not isinstance(batch, ContextParallelBatch) or batch.owner is not self:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"batch is a {type(batch).__name__} that this ContextParallel did not shard: cp.shard(ids)"
            )
        if logits_or_share.ndim == 0:
            if not logits_or_share.is_floating_point():
                raise ValueError(f"a loss of {logits_or_share.dtype}: a floating-point number is needed")
            if not batch.label_count_read:
                raise ValueError(
                    "a scalar loss, but neither batch.labelled nor batch.inputs was read, so it may be a mean over the "
                    "labels of one rank: give cp.loss the logits, the loss of model(**batch.inputs), or this rank's "
                    "share, a sum over its labels divided by batch.labelled"
                )
            local_share = logits_or_share
        else:
            if logits_or_share.ndim != 3 or logits_or_share.shape[:2] != batch.labels.shape:
                raise ValueError(
                    f"logits {tuple(logits_or_share.shape)} for a batch of tokens {tuple(batch.labels.shape)}: "
                    "[B, T, V] of this batch's own tokens is needed"
                )
            local_share = batch.share_of(logits_or_share)
        self._averaging.check(local_share, batch.ddp_modules)
        # Every rank backpropagates from the same sum, so the backward of the all-reduce gives each rank `self.ranks`
        # times the gradient of its share. FSDP2's or DDP's average over these ranks divides by `self.ranks` again.
        return sum_over_axes(local_share, self.axes)

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module) -> None:
        """Averages gradients over ranks, after `backward`, for a model under neither FSDP2 nor DDP.

        The gradients of `loss` are then complete. Every rank must call it.

        Bytes sent: an `all_reduce` of each gradient, and of one integer per parameter, on each axis.

        Raises:
            ValueError: the model is under DDP, FSDP2 or tensor parallelism, which reduce gradients themselves; ranks
                sharded different rows.
        """
        self.rows_check.check()
        in_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if in_ddp or any(compat.is_dtensor(p) for p in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} is under FSDP2, DDP or tensor parallelism, which reduce gradients themselves: "
                "do not call reduce_gradients"
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            return
        # A rank may have no gradient of a parameter that other ranks use (an expert), but must take part in the sum.
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
        gradient_counts = sum_over_axes(has_gradient, self.axes).tolist()  # ranks with a gradient, by parameter
        for parameter, gradient_count in zip(parameters, gradient_counts, strict=True):
            if gradient_count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = sum_over_axes(gradient, self.axes) / self.ranks

    def verify(self, model: nn.Module, batch: ContextParallelBatch) -> Any:
        """Returns a context manager that observes a step of this batch, without a further forward.

            with cp.shard(ids) as batch, cp.verify(model, batch) as proof:
                loss = cp.loss(model(**batch.inputs).loss, batch)
                loss.backward()
            report = proof.report(loss)  # after the reduction of gradients, before the optimizer's step

        armillary-check owns the report: `armillary.check.verifying` says which facts it has. Every rank of the world
        must call `verify` and `report`.

        Bytes sent: none by `verify`; `report` gathers about 70 bytes for each parameter of each rank.

        Raises:
            ValueError: armillary-check is not installed; a batch that another `ContextParallel` sharded.
        """
        if batch.owner is not self:
            raise ValueError("batch is one that this ContextParallel did not shard: cp.shard(ids)")
        tokens = {"ids": batch.ids, "labels": batch.labels, "position_ids": batch.position_ids}
        rows = None if batch.comparison is None else tuple(batch.comparison.digests.tolist())
        return observe_shard(model, self.method, batch.layout, **tokens, labelled=batch.total_labelled, rows=rows)

    def count_positions_as(self, model: nn.Module, padding_idx: int | None) -> None:
        """Sets `padding_idx` for a model that is prepared; functions of `PREPARERS` call it.

        Raises:
            ValueError: a model prepared before counts position ids from another number.
        """
        if self._counting_model is not None and padding_idx != self.padding_idx:
            raise ValueError(
                f"{type(model).__name__} counts position ids with padding_idx={padding_idx}, but "
                f"{self._counting_model}, prepared before, with padding_idx={self.padding_idx}: prepare it with "
                "another ContextParallel, and shard its rows with that"
            )
        self.padding_idx, self._counting_model = padding_idx, type(model).__name__

    def prepare(self, model: Model, **options: Any) -> Model:
        """Prepares an unmodified model of another library for sharded sequences, in place; returns the model.

            model = cp.prepare(AutoModelForCausalLM.from_pretrained(folder))
            with cp.shard(ids) as batch:
                loss = cp.loss(model(**batch.inputs).loss, batch)
            loss.backward()

        The function that prepares the model is an entry point of the group "armillary.prepare", named after the
        library. armillary-integrations has one for transformers (`prepare_transformers`) and one for diffusers
        (`prepare_diffusers`).

        Args:
            options: options of the library's function.

        Raises:
            ValueError: no installed package prepares models of this library, or the model cannot be sharded; it counts
                position ids from another number than a model prepared before (RoBERTa beside others). In forward, the
                model is training with a probability above 0 by which it drops whole layers or rows (`layerdrop`,
                `drop_path`).
        """
        # A user's subclass is recognized by its base class in transformers or diffusers.
        libraries = {base.__module__.partition(".")[0] for base in type(model).__mro__}
        preparers = {preparer.name: preparer for preparer in entry_points(group=PREPARERS)}
        preparer = next((preparers[name] for name in preparers if name in libraries), None)
        if preparer is None:
            raise ValueError(
                f"no installed package prepares {type(model).__name__}; libraries of entry points {PREPARERS!r}: "
                f"{sorted(preparers)}. Install armillary-integrations (again, if its entry points changed) for models "
                "of transformers and diffusers; pass batch.attend to other models, or use sdpa_parallel or "
                "ContextParallelStyle"
            )
        preparer.load()(model, self, **options)
        self._averaging.models.add(model)
        if self.ranks > 1:
            model.register_forward_pre_hook(SharedDraws(model).refuse)
        return model


def _check_rows_complete(
    mask: AttentionMask, position_ids: Tensor | None, attention_mask: Tensor | None, shift_labels: Tensor | None
) -> None:
    """Raises ValueError if a mask without documents lacks what says where rows restart, or if rows have padding."""
    if position_ids is None or shift_labels is None:
        raise ValueError(
            f"mask={mask!s:.80} does not say where positions restart and labels end: give position_ids and "
            "shift_labels beside it"
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"attention_mask hides tokens, and mask={mask!s:.80} cannot have documents, so padding would be seen: "
            "leave attention_mask out, and hide padding in the mask"
        )
