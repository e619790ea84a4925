"""Context parallelism in Hugging Face's Trainer, and in TRL's SFTTrainer: a mixin before either."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from armillary.attention.context_parallel.batch import whole_sequence, with_value
from armillary.attention.context_parallel.packing import sum_over_ranks
from armillary.attention.methods.base import Method
from armillary.integrations.rows import Rows, share_rows
from armillary.integrations.trainer_checks import check_trainer, method_of
from armillary.integrations.transformers.inputs import shard_inputs
from armillary.integrations.transformers.models import padding_idx_of

if TYPE_CHECKING:
    Trainer: Any = (
        object  # what stands after it among a class's bases: transformers is imported by nobody but its users
    )
else:
    Trainer = object


class ContextParallelTrainer(Trainer):
    """Before a Trainer among the bases of a class: all ranks of a method share each row of the data.

        register_transformers(attend)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="armillary")

        class LongTrainer(ContextParallelTrainer, Trainer): ...

        LongTrainer(model, args, train_dataset=rows).train()

    The method is that of the model's attention implementation. Ranks that are not on its axes are data-parallel: with
    `build_mesh(device, shard=2, ring=4)` each of two groups of 4 ranks reads rows of its own.
    `per_device_train_batch_size` counts rows of a group. What is logged, evaluated, predicted, clipped and saved is
    what one rank for each group would have: losses and gradient norms are those of whole rows, predictions are
    gathered in sequence order. Gradients are averaged by DDP or FSDP2 as always; losses are scaled so that this sums
    the shares.

    Padding (`attention_mask`), packed rows (position ids that restart, or cu_seq_lens) and labels mean what they mean
    on one rank. What the model says of padding itself means nothing.

    `takes_shards`: a class after this one, other than transformers' Trainer and TRL's SFTTrainer, has its own
    `compute_loss`. That is handed one rank's tokens, with labels that are shifted already; set it to True where the
    class wants those, and divides a sum over tokens by `num_items_in_batch`.

    Raises:
        ValueError: on every rank, when it is made: a model with another attention implementation, or whose loss cannot
            be summed over shards (`compute_loss_func`, routers' auxiliary loss); NEFTune, Liger kernels, DeepSpeed,
            FSDP1, DataParallel, accelerate's own context or tensor parallelism, dispatched or rebalanced batches.
            At a batch: different rows on the ranks of a sequence, inputs that are not per token, padding between
            tokens.
    """

    takes_shards = False
    attend: Any = None
    """The method, once the model is known."""
    rows: Rows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attend = method_of(self.model)
        check_trainer(self, ContextParallelTrainer)
        self.attend, self.padding_idx = attend, padding_idx_of(self.model)
        self._share_rows()
        smoother: Any = self.label_smoother
        self.label_smoother = smoother and partial(_smoothed, smoother)

    def create_accelerator_and_postprocess(self) -> None:
        """Called by `__init__`, before the method is known, and at each trial of a search of hyperparameters."""
        super().create_accelerator_and_postprocess()
        if self.attend is not None:
            self._share_rows()

    def _share_rows(self) -> None:
        self.rows = share_rows(self.accelerator, self.attend)
        objects = self.args.eval_use_gather_object
        self.gather_function = partial(self.accelerator.gather_for_metrics, use_gather_object=objects)

    def get_cp_size(self) -> int:
        """Number of ranks that have the same rows."""
        return self.attend.shards

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of whole rows, with the gradient of this rank's share; outputs are those of its tokens."""
        batch, own = shard_inputs(self.attend, inputs, self.padding_idx)
        if num_items_in_batch is None:
            # Shares of a mean over this batch. The loss is multiplied by all ranks where tokens are averaged over them.
            ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            num_items_in_batch = torch.tensor(batch.labelled * ranks / self.attend.shards, device=batch.ids.device)
        with batch.sequence(), _gathering_shares(self.accelerator):
            found = super().compute_loss(model, own, return_outputs, num_items_in_batch)
        loss, outputs = found if return_outputs else (found, None)
        loss = with_value(sum_over_ranks(loss.detach(), self.attend) / self.attend.shards, loss)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The loss, predictions and labels of whole rows."""
        step = partial(super().prediction_step, model)
        if inputs.get("labels") is not None:  # then it comes back for `compute_loss`
            loss, predictions, labels = step(inputs, prediction_loss_only, ignore_keys=ignore_keys)
        else:
            batch, own = shard_inputs(self.attend, self._prepare_inputs(inputs), self.padding_idx)
            with batch.sequence():
                loss, predictions, labels = step(own, prediction_loss_only, ignore_keys=ignore_keys)
        if prediction_loss_only or predictions is None:
            return loss, predictions, labels
        return loss, _whole(predictions, self.attend, inputs["input_ids"].shape), labels

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> Any:
        """Returns this rank's share of the operations of whole rows; the trainer sums over ranks."""
        return super().floating_point_ops(inputs) / self.attend.shards

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # gathers it from all ranks, which have whole rows
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.attend.shards


def _smoothed(smoother: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Tensor:
    """The loss of a label smoother, whose labels are shifted already."""
    return smoother(outputs, labels, shift_labels=False, **kwargs)


@contextmanager
def _gathering_shares(accelerator: Any) -> Generator[None]:
    """Gathers over all ranks inside the block: TRL's metrics are sums over the tokens of one rank."""
    by_rows = accelerator.gather_for_metrics
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        accelerator.gather_for_metrics = by_rows


def _whole(predictions: Any, attend: Method, shape: tuple[int, ...]) -> Any:
    """Predictions of shards, in tuples as they come, gathered in sequence order."""
    if isinstance(predictions, (tuple, list)):
        return tuple(_whole(part, attend, shape) for part in predictions)
    if isinstance(predictions, dict):
        return {name: _whole(part, attend, shape) for name, part in predictions.items()}
    layout = attend.layout(shape[1])
    tokens = layout.refine(attend.shards // layout.shards).sizes[attend.shard]
    if not isinstance(predictions, Tensor) or tuple(predictions.shape[:2]) != (shape[0], tokens):
        found = tuple(predictions.shape) if isinstance(predictions, Tensor) else type(predictions).__name__
        raise ValueError(
            f"an output of the model, {found}, is not [{shape[0]} rows, {tokens} tokens, ...], so that it cannot be "
            "gathered in sequence order: name it in ignore_keys, or set prediction_loss_only=True"
        )
    return whole_sequence(predictions, attend, layout)
