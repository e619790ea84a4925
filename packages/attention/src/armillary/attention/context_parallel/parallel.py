"""One object for context parallelism in a training loop: it shards batches, reduces losses and, if asked, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from armillary.attention.context_parallel.batch import ShardedBatch, shard_batch
from armillary.attention.context_parallel.packing import method_axes, sum_over_axes
from armillary.attention.context_parallel.padding import IGNORED
from armillary.attention.context_parallel.sdpa import in_backward, with_documents
from armillary.attention.context_parallel.sequence import Documents, check_method, sequence, takes_documents
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.attention.registry import build_attention
from armillary.core import Axis, SequenceLayout
from armillary.core.compat import is_dtensor
from armillary.core.validation import check_tensor


class ContextParallel:
    """Context parallelism for a training loop of your own.

        cp = ContextParallel("ring", mesh)
        for ids in rows:  # [B, N], the same on all ranks of a sequence
            batch = cp.shard(ids)
            logits = model(batch.ids, batch.position_ids, attention=batch.attend)
            loss = cp.loss(logits, batch)  # the mean over all labels, the same on every rank
            loss.backward()  # FSDP2 and DDP average: gradients are those of the whole loss

    FSDP2 or DDP must average over the ranks of the method and of `data`, no more and no fewer; leave
    `armillary.core.sum_gradients` out. Without either of them, call `reduce_gradients` after `backward`.

    Args:
        method: a method, or the name of one (`build_attention`).
        mesh: with the axes of the method, as from `build_mesh`.
        data: names of the mesh's axes over which rows differ.

    Raises:
        ValueError: `data` names axes that the mesh lacks, or that the method works on.
    """

    def __init__(self, method: Method | str, mesh: DeviceMesh, data: str | Sequence[str] = ()) -> None:
        self.method = build_attention(method, mesh) if isinstance(method, str) else method
        check_method(self.method)
        names = (data,) if isinstance(data, str) else tuple(data)
        mesh_names = mesh.mesh_dim_names or ()
        if missing := [name for name in names if name not in mesh_names]:
            raise ValueError(f"data={missing}: the mesh has axes {mesh_names}")
        sequence_axes = method_axes(self.method)
        if shared := sorted({axis.name for axis in sequence_axes} & set(names)):
            raise ValueError(f"data={shared}: rows cannot differ on axes over which the method shards the sequence")
        self._data_axes = [axis for name in names if (axis := Axis.of(mesh[name])).size > 1]
        self._axes = [*sequence_axes, *self._data_axes]
        self._padding_idx: int | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that `loss` reduces over: those of a sequence times those of `data`."""
        return prod(axis.size for axis in self._axes)

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
        labelled: int | None = None,
    ) -> ContextParallelBatch:
        """Returns the tokens, positions and shifted labels of this rank.

        Communicates if there are data axes: every rank must call it.

        Args:
            ids: [B, N], the whole rows; the same on all ranks of a sequence.
            labels: [B, N], unshifted; by default `ids`.
            mask: of attention; causal for `batch.attend`, and what the model says inside `with batch`, by default.
                `documents` are added to it.
            documents: boundaries, as `AttentionMask` takes them.
            attention_mask: [B, N] of 1 and 0, where 0 is padding.
            shift_labels: [B, N], labels that are shifted already.
            labelled: number of labels that the loss is a mean over; by default those of this batch on all data axes.
                With several micro-batches, the number of all of them together.

        Raises:
            ValueError: as `shard_batch`; a mask of slices or a tree without position_ids and shift_labels.
        """
        if mask is not None:
            if not takes_documents(mask) and (position_ids is None or shift_labels is None):
                raise ValueError(
                    f"mask={mask!s:.80} has no documents that say where positions restart and labels end: "
                    "give position_ids and shift_labels beside it"
                )
            documents = mask.documents if documents is None else documents
        shard = shard_batch(
            self.method,
            ids,
            labels,
            layout=layout,
            documents=documents,
            position_ids=position_ids,
            attention_mask=attention_mask,
            shift_labels=shift_labels,
            labelled=labelled,
            padding_idx=self._padding_idx,
        )
        if labelled is None:
            count = torch.tensor(shard.label_count, device=ids.device)
            shard = shard._replace(labelled=max(int(sum_over_axes(count, self._data_axes)), 1))
        packed = documents is not None or position_ids is not None or attention_mask is not None
        own = AttentionMask(causal=True) if mask is None else mask
        if packed and takes_documents(own):
            own = with_documents(replace(own, documents=None), shard.documents)
        return ContextParallelBatch(self, shard, own, mask is not None)

    def loss(self, logits_or_share: Tensor, batch: ContextParallelBatch) -> Tensor:
        """Returns the mean loss over all labels of all ranks and data axes, the same number on every rank.

        Its gradients, averaged over these ranks, are those of the whole loss. Backward communicates too.

        Args:
            logits_or_share: logits [B, T, V] of the batch's tokens, or the loss [] of a model that was given
                `batch.inputs`: the sum over its labels divided by `num_items_in_batch`.

        Raises:
            ValueError: the batch is of another `ContextParallel`; logits of other tokens; a loss of a model that was
                not given `batch.inputs`, and which may be a mean over this shard alone.
        """
        check_tensor("logits_or_share", logits_or_share)
        if not isinstance(batch, ContextParallelBatch) or batch.owner is not self:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"batch is a {type(batch).__name__} that this ContextParallel did not shard: cp.shard(ids)"
            )
        if logits_or_share.ndim == 0:
            if not batch.inputs_read:
                raise ValueError(
                    "a scalar loss of a model that was not given batch.inputs may be a mean over one rank: "
                    "give cp.loss the logits, or call model(**batch.inputs)"
                )
            share = logits_or_share
        else:
            if logits_or_share.ndim != 3 or logits_or_share.shape[:2] != batch.labels.shape:
                raise ValueError(
                    f"logits {tuple(logits_or_share.shape)} for a batch of tokens {tuple(batch.labels.shape)}: "
                    "[B, T, V] of this batch's own tokens is needed"
                )
            flat = logits_or_share.flatten(0, 1)
            sum_dtype = torch.promote_types(flat.dtype, torch.float32)
            total = F.cross_entropy(flat.to(sum_dtype), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
            share = total / batch.labelled
        return cast(Tensor, _SumOverRanks.apply(share, self._axes))

    def reduce_gradients(self, model: nn.Module) -> None:
        """Averages gradients over ranks, after `backward`, for a model under neither FSDP2 nor DDP.

        With the loss of `loss` they are then the whole gradients. Every rank must call it.

        Raises:
            ValueError: the model's gradients are reduced already, by DDP or FSDP2.
        """
        reduced = isinstance(model, DistributedDataParallel) or any(is_dtensor(p) for p in model.parameters())
        if reduced:
            raise ValueError(
                f"{type(model).__name__} is under FSDP2, DDP or tensor parallelism, which reduce gradients themselves: "
                "leave reduce_gradients out"
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            return
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
        on_some_rank = sum_over_axes(has_gradient, self._axes)
        for parameter, count in zip(parameters, on_some_rank.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = sum_over_axes(gradient, self._axes) / self.ranks

    def prepare(self, model: nn.Module) -> nn.Module:
        """Makes a model of Hugging Face transformers attend by this method; returns the model.

            model = cp.prepare(AutoModelForCausalLM.from_pretrained(folder))
            with cp.shard(ids) as batch:
                loss = cp.loss(model(**batch.inputs).loss, batch)
            loss.backward()

        Raises:
            ImportError: armillary-integrations is not installed.
            ValueError: a model of another library, or one that cannot be sharded (`register_transformers`).
        """
        if not hasattr(model, "set_attn_implementation"):
            raise ValueError(
                f"{type(model).__name__} is no model of transformers: hand it batch.attend, or call it inside "
                "sdpa_parallel or under ContextParallelStyle"
            )
        try:  # by name: armillary.integrations depends on this package
            integrations: Any = import_module("armillary.integrations")
        except ImportError as error:
            raise ImportError(f"cp.prepare needs armillary-integrations for {type(model).__name__}: {error}") from error
        integrations.attend_by(model, self.method)
        self._padding_idx = integrations.padding_idx_of(model)
        return model


class ContextParallelBatch:
    """This rank's shard of a batch, with the attention that belongs to it. Made by `ContextParallel.shard`.

    As a context manager it is `sequence(layout=..., documents=...)`, for models of Hugging Face and `sdpa_parallel`.
    """

    def __init__(self, owner: ContextParallel, shard: ShardedBatch, mask: AttentionMask, replaces: bool) -> None:
        self.owner, self.mask, self.inputs_read = owner, mask, False
        self._replaces_mask = replaces  # of the model, inside the block
        self._shard, self._attended = shard, False
        self._block: AbstractContextManager[None] | None = None

    @property
    def ids(self) -> Tensor:
        """Token ids [B, T]."""
        return self._shard.ids

    @property
    def position_ids(self) -> Tensor:
        """Positions [B, T], counted from the start of each document."""
        return self._shard.position_ids

    @property
    def labels(self) -> Tensor:
        """Labels [B, T], shifted; -100 where there is none."""
        return self._shard.labels

    @property
    def documents(self) -> Documents:
        """Boundaries of the documents, in positions of the whole sequence."""
        return self._shard.documents

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the sequence over all ranks of the method."""
        return self._shard.layout

    @property
    def labelled(self) -> int:
        """Number of labels that the loss is a mean over."""
        return self._shard.labelled

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of transformers, whose loss `cp.loss` takes as this rank's share."""
        self.inputs_read = True
        return self._shard.inputs

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

        Activation checkpointing recomputes with this batch, also after the next one was sharded.

        Args:
            mask: of one layer, instead of the batch's; the batch's documents are added to it.
            layout: None, or that of the batch.
            options: of the method, such as `scale`, `sinks` and `softcap`.

        Raises:
            ValueError: another layout; backward recomputes a call of another batch.
        """
        if layout is not None and layout != self.layout:
            raise ValueError(f"layout={layout}: the batch was sharded by {self.layout}")
        if not in_backward():
            self._attended = True
        elif not self._attended:
            raise ValueError(
                "activation checkpointing recomputes attention with the attend of a batch that no forward has used: "
                "hand batch.attend to the model as an argument, instead of keeping it where the next batch replaces it"
            )
        own = self.mask if mask is None else with_documents(mask, self.mask.documents)
        return self.owner.method(q, k, v, mask=own, layout=self.layout, **options)

    def __enter__(self) -> Self:
        if self._block is not None:
            raise ValueError("this batch is entered already; use one `with` block at a time")
        self._block = self._shard.sequence()
        if self._replaces_mask:
            padded = self._shard.attention_mask is not None
            self._block = sequence(layout=self.layout, mask=self.mask, padded=padded)
        self._block.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(*raised)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a scalar over ranks. Backward sums too: an average of the gradients is then the whole gradient."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, axes: list[Axis]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.axes = axes
        return sum_over_axes(share.detach(), axes) if axes else share.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum_over_axes(gradient, ctx.axes), None
