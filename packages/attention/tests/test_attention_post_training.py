"""Losses of post-training, compared with their papers' formulas in float64, on one rank and on several."""

import pytest
import torch
import torch.distributed as dist

from armillary.attention import AttentionMask, Ring
from armillary.attention.internal import segment_sum
from armillary.attention.post_training import completion_labels, dpo_loss, grpo_loss, policy_gradient_loss
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh, relative_error

SEQUENCES, TOKENS = 6, 40
NAMES = ["dpo", "dpo, smoothed", "grpo", "grpo, tokens", "grpo, off-policy", "grpo, off-policy, weighted"]
NAMES += ["policy gradient"]


def values():
    """Log-probabilities, old and reference ones, entropies [2, 20], sequence numbers of tokens, advantages [S]."""
    draw = torch.Generator().manual_seed(0)
    logprobs, noise, other = (torch.randn(3, 2, TOKENS // 2, generator=draw, dtype=torch.float64) * 0.5).unbind()
    sequences = torch.randint(-1, SEQUENCES - 1, (2, TOKENS // 2), generator=draw)
    sequences[0, 3] = SEQUENCES - 1  # a sequence of one token, and one without any in test_empty_sequences
    advantages = torch.randn(SEQUENCES, generator=draw, dtype=torch.float64)
    return logprobs, logprobs + noise, logprobs + other, noise.abs(), sequences, advantages


def pairs():
    return torch.tensor([[0, 1], [4, 2], [3, 5]])


def by_formula(name, logprobs, old, reference, entropy, sequences, advantages):
    """Returns the loss and metrics by loops over sequences."""
    members = [sequences == s for s in range(SEQUENCES)]
    if name.startswith("dpo"):
        smoothing = 0.2 if "smoothed" in name else 0.0
        rewards = [0.1 * (logprobs[tokens].sum() - reference[tokens].sum()) for tokens in members]
        losses, margins = [], []
        for better, worse in pairs().tolist():
            margins.append(rewards[better] - rewards[worse])
            losses.append(
                -(1 - smoothing) * torch.sigmoid(margins[-1]).log() - smoothing * torch.sigmoid(-margins[-1]).log()
            )
        chosen, rejected = pairs().T.tolist()
        both = torch.stack([members[s] for s in chosen + rejected]).any(0)
        metrics = {
            "rewards/chosen": torch.stack([rewards[s] for s in chosen]).mean(),
            "rewards/rejected": torch.stack([rewards[s] for s in rejected]).mean(),
            "rewards/accuracies": (torch.stack(margins) > 0).double().mean(),
            "rewards/margins": torch.stack(margins).mean(),
            "logps/chosen": torch.stack([logprobs[members[s]].sum() for s in chosen]).mean(),
            "logps/rejected": torch.stack([logprobs[members[s]].sum() for s in rejected]).mean(),
            "entropy": entropy[both].mean(),
            "logits/chosen": entropy[torch.stack([members[s] for s in chosen]).any(0)].mean(),
            "logits/rejected": entropy[torch.stack([members[s] for s in rejected]).any(0)].mean(),
            "mean_token_accuracy": entropy[torch.stack([members[s] for s in chosen]).any(0)].mean(),
        }
        return torch.stack(losses).mean(), metrics
    per_sequence, every, low, high, kls = [], [], [], [], []
    for s, tokens in enumerate(members):
        pi, A = logprobs[tokens], advantages[s]
        if name == "policy gradient":
            per_sequence.append((-A * pi).sum())
            continue
        ratio = (pi - (old[tokens] if "off-policy" in name else pi.detach())).exp()
        clipped = torch.stack([ratio, torch.full_like(ratio, 0.8)]).amax(0).minimum(torch.full_like(ratio, 1.3))
        kl = (reference[tokens] - pi).exp() - (reference[tokens] - pi) - 1
        kl = kl * ratio if "weighted" in name else kl
        loss = -torch.minimum(ratio * A, clipped * A) + 0.04 * kl
        every.append(loss)
        per_sequence.append(loss.mean())
        low.append(((ratio < 0.8) & (A < 0)).double())
        high.append(((ratio > 1.3) & (A > 0)).double())
        kls.append(kl)
    counted = sequences >= 0
    if name == "policy gradient":
        return torch.stack(per_sequence).mean(), {"entropy": entropy[counted].mean()}
    metrics = {
        "clip_ratio/low_mean": torch.cat(low).mean(),
        "clip_ratio/low_min": min(ratio.mean() for ratio in low),
        "clip_ratio/high_mean": torch.cat(high).mean(),
        "clip_ratio/high_max": max(ratio.mean() for ratio in high),
        "clip_ratio/region_mean": torch.cat(low).mean() + torch.cat(high).mean(),
        "kl": torch.cat(kls).mean(),
        "entropy": entropy[counted].mean(),
    }
    return torch.cat(every).mean() if "tokens" in name else torch.stack(per_sequence).mean(), metrics


def loss_of(name, logprobs, old, reference, entropy, sequences, advantages, axes=(), **options):
    if name.startswith("dpo"):
        described = {"entropy": entropy, "logits": entropy, "mean_token_accuracy": entropy}
        smoothing = 0.2 if "smoothed" in name else 0.0
        return dpo_loss(
            logprobs, reference, sequences, pairs(), axes, label_smoothing=smoothing, statistics=described, **options
        )
    options |= {"statistics": {"entropy": entropy}}
    if name == "policy gradient":
        return policy_gradient_loss(logprobs, sequences, advantages, axes, **options)
    return grpo_loss(
        logprobs,
        sequences,
        advantages,
        axes,
        old_logprobs=old if "off-policy" in name else None,
        reference_logprobs=reference,
        clip=(0.2, 0.3),
        beta=0.04,
        weight_kl="weighted" in name,
        normalize="token" if "tokens" in name else "sequence",
        **options,
    )


def check(name, loss, metrics, gradient, factor=1.0):
    logprobs, *arguments = values()
    logprobs.requires_grad_()
    expected, expected_metrics = by_formula(name, logprobs, *arguments)
    assert relative_error(loss, expected) < 1e-13
    (full,) = torch.autograd.grad(expected, logprobs, torch.tensor(1 / 17.3).double())
    assert relative_error(gradient, factor * full) < 1e-13
    assert metrics.keys() == expected_metrics.keys()
    for key, metric in metrics.items():
        assert metric.item() == pytest.approx(expected_metrics[key].item(), rel=1e-12, abs=1e-15), key


@pytest.mark.parametrize("name", NAMES)
def test_losses_match_the_papers(name):
    logprobs, *arguments = values()
    loss, metrics = loss_of(name, logprobs.requires_grad_(), *arguments)
    (gradient,) = torch.autograd.grad(loss, logprobs, torch.tensor(1 / 17.3).double())
    check(name, loss, metrics, gradient)


def local_part(x, layout, shard):
    return layout.take(x, shard).clone()


def on_ranks():
    """Returns each loss on sharded tokens (usp, rows over data), its gradient by local tokens, and bytes."""
    actual = {}
    device_mesh = mesh(shard=2, ring=2, ulysses=1)
    ring = Ring(device_mesh["ring"])
    layout = SequenceLayout.zigzag(TOKENS // 2, 2)
    rows, axes = [dist.get_rank() // 2], [device_mesh["ring"], device_mesh["shard"]]
    for name in NAMES:
        *tokens, advantages = values()
        logprobs, *arguments = (local_part(x[rows], layout, ring.shard) for x in tokens)
        for gradients in ("summed", "averaged"):
            with CommLedger() as ledger:
                logprobs.requires_grad_()
                loss, metrics = loss_of(name, logprobs, *arguments, advantages, axes, gradients=gradients)
                (gradient,) = torch.autograd.grad(loss, logprobs, torch.tensor(1 / 17.3).double())
            actual[name, gradients] = loss.detach(), metrics, gradient, ledger.bytes()
    return rows, layout, ring.shard, actual


def test_ranks_equal_the_loss_metrics_and_gradients_of_one(worlds):
    ranks = worlds(4).run(on_ranks)
    columns = {"dpo": 6, "dpo, smoothed": 6, "policy gradient": 3}
    for name, gradients in ranks[0][3]:
        full = torch.zeros(2, TOKENS // 2, dtype=torch.float64)
        for rows, layout, shard, actual in ranks:
            for i, row in enumerate(rows):
                full[row, layout.positions(shard)] = actual[name, gradients][2][i]
        for *_, actual in ranks:
            loss, metrics, _, loss_bytes = actual[name, gradients]
            assert torch.equal(loss, ranks[0][3][name, gradients][0])
            check(name, loss, metrics, full, 4 if gradients == "averaged" else 1)
            # 2 (R - 1) / R S K w for each axis of 2 ranks
            assert loss_bytes == 2 * SEQUENCES * columns.get(name, 6) * 8


def test_sequence_without_tokens_has_no_effect():
    logprobs, _, _, _, sequences, advantages = values()
    sequences = sequences.masked_fill(sequences == 2, -1)
    loss, metrics = grpo_loss(logprobs.requires_grad_(), sequences, advantages)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite() and gradient.isfinite().all() and all(metric.isfinite() for metric in metrics.values())
    nothing = torch.full_like(sequences, -1)
    loss, metrics = grpo_loss(logprobs, nothing, advantages)
    assert loss == 0 and all(metric == 0 for metric in metrics.values())


def test_sums_of_low_precision_are_float32():
    values = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    sums = segment_sum(values, torch.zeros(1, 4096, dtype=torch.long), 1)
    assert sums.dtype == torch.float32 and sums.item() == 4096


def test_a_sequence_beyond_the_count_is_refused():
    with pytest.raises(IndexError):
        segment_sum(torch.ones(3), torch.tensor([0, 1, 2]), 2)


def test_completions_of_a_tree_are_labels_of_separate_sequences():
    ids = torch.arange(100, 112).repeat(2, 1)
    ids[1] += 20
    # Row 0: a prompt of 3, a prefix of 2 shared by two sequences, another completion of 3, padding.
    tree = AttentionMask.tree((0, 3, 5, 7, 8, 11, 12), (-1, 0, 1, 1, 0, -1))
    packed = AttentionMask.tree((0, 4, 6, 7, 12), (-1, 0, -1, 2))  # two packed rows, each a prompt and its completion
    mask = AttentionMask.rows([tree, packed])
    layout = SequenceLayout.zigzag(12, 2)
    actual = []
    for shard in range(2):
        positions, labels, sequences, sequence_count = completion_labels(ids, mask, layout, shard)
        assert sequence_count == 5
        at = layout.positions(shard)
        rows, places = positions // len(at), positions % len(at)
        actual += zip(rows.tolist(), at[places].tolist(), labels.tolist(), sequences.tolist(), strict=True)
    expected = [
        (0, 2, 103, 0), (0, 2, 103, 1), (0, 3, 104, 0), (0, 3, 104, 1), (0, 4, 105, 0), (0, 5, 106, 0),
        (0, 4, 107, 1), (0, 2, 108, 2), (0, 8, 109, 2), (0, 9, 110, 2),
        (1, 3, 124, 3), (1, 4, 125, 3), (1, 6, 127, 4), (1, 7, 128, 4), (1, 8, 129, 4), (1, 9, 130, 4), (1, 10, 131, 4),
    ]  # fmt: skip
    assert sorted(actual) == sorted(expected)
    trained = completion_labels(ids, mask, trained=[[True, False, True, False, False, False], [False] * 4])
    assert trained.sequence_count == 3
    assert sorted(trained.labels[trained.sequences == 0].tolist()) == [101, 102, 105, 106]
    assert sorted(trained.labels[trained.sequences == 2].tolist()) == [101, 102]
