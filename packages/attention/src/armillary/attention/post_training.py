"""Post-training: DPO (arXiv 2305.18290), GRPO (arXiv 2402.03300) and policy gradient, on tokens that any rank may have.

Each rank passes the log-probabilities of its labels, and for each label the index of its sequence. One all-reduce per
loss and axis (`segment_sum`) sums the values of each sequence over ranks, so loss and metrics are equal on all ranks.
`completion_labels` returns the labels of packed trees, which store a prompt once, followed by its completions.

Letters: M labels on this rank, S sequences of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.context_parallel.communication import method_axes, sum_over_axes
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import Axis, Segments, SequenceLayout, accumulation_dtype
from armillary.core.internal import MISSING, check_tensor, integer

Axes = Method | Sequence[DeviceMesh | Axis]
"""All axes over which tokens or rows differ: a method, for its axes, or a list of 1-D meshes or axes."""
Reduction = Literal["summed", "averaged"]
"""Reduction of parameters' gradients over ranks after backward; see `segment_sum`."""
Normalization = Literal["sequence", "token"] | float
"""Average of per-token losses: "sequence", the mean over sequences of the mean over their tokens (GRPO); "token", the
mean over all tokens (DAPO); a number L, the sum over all tokens divided by S L (Dr. GRPO; 1 is REINFORCE)."""


class SequenceLoss(NamedTuple):
    """A differentiable scalar loss, and detached metrics with the names that TRL logs. Equal on all ranks."""

    loss: Tensor
    metrics: dict[str, Tensor]


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    sequences: Tensor,
    pairs: Tensor,
    axes: Axes = (),
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gradients: Reduction = "summed",
    statistics: Mapping[str, Tensor] | None = None,
) -> SequenceLoss:
    """Returns the loss of direct preference optimization, equation 7 of arXiv 2305.18290: the mean over pairs of

        -log sigmoid(beta ((log pi(y_w) - log ref(y_w)) - (log pi(y_l) - log ref(y_l))))

    Args:
        logprobs, reference_logprobs: log-probabilities of this rank's labels, shaped as `sequences`. Only logprobs get
            a gradient.
        sequences: integers, the index 0..S - 1 of each label's sequence; negative where there is no label. Every rank
            of `axes` uses the same index for a sequence.
        pairs: integers [S / 2, 2] on any device: the indices of the chosen and of the rejected sequence. The same on
            every rank.
        beta: strength of the implicit KL penalty that keeps the policy close to the reference.
        label_smoothing: probability that a preference is wrong: the weight of the loss of the swapped pair.
        axes: all axes over which tokens or rows differ: a method, for its axes, or a list of 1-D meshes or axes.
        gradients: how gradients of parameters are reduced over these ranks after backward: "summed", by
            `sum_gradients`, or "averaged", by FSDP2 or DDP alone.
        statistics: further per-token values, shaped as `logprobs`, whose means over tokens become metrics of these
            names, such as "entropy". "logits" becomes "logits/chosen" and "logits/rejected"; "mean_token_accuracy" is
            the mean over chosen tokens.

    Metrics: rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins, logps/chosen, logps/rejected.

    Bytes sent: those of `segment_sum` of S sequences with 3 sums, and one more for each of `statistics`.

    Raises:
        ValueError: tensors whose shapes do not match; `pairs` that are empty, negative or no integers.
        IndexError: a sequence beyond the last of `pairs`, on the CPU.
    """
    is_integer = not pairs.is_floating_point() and pairs.dtype is not torch.bool
    if not is_integer or pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
        raise ValueError(
            f"pairs must be integers [S / 2, 2], one pair at least; got {pairs.dtype} {tuple(pairs.shape)}"
        )
    if (smallest := int(pairs.min())) < 0:
        raise ValueError(f"pairs have index {smallest}; sequences are numbered from 0")
    token_statistics = dict(statistics or {})
    # Sums over each sequence, in columns: 0 tokens, 1 log pi, 2 log ref, 3 and on the statistics.
    columns = _columns(sequences, logprobs, reference_logprobs=reference_logprobs, **token_statistics)
    sums = segment_sum(columns, sequences, 1 + int(pairs.max()), axes, gradients=gradients)
    chosen, rejected = sums[pairs.to(sums.device)].unbind(1)  # [S / 2, columns] each
    # Implicit rewards: beta log(pi / ref) of the whole sequence.
    chosen_rewards, rejected_rewards = (beta * (x[:, 1] - x[:, 2]) for x in (chosen, rejected))
    margins = chosen_rewards - rejected_rewards
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    metrics = {
        "rewards/chosen": chosen_rewards.mean(),
        "rewards/rejected": rejected_rewards.mean(),
        "rewards/accuracies": (chosen_rewards > rejected_rewards).to(sums.dtype).mean(),
        "rewards/margins": margins.mean(),
        "logps/chosen": chosen[:, 1].mean(),
        "logps/rejected": rejected[:, 1].mean(),
    }
    totals = chosen.sum(0), rejected.sum(0)
    for i, name in enumerate(token_statistics, 3):
        chosen_mean, rejected_mean = (_ratio(total[i], total[0]) for total in totals)
        if name == "logits":
            metrics |= {"logits/chosen": chosen_mean, "logits/rejected": rejected_mean}
        elif name == "mean_token_accuracy":
            metrics[name] = chosen_mean
        else:
            metrics[name] = _ratio(totals[0][i] + totals[1][i], totals[0][0] + totals[1][0])
    return SequenceLoss(losses.mean(), {name: metric.detach() for name, metric in metrics.items()})


def grpo_loss(
    logprobs: Tensor,
    sequences: Tensor,
    advantages: Tensor,
    axes: Axes = (),
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    weight_kl: bool = False,
    normalize: Normalization = "sequence",
    gradients: Reduction = "summed",
    statistics: Mapping[str, Tensor] | None = None,
) -> SequenceLoss:
    """Returns the loss of group relative policy optimization, equation 3 of arXiv 2402.03300, per token

        -min(ratio A, clip(ratio, 1 - clip[0], 1 + clip[1]) A) + beta KL,    ratio = pi / old
        KL = ref / pi - log(ref / pi) - 1                                    (equation 4)

    Args:
        logprobs: log-probabilities of this rank's labels, shaped as `sequences`.
        sequences: integers, the index 0..S - 1 of each label's sequence; negative where there is no label. Every rank
            of `axes` uses the same index for a sequence.
        advantages: [S], the same on every rank.
        axes: all axes over which tokens or rows differ: a method, for its axes, or a list of 1-D meshes or axes.
        gradients: how gradients of parameters are reduced over these ranks after backward: "summed", by
            `sum_gradients`, or "averaged", by FSDP2 or DDP alone.
        old_logprobs: log-probabilities under the policy that generated the completions; by default `logprobs` without
            their gradient.
        reference_logprobs: needed if beta is not 0.
        clip: bounds of the ratio below and above 1.
        beta: weight of the KL divergence from the reference.
        weight_kl: multiplies KL by the ratio, which makes its gradient unbiased (DeepSeek-V3.2, arXiv 2512.02556; TRL's
            default).
        normalize: see `Normalization`.
        statistics: further per-token values, shaped as `logprobs`, whose means over tokens become metrics of these
            names, such as "entropy".

    Metrics: clip_ratio/low_mean, high_mean and region_mean, the fractions of tokens that are clipped below, above and
    on either side; clip_ratio/low_min and high_max, the extremes over sequences; kl, the mean over tokens, if beta is
    not 0.

    Bytes sent: those of `segment_sum` of S sequences with 4 sums, one more with beta, and one for each of `statistics`.

    Raises:
        ValueError: tensors whose shapes do not match; integer advantages; beta without reference_logprobs; `normalize`
            of another kind, or not above 0.
        IndexError: a sequence beyond the last of `advantages`, on the CPU.
    """
    if beta and reference_logprobs is None:
        raise ValueError(f"beta={beta} needs reference_logprobs")
    advantage = _per_label("advantages", advantages, sequences)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = (logprobs - old).exp()
    low, high = 1 - clip[0], 1 + clip[1]
    losses = -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    # True for clipped tokens: the minimum is the clipped term, which is constant, so only KL has a gradient there.
    values = {"low": (ratio < low) & (advantage < 0), "high": (ratio > high) & (advantage > 0)}
    if beta:
        assert reference_logprobs is not None
        # Schulman's estimator k3: unbiased, and never negative.
        log_ratio = reference_logprobs - logprobs
        values["kl"] = (log_ratio.exp() - log_ratio - 1) * (ratio if weight_kl else 1)
        losses = losses + beta * values["kl"]
    values |= statistics or {}
    # Sums over each sequence, in columns: 0 tokens, 1 losses, 2 "low", 3 "high", 4 and on "kl" and the statistics.
    sums = segment_sum(_columns(sequences, losses, **values), sequences, len(advantages), axes, gradients=gradients)
    total, lengths = sums.detach().sum(0), sums[:, 0].detach()
    means = {name: _ratio(total[i], total[0]) for i, name in enumerate(values, 2)}
    low_mean, high_mean = means.pop("low"), means.pop("high")
    # The fraction of clipped tokens in each sequence that has tokens.
    low_fractions, high_fractions = (sums[lengths > 0, i].detach() / lengths[lengths > 0] for i in (2, 3))
    zero = lengths.new_zeros(())
    metrics = {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/low_min": low_fractions.min() if len(low_fractions) else zero,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/high_max": high_fractions.max() if len(high_fractions) else zero,
        "clip_ratio/region_mean": low_mean + high_mean,
        **means,
    }
    return SequenceLoss(_normalize(sums[:, 1], lengths, normalize), metrics)


def policy_gradient_loss(
    logprobs: Tensor,
    sequences: Tensor,
    advantages: Tensor,
    axes: Axes = (),
    *,
    normalize: Normalization = 1.0,
    gradients: Reduction = "summed",
    statistics: Mapping[str, Tensor] | None = None,
) -> SequenceLoss:
    """Returns the loss of REINFORCE, whose gradient is minus that of the expected advantage: per token -A log pi.

    Arguments and errors as in `grpo_loss`. By default the mean over sequences of the sum over their tokens.

    Bytes sent: those of `segment_sum` of S sequences with 2 sums, and one for each of `statistics`.
    """
    losses = -logprobs * _per_label("advantages", advantages, sequences)
    token_statistics = dict(statistics or {})
    columns = _columns(sequences, losses, **token_statistics)
    sums = segment_sum(columns, sequences, len(advantages), axes, gradients=gradients)
    total = sums.detach().sum(0)
    metrics = {name: _ratio(total[i], total[0]) for i, name in enumerate(token_statistics, 2)}
    return SequenceLoss(_normalize(sums[:, 1], sums[:, 0].detach(), normalize), metrics)


def _per_label(name: str, per_sequence: Tensor, sequences: Tensor) -> Tensor:
    """Returns for each label the value of its sequence, from values [S]; 0 for labels of no sequence."""
    if per_sequence.ndim != 1 or not per_sequence.is_floating_point():
        raise ValueError(f"{name} must be floating-point [S]; got {per_sequence.dtype} {tuple(per_sequence.shape)}")
    # A zero at index S, for labels of no sequence: index -1 would read the last sequence's value.
    padded = F.pad(per_sequence.detach(), (0, 1)).to(sequences.device)
    return padded[sequences.long().where(sequences >= 0, len(per_sequence))]


def _columns(sequences: Tensor, trained: Tensor, **values: Tensor) -> Tensor:
    """Returns the per-token values to sum as columns [..., 2 + len(values)]: ones, `trained`, and detached `values`.

    Raises:
        ValueError: values of another shape than `sequences`.
    """
    for name, x in {"logprobs": trained, **values}.items():
        if x.shape != sequences.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be shaped as sequences {tuple(sequences.shape)}")
    ones = torch.ones_like(trained)
    return torch.stack([ones, trained, *(x.detach().to(trained.dtype) for x in values.values())], -1)


def _normalize(sums: Tensor, lengths: Tensor, normalize: Normalization) -> Tensor:
    """Returns the loss from each sequence's sum [S] of per-token losses and its number of tokens [S]."""
    if normalize == "sequence":
        return (sums / lengths.clamp(min=1)).mean()
    if normalize == "token":
        return sums.sum() / lengths.sum().clamp(min=1)
    if isinstance(normalize, str) or not normalize > 0:
        raise ValueError(f'normalize={normalize!r}: "sequence", "token" or a number above 0 is accepted')
    return sums.sum() / (len(sums) * normalize)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)  # 0 and not NaN without tokens


# -- sums over sequences -----------------------------------------------------------------------------------------------


def segment_sum(
    values: Tensor, sequences: Tensor, count: int, axes: Axes = (), *, gradients: Reduction = "summed"
) -> Tensor:
    """Returns the sums of each sequence over all ranks, [count] or [count, K], with the same bits on every rank.

    The result is one tensor of which each rank has a copy. Every rank calls backward with the same upstream gradient;
    the gradient of a value is that of its sequence (times a factor, see `gradients`), without communication.

    Args:
        values: floating-point [...] shaped as `sequences`, or [..., K] for K sums of each sequence, in one message.
        sequences: integers, the number of each value's sequence, numbered over all ranks of `axes`; negative for values
            of no sequence.
        count: number of sequences of all ranks.
        axes: see `Axes`.
        gradients: how gradients of parameters are reduced over these ranks after backward: "summed", by
            `sum_gradients`, or "averaged", by FSDP2 or DDP alone. "averaged" multiplies gradients by the number of
            ranks, so that their average is the sum.

    Bytes sent: 2 (R - 1) / R count K w for each axis of R ranks, with w = 4 (8 in float64); kind "all_reduce".

    Raises:
        ValueError: shapes or dtypes that do not match; a negative `count`; another `gradients`; a method whose axes are
            unknown. Raised before any communication.
        IndexError: a sequence number of `count` or more, on the CPU. On a GPU it is an assertion of torch's kernel.
    """
    check_tensor("values", values)
    check_tensor("sequences", sequences)
    count = integer("count", count, minimum=0)
    if gradients not in get_args(Reduction):
        raise ValueError(f"gradients={gradients!r}: accepted are {', '.join(get_args(Reduction))}")
    if sequences.is_floating_point() or values.shape[: sequences.ndim] != sequences.shape:
        raise ValueError(
            f"sequences must be integers shaped as values; got {sequences.dtype} {tuple(sequences.shape)} for values "
            f"{tuple(values.shape)}"
        )
    if values.ndim > sequences.ndim + 1 or not values.is_floating_point():
        raise ValueError(f"values {tuple(values.shape)} {values.dtype}: floating-point [...] or [..., K] is accepted")
    reduced_axes = list(method_axes(axes)) if isinstance(axes, Method) else [Axis.of(axis) for axis in axes]
    # Values of no sequence are added to row 0, which is dropped. Numbers out of range are left to index_put, because a
    # check here would wait for the GPU.
    rows = (sequences.flatten().long() + 1).clamp(min=0)
    flat = values.reshape(len(rows), *values.shape[sequences.ndim :])
    sums = flat.new_zeros((count + 1, *flat.shape[1:]), dtype=accumulation_dtype(values.dtype))
    sums = sums.index_put((rows,), flat.to(sums.dtype), accumulate=True)[1:]
    # The factor cancels the division by the number of ranks in the average of FSDP2 or DDP.
    factor = prod(axis.size for axis in reduced_axes) if gradients == "averaged" else 1
    return cast(Tensor, _SegmentSum.apply(sums, [axis for axis in reduced_axes if axis.size > 1], factor))


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[Axis], factor: int) -> Tensor:
        ctx.factor = factor
        return sum_over_axes(x.detach(), axes) if axes else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * ctx.factor, None, None


# -- labels of completions ---------------------------------------------------------------------------------------------


class CompletionLabels(NamedTuple):
    """The M labels that tokens of one rank predict. A label that is in several sequences is listed once for each.

    A sequence is a path from a root to a leaf, with a trained segment. Sequences are numbered in order of their leaves.
    """

    positions: Tensor
    """Integers [M] on the CPU: b T + t for the local token t of row b that predicts the label."""
    labels: Tensor
    """Integers [M] on the device of ids: the token ids to predict."""
    sequences: Tensor
    """Integers [M] on the device of ids: the number of the label's sequence."""
    sequence_count: int
    """Number of sequences of all rows."""


def completion_labels(
    ids: Tensor,
    mask: AttentionMask,
    layout: SequenceLayout | None = None,
    shard: int = 0,
    *,
    trained: Sequence[Sequence[bool]] | None = None,
) -> CompletionLabels:
    """Returns the labels of this rank's tokens, for `token_logprobs` and `segment_sum`.

    The last token of a prompt predicts the first token of each of its completions, so one position may have several
    labels. A prompt with a single completion is a tree of two segments. Padding is a tree of one segment.

    Args:
        ids: [B, N], whole rows.
        mask: `AttentionMask.tree`, or `rows` of them. A document is a tree of one segment, a root.
        layout: layout of the sequence over all ranks of the method; one shard by default.
        shard: this rank's shard of the layout.
        trained: for each row one boolean per segment, True if the segment's tokens are labels. By default True for all
            segments except roots.

    Raises:
        ValueError: ids that are not [B, N]; a mask without `segments`, or with another number of rows; a layout of
            another length; `trained` with another number of rows or segments.
    """
    check_tensor("ids", ids)
    if ids.ndim != 2:
        raise ValueError(f"ids {tuple(ids.shape)}: whole rows [B, N] are needed")
    rows, length = ids.shape
    layout = SequenceLayout.contiguous(length, 1) if layout is None else layout
    if layout.length != length:
        raise ValueError(f"layout={layout}: its length differs from that of ids, {length}")
    segments = mask.segments(length)
    if len(segments) not in (1, rows):
        raise ValueError(f"mask has {len(segments)} rows, ids have {rows}")
    segments = segments * rows if len(segments) == 1 else segments
    if trained is not None and len(trained) != rows:
        raise ValueError(f"trained has {len(trained)} rows, ids have {rows}")
    own_positions = layout.positions(shard).numpy()
    local_index = np.full(length, MISSING)  # of each position of a row; MISSING on other ranks
    local_index[own_positions] = np.arange(len(own_positions))
    entries, count = [np.empty((0, 3), dtype=np.int64)], 0
    for row, tree in enumerate(segments):
        is_trained = [parent != MISSING for parent in tree.parents] if trained is None else list(trained[row])
        if len(is_trained) != len(tree.parents):
            raise ValueError(f"trained[{row}] has {len(is_trained)} entries for {len(tree.parents)} segments")
        numbers = _sequence_numbers(tree, is_trained, count)
        count += len({number for segment_numbers in numbers for number in segment_numbers})
        for segment in (segment for segment, is_label in enumerate(is_trained) if is_label):
            tokens = np.arange(tree.ends[segment], tree.ends[segment + 1])
            predictors = tree.ancestors(tokens, 1)
            # A root's first token has no predictor, and another rank may have the token that predicts.
            is_local = (predictors != MISSING) & (local_index[predictors] != MISSING)
            tokens, predictors = tokens[is_local], predictors[is_local]
            # Indices over all rows: of the predicting token among local tokens, of the label in the flattened ids.
            columns = [row * len(own_positions) + local_index[predictors], row * length + tokens]
            entries += [np.stack([*columns, np.full(len(tokens), number)], 1) for number in numbers[segment]]
    table = torch.from_numpy(np.concatenate(entries))
    labels = ids.flatten()[table[:, 1].to(ids.device)].long()
    return CompletionLabels(table[:, 0], labels, table[:, 2].to(ids.device), count)


def _sequence_numbers(tree: Segments, trained: Sequence[bool], first: int) -> list[list[int]]:
    """Returns the numbers, from `first` on, of the sequences that contain each segment."""
    numbers: list[list[int]] = [[] for _ in tree.parents]
    leaves = sorted({*range(len(tree.parents))} - {*tree.parents})
    for leaf in leaves:
        path, segment = list[int](), leaf
        while segment != MISSING:
            path.append(segment)
            segment = tree.parents[segment]
        # Paths without a trained segment have no number.
        if any(trained[segment] for segment in path):
            for segment in path:
                numbers[segment].append(first)
            first += 1
    return numbers
