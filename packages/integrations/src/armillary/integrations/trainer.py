"""Context parallelism in Hugging Face's Trainer and TRL's SFTTrainer: a mixin, listed as a base class before them.

The ranks of a sequence read the same rows; each one computes the loss of its tokens, and their sum over ranks is that
of the rows. `_refusals` names the settings under which it is not, or which are not tested.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import getsource
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from armillary.attention import ContextParallel, Method
from armillary.attention.internal import gather_tokens, over_all_ranks
from armillary.integrations.accelerate import RowGroups, share_rows
from armillary.integrations.transformers.models import methods_of, padding_idx_of, parts_of
from armillary.integrations.transformers.outputs import ROUTER_LOSS_ERROR, predicts_next_token
from armillary.integrations.versions import check_version
from armillary.integrations.whole_batches import shard_inputs

if TYPE_CHECKING:
    Trainer: Any = object
else:
    Trainer = object  # the real base class comes after the mixin, so that this module does not import transformers


class SharedRowsTrainer(Trainer):
    """Base of all mixins for trainers: makes the ranks that share a sequence read the same rows.

    Attributes:
        cp: the `ContextParallel` of the model's method; None until `_prepare_for_shards` has run.
        groups: the groups of ranks that read the same rows.
    """

    cp: Any = None
    groups: RowGroups

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        libraries = {base.__module__.partition(".")[0] for base in type(self).__mro__}
        for library in sorted(libraries & {"transformers", "trl"}):
            check_version(library)
        super().__init__(*args, **kwargs)
        self._prepare_for_shards()

    def _prepare_for_shards(self) -> None:
        """Raises ValueError for settings that are refused; makes ranks share rows. A second call does nothing.

        A trainer whose own constructor runs the model calls it before.
        """
        if self.cp is None:
            cp = ContextParallel(attention_method(self.model))
            for reason in self._refusals(cp):
                raise ValueError(reason)
            self.share_rows(cp)

    def create_accelerator_and_postprocess(self) -> None:
        # Trainer calls this in its constructor, where `cp` is not known yet, and again in each trial of a
        # hyperparameter search.
        super().create_accelerator_and_postprocess()
        if self.cp is not None:
            self.share_rows(self.cp)

    def share_rows(self, cp: ContextParallel) -> None:
        """Makes the trainer's accelerator treat each group of ranks that share a sequence as one process."""
        cp.padding_idx, cp.shifts_labels = padding_idx_of(self.model), predicts_next_token(self.model)
        self.cp, self.groups = cp, share_rows(self.accelerator, cp)
        # Trainer's constructor stored the accelerator's function before `share_rows` replaced it.
        objects = self.args.eval_use_gather_object
        self.gather_function = partial(self.accelerator.gather_for_metrics, use_gather_object=objects)

    def get_cp_size(self) -> int:
        # The trainer divides its counts of labels and rows by the number of ranks with the same rows.
        return self.cp.ranks

    def _refusals(self, cp: ContextParallel) -> Iterator[str]:
        args = self.args
        # A loss that is not a sum over tokens divided by num_items_in_batch.
        if any(getattr(part, "output_router_logits", False) for part in parts_of(self.model.config)):
            yield ROUTER_LOSS_ERROR
        # Options that depend on the local length, or are not tested on shards.
        if getattr(args, "neftune_noise_alpha", None) is not None:
            yield "neftune_noise_alpha scales its noise by the local length, that of a shard: remove it"
        if args.use_liger_kernel:
            yield "use_liger_kernel=True is not tested on shards: set it to False"
        if args.torch_compile:
            yield "torch_compile=True: ranks compare each batch, which a graph cannot contain; set it to False"
        if args.n_gpu > 1:
            yield f"DataParallel over {args.n_gpu} GPUs in one process: start a process for each, with torchrun"
        if self.is_deepspeed_enabled:
            yield "DeepSpeed is not tested on shards: use FSDP2 (fsdp, fsdp_config), or DDP"
        if self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
            yield 'FSDP1 is not tested on shards: use FSDP2, fsdp_config={"version": 2}'
        # A loader that decides which rank reads which rows.
        if str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"):
            yield 'train_sampling_strategy="batch_rebalance" counts every rank as one that reads rows: use another'


def attention_method(model: Any) -> Method:
    """Returns the method by which a model attends; raises ValueError without one, or for several."""
    config = getattr(model, "config", None)
    methods = [] if config is None else methods_of(config)
    if any(method is not methods[0] for method in methods):
        names = ", ".join(type(method).__name__ for method in methods)
        raise ValueError(f"parts of {type(model).__name__} attend by different methods, {names}: one is needed for all")
    if not methods:
        implementation = getattr(config, "_attn_implementation", None)
        raise ValueError(
            f"{type(model).__name__} attends by {implementation!r}, which does not attend over shards: call "
            "ContextParallel(...).prepare(model), or load the model with an implementation of register_transformers"
        )
    return methods[0]


# Classes whose `compute_loss` works on shards: with shift_labels and num_items_in_batch it sums over the given tokens.
# Older releases of these classes do not. The value is a word that only the source of a new `compute_loss` contains.
SHARDED_LOSSES = {
    "transformers.trainer.Trainer": "num_processes",
    "trl.trainer.sft_trainer.SFTTrainer": "fused_lm_head",
}


class ContextParallelTrainer(SharedRowsTrainer):
    """A mixin, listed before a Trainer: the ranks of a method share each row of the data.

        cp = ContextParallel("ring", mesh)
        model = cp.prepare(AutoModelForCausalLM.from_pretrained(folder))

        class LongTrainer(ContextParallelTrainer, Trainer): ...

        LongTrainer(model, args, train_dataset=rows).train()

    The method is that of the model's attention implementation. Ranks that are not on its axes are data-parallel: with
    `build_mesh(device, shard=2, ring=4)` two groups of 4 ranks read different rows, and
    `per_device_train_batch_size` counts rows of a group. Logged, evaluated, predicted, clipped and saved values are
    those of a run with one rank per group: losses and gradient norms are of whole rows, and predictions are gathered in
    sequence order. DDP or FSDP2 averages gradients as always.

    Padding (`attention_mask`), packed rows (position ids that restart, or cu_seq_lens) and labels mean the same as on
    one rank. The model's output at padding is meaningless.

    Bytes sent for each batch, beside those of the model: those of `shard_inputs` and of `ContextParallel.loss`.
    `predict`, and `evaluate` with compute_metrics, gather the model's outputs.

    Attributes:
        takes_shards: set it to True on a class whose own `compute_loss` takes one rank's tokens with shifted labels,
            and divides a sum over tokens by `num_items_in_batch`. Not needed for the `compute_loss` of transformers'
            Trainer and TRL's SFTTrainer.
        cp: the `ContextParallel` of the model's method.
        groups: the groups of ranks that read the same rows.

    Raises:
        ValueError: on every rank. In the constructor: a model with another attention implementation, or without
            num_items_in_batch among its arguments; a loss that cannot be summed over shards (`compute_loss_func`,
            routers' auxiliary loss, a `compute_loss` of your own without `takes_shards`); a release of transformers or
            TRL that computes losses differently; NEFTune, Liger kernels, torch_compile, DeepSpeed, FSDP1, DataParallel,
            rebalanced batches; errors of `share_rows`. In a step: errors of `shard_inputs`. In `predict` and
            `evaluate`: outputs to gather that are not [rows, tokens, ...].
    """

    takes_shards = False
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Trainer tells its label smoother to shift the labels of a causal model, but a shard's labels are shifted
        # already.
        smoother = self.label_smoother
        self.label_smoother = smoother and partial(_smooth_without_shift, smoother)

    def _refusals(self, cp: ContextParallel) -> Iterator[str]:
        """Yields a reason for each setting under which the loss is not a sum over the tokens of shards, then others."""
        # The class whose `compute_loss` this mixin calls: the first one after the mixin that defines it.
        bases = type(self).__mro__
        bases = bases[bases.index(ContextParallelTrainer) + 1 :]
        owner: Any = next((base for base in bases if "compute_loss" in vars(base)), None)
        if owner is None:
            raise ValueError(f"{type(self).__name__}: a Trainer must come after ContextParallelTrainer among its bases")
        marker = SHARDED_LOSSES.get(f"{owner.__module__}.{owner.__qualname__}")
        # Trainer counts labels over all ranks and divides by get_cp_size, which the mixin overrides.
        count_labels: Any = getattr(self, "_get_num_items_in_batch", None)
        if count_labels is None or "get_cp_size" not in getsource(count_labels):
            yield "this release of transformers counts labels differently"
        if marker is not None and marker not in getsource(owner.compute_loss):
            library = owner.__module__.partition(".")[0]
            yield f"this release of {library} computes losses differently; install a newer one"
        if not self.takes_shards and marker is None:
            yield (
                f"{owner.__qualname__}.compute_loss would get one rank's tokens, with labels that are shifted already; "
                f"set takes_shards = True on {type(self).__name__} if it takes those"
            )
        if self.compute_loss_func is not None:
            yield (
                "compute_loss_func shifts labels itself, and those of a shard are shifted: override compute_loss in "
                "a class with takes_shards = True, where inputs have shift_labels"
            )
        if not self.model_accepts_loss_kwargs:
            yield f"{type(self.model).__name__} takes no num_items_in_batch: its loss is a mean over a shard's labels"
        yield from super()._refusals(cp)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns the loss of whole rows, and the outputs of local tokens.

        The gradient on this rank is `cp.ranks` times that of its share of the loss, for DDP or FSDP2 to average.
        """
        batch, shard = shard_inputs(self.cp, inputs)
        if num_items_in_batch is None:
            # The loss is then a mean over the labels of this batch. DDP averages over ranks, so the trainer's loss must
            # be cp.ranks times this rank's share, (sum over its tokens) / labelled. With average_tokens_across_devices,
            # the trainer itself multiplies the loss by the number of all ranks, which trainer_factor cancels.
            trainer_factor = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            num_items_in_batch = torch.tensor(batch.labelled * trainer_factor / self.cp.ranks, device=batch.ids.device)
        with batch, _gathering_shards(self.accelerator):
            result = super().compute_loss(model, shard, return_outputs, num_items_in_batch)
        loss, outputs = result if return_outputs else (result, None)
        # `loss` is cp.ranks times this rank's share, and has the gradient that DDP must average. The division makes it
        # the share. cp.loss sums shares and multiplies their gradient by cp.ranks, which restores that gradient.
        loss = self.cp.loss(loss / self.cp.ranks, batch)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Returns the loss, predictions and labels of whole rows."""
        step = partial(super().prediction_step, model)
        if inputs.get("labels") is not None:  # the trainer then calls `compute_loss`, which shards the rows
            loss, predictions, labels = step(inputs, prediction_loss_only, ignore_keys=ignore_keys)
        else:
            batch, shard = shard_inputs(self.cp, self._prepare_inputs(inputs))
            with batch:
                loss, predictions, labels = step(shard, prediction_loss_only, ignore_keys=ignore_keys)
        if prediction_loss_only or predictions is None:
            return loss, predictions, labels
        return loss, _gather_predictions(predictions, self.cp, inputs["input_ids"].shape), labels

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> Any:
        # This rank's share, because the trainer sums over ranks.
        return super().floating_point_ops(inputs) / self.cp.ranks

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # counts each row on each of its ranks
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.cp.ranks


def _smooth_without_shift(
    smoother: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any
) -> Tensor:
    # The labels are shifted already, whatever `shift_labels` is.
    return smoother(outputs, labels, shift_labels=False, **kwargs)


@contextmanager
def _gathering_shards(accelerator: Any) -> Generator[None]:
    # TRL's metrics are sums over local tokens, so they are gathered from every rank.
    gather_rows = accelerator.gather_for_metrics
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        accelerator.gather_for_metrics = gather_rows


def _gather_predictions(predictions: Any, cp: ContextParallel, shape: tuple[int, ...]) -> Any:
    """Gathers predictions of shards, nested in tuples and dicts, in sequence order; `shape` is (B, N) of whole rows."""
    rows, length = shape
    layout = over_all_ranks(cp.method.layout(length), cp.method)
    tokens = layout.sizes[cp.method.shard]

    def gather(x: Any) -> Tensor:
        if not isinstance(x, Tensor) or tuple(x.shape[:2]) != (rows, tokens):
            output = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"an output of the model, {output}, is not [{rows} rows, {tokens} tokens, ...], so it cannot be "
                "gathered in sequence order: name it in ignore_keys, or set prediction_loss_only=True"
            )
        return gather_tokens(x, cp.method, layout)

    return pytree.tree_map(gather, predictions)
