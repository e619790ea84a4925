"""Losses of post-training: DPO (arXiv 2305.18290), GRPO (arXiv 2402.03300) and policy gradient.

Each rank passes the log-probabilities of its labels, and for each label the index of its sequence. One all-reduce per
loss and axis sums the values of each sequence over ranks, so loss and metrics are equal on all ranks.

Letters: M labels on this rank, S sequences of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention.post_training.segment_sum import Axes, Reduction, segment_sum

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
    if (
        pairs.ndim != 2
        or pairs.shape[1] != 2
        or not len(pairs)
        or pairs.is_floating_point()
        or pairs.dtype is torch.bool
    ):
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

    Args:
        trained: log-probabilities, or losses computed from them: the only column with a gradient.

    Raises:
        ValueError: values of another shape than `sequences`.
    """
    for name, x in {"logprobs": trained, **values}.items():
        if x.shape != sequences.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be shaped as sequences {tuple(sequences.shape)}")
    ones = torch.ones_like(trained)
    return torch.stack([ones, trained, *(x.detach().to(trained.dtype) for x in values.values())], -1)


def _normalize(sums: Tensor, lengths: Tensor, normalize: Normalization) -> Tensor:
    """Returns the loss, given each sequence's sum [S] of per-token losses and its number of tokens [S].

    Raises:
        ValueError: `normalize` is neither "sequence", "token" nor a number above 0.
    """
    if normalize == "sequence":
        return (sums / lengths.clamp(min=1)).mean()
    if normalize == "token":
        return sums.sum() / lengths.sum().clamp(min=1)
    if isinstance(normalize, str) or not normalize > 0:
        raise ValueError(f'normalize={normalize!r}: "sequence", "token" or a number above 0 is accepted')
    return sums.sum() / (len(sums) * normalize)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)  # 0 and not NaN without tokens
