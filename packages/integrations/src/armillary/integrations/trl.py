"""Context parallelism in TRL's GRPOTrainer, DPOTrainer and RewardTrainer: a mixin, listed as a base class before them.

Only the model's forward and backward are sharded. Every rank gets the model's results for whole rows, such as
log-probabilities of tokens or scores of rows, and TRL computes its loss and metrics from them as on one rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import ContextParallel
from armillary.attention.internal import ContextParallelBatch, method_axes, segment_sum, sum_over_axes
from armillary.integrations.accelerate import RowGroups
from armillary.integrations.trainer import SharedRowsTrainer, attention_method
from armillary.integrations.transformers.models import padding_idx_of
from armillary.integrations.transformers.outputs import scores_row_ends
from armillary.integrations.whole_batches import TOKENS, shard_inputs

# Outputs of TRL's fused LM head with one value for each token.
PER_TOKEN = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


class ShardedForward:
    """A model with TRL's fused LM head that takes whole rows, computes this rank's shard and returns values of whole
    rows.

    The gradient of each value is multiplied by the number of ranks that share a sequence, so that FSDP2's or DDP's
    average is the complete gradient.

    Bytes sent in addition to the model's: one `segment_sum` of B N sequences, with a sum for each output of `PER_TOKEN`
    in use, and fingerprints of the rows (see `shard_inputs`).
    """

    def __init__(self, model: Any, cp: ContextParallel) -> None:
        self.model, self.cp = model, cp

    def __call__(self, *, input_ids: Tensor, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Returns TRL's per-token outputs [B, N - 1].

        Raises:
            ValueError: a call without the fused head, which would return a shard's logits; errors of `shard_inputs`.
        """
        if not fused_lm_head:
            raise ValueError("fused_lm_head=False: the model's logits are only of one rank's tokens")
        rows, length = input_ids.shape
        # 1. Forward on this rank's shard.
        batch, shard = _shard_with_positions(self.cp, {"input_ids": input_ids, **inputs})
        with batch:
            outputs = self.model(**shard, fused_lm_head=True)
        values = {name: x for name in PER_TOKEN if (x := getattr(outputs, name, None)) is not None}
        columns = torch.stack([x.to(outputs.log_probs.dtype) for x in values.values()], -1)
        # 2. A differentiable gather: each token is a segment of one token, so the sum over ranks is the value of the
        # rank that has this token.
        positions = batch.layout.positions(self.cp.method.shard).to(input_ids.device)
        token_indices = positions + torch.arange(rows, device=input_ids.device)[:, None] * length
        row_values = segment_sum(columns, token_indices, rows * length, self.cp.method, gradients="averaged")
        # 3. TRL's shapes: the last token predicts nothing. Contiguous, because TRL sums rows, and torch adds numbers in
        # an order that depends on their strides, here on the number of outputs. A policy has more than a reference:
        # sums of equal log-probabilities would differ in the last bit, and DPO would log the signs of rounding errors.
        outputs_of_rows = row_values.view(rows, length, -1)[:, :-1].movedim(-1, 0).contiguous()
        values = dict(zip(values, outputs_of_rows, strict=True))
        if "is_top1" in values:
            values["is_top1"] = values["is_top1"] > 0  # summed as a number, bool in TRL
        return SimpleNamespace(**{name: values.get(name) for name in PER_TOKEN})


class ShardedScores:
    """A sequence classifier that takes whole rows, computes this rank's shard and returns the scores of rows.

    Bytes sent in addition to the model's: see `shard_inputs`.
    """

    def __init__(self, model: Any, cp: ContextParallel) -> None:
        self.model, self.cp = model, cp

    def __call__(self, **inputs: Any) -> Any:
        # Other tensors of TRL's batch, such as the margin of each pair, are not for the model.
        tokens = {name: x for name, x in inputs.items() if name in TOKENS or not isinstance(x, Tensor)}
        batch, shard = _shard_with_positions(self.cp, tokens)
        with batch:
            return self.model(**shard)


def _shard_with_positions(
    cp: ContextParallel, inputs: Mapping[str, Any]
) -> tuple[ContextParallelBatch, dict[str, Any]]:
    """Returns `shard_inputs` of a batch whose positions, if it has none, count from the start of each row."""
    # Decoders of transformers count so, padding on the left included.
    if inputs.get("position_ids") is None:
        ids: Tensor = inputs["input_ids"]
        inputs = {**inputs, "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}
    return shard_inputs(cp, inputs)


class GroupAccelerator:
    """An accelerator that treats each group of ranks that share a sequence as one process."""

    def __init__(self, accelerator: Any, groups: RowGroups) -> None:
        self._accelerator = accelerator
        self.num_processes, self.process_index = groups.count, groups.index
        self.gather = self.gather_for_metrics = groups.gather

    def reduce(self, x: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        total = self.gather(x[None]).sum(0) * scale
        return total / self.num_processes if reduction == "mean" else total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class _PolicyTrainer(SharedRowsTrainer):
    """Base of all mixins: ranks of a sequence share rows, and losses take values of whole rows."""

    def _refusals(self, cp: ContextParallel) -> Iterator[str]:
        if padding_idx_of(self.model) is not None:  # RoBERTa
            yield (
                f"{type(self.model).__name__} counts positions from padding_idx + 1, without padding; here they count "
                "from 0, with padding"
            )
        reference = getattr(self, "ref_model", None)
        if reference is not None and attention_method(self.accelerator.unwrap_model(reference)) is not cp.method:
            yield "ref_model attends by another method than the model: prepare both with one ContextParallel"
        yield from super()._refusals(cp)

    @contextmanager
    def _counting_groups(self) -> Generator[None]:
        # TRL then gathers over groups of ranks instead of ranks, so that each row counts once.
        accelerator = self.accelerator
        self.accelerator = GroupAccelerator(accelerator, self.groups)
        try:
            yield
        finally:
            self.accelerator = accelerator


class ContextParallelGRPOTrainer(_PolicyTrainer):
    """A mixin before TRL's GRPOTrainer: the ranks of a method share each row of prompt and completion.

        cp = ContextParallel("ring", mesh)
        model = cp.prepare(AutoModelForCausalLM.from_pretrained(folder))

        class LongGRPOTrainer(ContextParallelGRPOTrainer, GRPOTrainer): ...

        LongGRPOTrainer(model, reward_funcs, args, train_dataset=prompts).train()

    A group is the ranks that share a sequence. Losses, gradients and logged metrics equal those of an unsharded run
    with one rank for each group, and `per_device_train_batch_size` counts rows of a group. Every rank of a group
    generates the same completions, with transformers, from whole prompts. Rewards are those of the group's first rank.

    Bytes sent in addition to the model's: see `ShardedForward`; and the rewards.

    Attributes:
        cp: the `ContextParallel` of the model's method.
        groups: the groups of ranks that read the same rows.

    Raises:
        ValueError: on every rank. In the constructor: settings that are wrong or untested on shards, such as use_vllm;
            a number of rows per generation or evaluation step, over all groups, that is not divisible by
            `num_generations` or `num_generations_eval`. In a step: different rows on the ranks of a group.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.args
        # TRL has multiplied by the number of ranks, but only groups have different rows.
        settings.generation_batch_size = (
            settings.per_device_train_batch_size * self.groups.count * settings.steps_per_generation
        )
        if settings.generation_batch_size % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size={settings.per_device_train_batch_size} for {self.groups.count} groups of "
                f"ranks and {settings.steps_per_generation} steps per generation: their product must be divisible by "
                f"num_generations={self.num_generations}"
            )
        eval_rows = settings.per_device_eval_batch_size * self.groups.count
        if settings.eval_strategy != "no" and eval_rows % self.num_generations_eval:
            raise ValueError(
                f"per_device_eval_batch_size={settings.per_device_eval_batch_size} for {self.groups.count} groups of "
                f"ranks must be divisible by {self.num_generations_eval} generations"
            )
        # One seed per group: its ranks sample the same completions, and other groups sample others.
        set_seed: Any = import_module("accelerate.utils").set_seed
        set_seed(settings.seed + self.groups.index)

    def _refusals(self, cp: ContextParallel) -> Iterator[str]:
        yield from super()._refusals(cp)
        if self.use_vllm:
            yield "use_vllm=True has not been tested on shards: completions are generated by transformers"
        if self.use_transformers_continuous_batching:
            yield "use_transformers_continuous_batching=True has not been tested on shards: set it to False"
        if self.log_completions:
            yield "log_completions=True would log each completion once for each rank: set it to False"

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._counting_groups():
            return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # Whole prompts, with unsharded attention, because attention over shards has no KV cache.
        model = self.accelerator.unwrap_model(self.model)
        implementation = model.config._attn_implementation
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            model.set_attn_implementation(implementation)

    def _calculate_rewards(self, inputs: Any, prompts: Sequence[Any], *args: Any) -> Tensor:
        # TRL's function returns the rewards of the rows of all ranks; only groups have different rows.
        all_rewards = super()._calculate_rewards(inputs, prompts, *args)
        rank = dist.get_rank() if dist.is_initialized() else 0
        own_rewards = all_rewards.view(-1, len(prompts), all_rewards.shape[1])[rank]
        # A reward function may be random, or call a remote judge, so every rank of a group takes the rewards of its
        # first rank. The sum broadcasts them, because the other ranks contribute zeros.
        first_rewards = own_rewards if self.cp.method.shard == 0 else torch.zeros_like(own_rewards)
        return self.groups.gather(sum_over_axes(first_rewards, method_axes(self.cp.method)))

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(ShardedForward(model, self.cp), *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        with self._counting_groups():
            return super()._compute_loss(model, inputs)


class ContextParallelDPOTrainer(_PolicyTrainer):
    """A mixin before TRL's DPOTrainer: the ranks of a method share each row.

        class LongDPOTrainer(ContextParallelDPOTrainer, DPOTrainer): ...

        LongDPOTrainer(cp.prepare(model), cp.prepare(ref_model), args, train_dataset=preferences, ...).train()

    A group is the ranks that share a sequence. Losses, gradients and logged metrics equal those of an unsharded run
    with one rank for each group, and `per_device_train_batch_size` counts rows of a group. As in TRL, `ref_model` may
    be None, with an adapter too, and `precompute_ref_log_probs` computes the reference once, in the constructor.

    Bytes sent in addition to the model's: see `ShardedForward`, for the policy and for the reference.

    Attributes:
        cp: the `ContextParallel` of the model's method.
        groups: the groups of ranks that read the same rows.

    Raises:
        ValueError: on every rank. In the constructor: settings that are wrong or untested on shards; a ref_model that
            attends by another method; precompute_ref_log_probs with a dataset in memory. In a step: different rows on
            the ranks of a group, or an evaluation that returns logits (prediction_loss_only=False).
    """

    ref_model: Any
    precompute_ref_logps: bool

    def _precompute_ref_logps(self, dataset: Any, *args: Any) -> Any:
        # Rank 0 writes the log-probabilities to the dataset's cache, where other ranks read them. A dataset without
        # files has its cache in a temporary folder of each process.
        caches: Any = import_module("datasets").is_caching_enabled
        if self.accelerator.num_processes > 1 and not (caches() and getattr(dataset, "cache_files", True)):
            raise ValueError(
                "precompute_ref_log_probs=True with a dataset in memory, or without datasets' cache: ranks read the "
                "log-probabilities from the cache of a dataset's files; save_to_disk and load_from_disk make such one"
            )
        self._prepare_for_shards()  # TRL's constructor calls this function
        return super()._precompute_ref_logps(dataset, *args)

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        return super().compute_ref_log_probs(ShardedForward(model, self.cp), inputs)

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any], return_outputs: bool) -> Any:
        if return_outputs:
            raise ValueError("return_outputs=True: logits would be only of one rank's tokens; set prediction_loss_only")
        precomputed = self.precompute_ref_logps
        if not precomputed:
            # TRL's loss would call the reference on whole rows. Its function for precomputed references calls whichever
            # there is: a model, or the policy without its adapter or with the adapter's initial copy.
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self.precompute_ref_logps = True
        try:
            with self._counting_groups():
                return super()._compute_loss(ShardedForward(model, self.cp), inputs, return_outputs)
        finally:
            self.precompute_ref_logps = precomputed


class ContextParallelRewardTrainer(_PolicyTrainer):
    """A mixin before TRL's RewardTrainer: the ranks of a method share each row.

        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)

        class LongRewardTrainer(ContextParallelRewardTrainer, RewardTrainer): ...

        LongRewardTrainer(cp.prepare(model), args, train_dataset=preferences, ...).train()

    A group is the ranks that share a sequence. Losses, gradients, logged metrics and predictions equal those of an
    unsharded run with one rank for each group, and `per_device_train_batch_size` counts rows of a group.

    Bytes sent in addition to the model's: see `ShardedScores`.

    Attributes:
        cp: the `ContextParallel` of the model's method.
        groups: the groups of ranks that read the same rows.

    Raises:
        ValueError: on every rank. In the constructor: settings that are wrong or untested on shards; a model that does
            not score the last token of each row. In a step: different rows on the ranks of a group.
    """

    def _refusals(self, cp: ContextParallel) -> Iterator[str]:
        yield from super()._refusals(cp)
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft
        if not scores_row_ends(type(model)):
            yield f"{type(model).__name__} does not score the last token of each row, as *ForSequenceClassification do"

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        with self._counting_groups():
            return super().compute_loss(ShardedScores(model, self.cp), inputs, return_outputs, num_items_in_batch)
