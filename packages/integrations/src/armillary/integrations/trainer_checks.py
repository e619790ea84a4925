"""Settings that `ContextParallelTrainer` refuses: wrong on shards, or not tested there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import getsource
from itertools import chain
from typing import Any

from armillary.attention import Method
from armillary.integrations.accelerate import check_parallelism
from armillary.integrations.transformers.interface import methods_of, parts_of
from armillary.integrations.transformers.models import ROUTER_LOSS_ERROR

SHARDED_LOSSES = {
    "transformers.trainer.Trainer": "num_processes",
    "trl.trainer.sft_trainer.SFTTrainer": "fused_lm_head",
}
"""Classes whose `compute_loss` works on shards: with shift_labels and num_items_in_batch it sums over the given tokens.
Older releases of these classes do not. The value is a word that only the source of a new `compute_loss` contains."""


def method_of(model: Any) -> Method:
    """Returns the method by which a model attends.

    Raises:
        ValueError: the model attends by no `Method`, or by several.
    """
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


def check_trainer(trainer: Any, mixin: type) -> None:
    """Raises ValueError with the first setting of a trainer that is wrong or untested on shards."""
    check_settings(trainer, _loss_refusals(trainer, mixin))


def check_settings(trainer: Any, refusals: Iterable[str] = ()) -> None:
    """Raises ValueError with the first of `refusals`, or for a setting that is wrong on shards with any loss."""
    if reason := next(chain(refusals, _setting_refusals(trainer)), None):
        raise ValueError(reason)
    check_parallelism(trainer.accelerator)


def _loss_refusals(trainer: Any, mixin: type) -> Iterator[str]:
    """Yields a reason for each setting under which the trainer's loss is not a sum over the tokens of shards."""
    owner = loss_owner(type(trainer), mixin)
    marker = SHARDED_LOSSES.get(f"{owner.__module__}.{owner.__qualname__}")
    # Trainer counts labels over all ranks and divides by get_cp_size, which the mixin overrides.
    count_labels: Any = getattr(trainer, "_get_num_items_in_batch", None)
    if count_labels is None or "get_cp_size" not in getsource(count_labels):
        yield "this release of transformers counts labels differently; 5.23 is supported"
    if marker is not None and marker not in getsource(owner.compute_loss):
        yield f"this release of {owner.__module__.partition('.')[0]} computes losses differently; install a newer one"
    if not trainer.takes_shards and marker is None:
        yield (
            f"{owner.__qualname__}.compute_loss would get one rank's tokens, with labels that are shifted already; set "
            f"takes_shards = True on {type(trainer).__name__} if it takes those"
        )
    if trainer.compute_loss_func is not None:
        yield (
            "compute_loss_func shifts labels itself, and those of a shard are shifted: override compute_loss in "
            "a class with takes_shards = True, where inputs have shift_labels"
        )
    if not trainer.model_accepts_loss_kwargs:
        yield f"{type(trainer.model).__name__} takes no num_items_in_batch: its loss is a mean over a shard's labels"


def _setting_refusals(trainer: Any) -> Iterator[str]:
    """Yields a reason for each setting that is wrong or untested on shards, whatever the loss."""
    args = trainer.args
    # Losses that are not a sum over tokens divided by num_items_in_batch.
    if any(getattr(part, "output_router_logits", False) for part in parts_of(trainer.model.config)):
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
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed is not tested on shards: use FSDP2 (fsdp, fsdp_config), or DDP"
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        yield 'FSDP1 is not tested on shards: use FSDP2, fsdp_config={"version": 2}'
    # Loaders that decide which rank reads which rows.
    if str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"):
        yield 'train_sampling_strategy="batch_rebalance" counts every rank as one that reads rows: use another'
    if args.accelerator_config.dispatch_batches:
        yield "dispatch_batches=True: one process would send its rows to all; remove it, or set it to False"


def loss_owner(trainer: type, mixin: type) -> Any:
    """Returns the class whose `compute_loss` the mixin calls: the first one after the mixin that defines it.

    Raises:
        ValueError: no class after the mixin defines it.
    """
    bases = trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]
    owner = next((base for base in bases if "compute_loss" in vars(base)), None)
    if owner is None:
        raise ValueError(f"{trainer.__name__}: a Trainer must come after {mixin.__name__} among its bases")
    return owner
