"""armillary's post-training losses compared with TRL's on one rank: loss, metrics and gradients of a tiny model."""

from collections import defaultdict

import pytest
import torch
from test_integrations_trl import VOCABULARY, folder, trainer

from armillary.attention import ContextParallel
from armillary.attention.post_training import dpo_loss, grpo_loss
from armillary.core.testing import mesh, relative_error
from armillary.integrations.testing import accelerated

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

__all__ = ["folder"]  # a fixture
PROMPT, N, ROWS = 7, 22, 4
LENGTHS = [15, 9, 12, 4]
"""Tokens of each row's completion."""


def inputs():
    """ids [B, N] padded on the right, the mask of completions, and per-token old and reference log-probabilities."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (ROWS, N), generator=draw)
    places = torch.arange(N)
    completions = torch.stack([(places >= PROMPT) & (places < PROMPT + length) for length in LENGTHS])
    visible = torch.stack([places < PROMPT + length for length in LENGTHS])
    old, reference = (torch.randn(2, ROWS, N, generator=draw).double() * 0.5 - 3.5).unbind()
    advantages = torch.tensor([0.8, -1.2, 0.5, -0.4])
    return ids.where(visible, 0), visible.long(), completions, old, reference, advantages


def trl_results(folder, output, kind):
    """Returns TRL's loss, metrics and gradients."""
    ids, visible, completions, old, reference, advantages = inputs()
    with accelerated():
        if kind == "grpo":
            run = trainer(trl.GRPOTrainer, folder, output, "sdpa", beta=0.1, epsilon_high=0.3, loss_type="grpo")
            batch = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": visible[:, :PROMPT], "advantages": advantages}
            batch |= {"completion_ids": ids[:, PROMPT:], "completion_mask": visible[:, PROMPT:]}
            batch |= {"old_per_token_logps": old[:, PROMPT:].float()}
            batch |= {"ref_per_token_logps": reference[:, PROMPT:].float()}
            run.current_gradient_accumulation_steps = 1
            run.model.train()
            loss = run._compute_loss(run.model, batch)
        else:
            run = trainer(trl.DPOTrainer, folder, output, "sdpa")
            batch = {"input_ids": ids, "attention_mask": visible, "completion_mask": completions.long()}
            run.model.train()
            loss = run._compute_loss(run.model, batch, False)
        loss.backward()
    metrics = {name: values[-1] for name, values in run._metrics["train"].items()}
    return loss.detach(), metrics, [p.grad for p in run.model.parameters()]


def load(folder, cp, shift: float = 0.0):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.add_(model.lm_head.weight.roll(1, 0), alpha=shift)
    return cp.prepare(model)


def on_ranks(folder):
    """Returns loss, metrics and gradients of armillary's losses on this rank's shard."""
    cp = ContextParallel("ring", mesh(ring=2))
    ids, visible, completions, old, reference, advantages = inputs()
    # The label of a token is the next token if that belongs to a completion.
    shifted = ids.where(completions, -100).roll(-1, 1)
    shifted[:, -1] = -100
    results = {}
    for kind in ("grpo", "dpo"):
        model = load(folder, cp)

        def scores(of, with_gradients=True):
            with (
                cp.shard(ids, attention_mask=visible, shift_labels=shifted) as batch,
                torch.set_grad_enabled(with_gradients),
            ):
                logits = of(input_ids=batch.ids, position_ids=batch.position_ids, **masked(batch)).logits
            return batch, logits, logits.log_softmax(-1)

        batch, logits, distribution = scores(model)
        labels = batch.labels
        chosen = distribution.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        rows = torch.arange(ROWS)[:, None].expand_as(labels).where(labels != -100, -1)
        described = {"entropy": -(distribution.exp() * distribution).sum(-1)}
        place = shifted_shard(batch, cp)
        if kind == "grpo":
            loss, metrics = grpo_loss(
                chosen,
                rows,
                advantages.double(),
                cp.axes,
                old_logprobs=place(old),
                reference_logprobs=place(reference),
                clip=(0.2, 0.3),
                beta=0.1,
                weight_kl=True,
                gradients="averaged",
                statistics=described,
            )
        else:
            _, _, other = scores(load(folder, cp, 0.1), with_gradients=False)
            reference_logprobs = other.gather(2, labels.clamp(min=0)[..., None])[..., 0]
            described |= {"logits": logits.mean(-1), "mean_token_accuracy": (logits.argmax(-1) == labels).double()}
            pairs = torch.tensor([[0, 2], [1, 3]])  # TRL orders the chosen rows first
            loss, metrics = dpo_loss(
                chosen, reference_logprobs, rows, pairs, cp.axes, beta=0.5, gradients="averaged", statistics=described
            )
        loss.backward()
        cp.reduce_gradients(model)
        results[kind] = loss.detach(), metrics, [p.grad for p in model.parameters()]
    return results


def masked(batch):
    return {} if batch.inputs.get("attention_mask") is None else {"attention_mask": batch.inputs["attention_mask"]}


def shifted_shard(batch, cp):
    """Returns a function that shifts values of tokens [B, N] to their predicting tokens and takes the local shard."""
    return lambda x: batch.layout.take(x.roll(-1, 1), cp.method.shard)


def test_losses_metrics_and_gradients_equal_trl(worlds, folder, tmp_path):
    results = worlds(2).run(on_ranks, folder)
    for kind in ("grpo", "dpo"):
        loss, metrics, gradients = trl_results(folder, tmp_path / kind, kind)
        metrics = defaultdict(float, metrics)
        for rank in results:
            local_loss, local_metrics, local_gradients = rank[kind]
            # TRL sums log-probabilities of about -60 in float32, and DPO subtracts the sums.
            assert local_loss.item() == pytest.approx(loss.item(), rel=2e-6, abs=5e-6)
            for key, value in local_metrics.items():
                assert value.item() == pytest.approx(metrics[key], rel=2e-6, abs=5e-6), key
            assert max(relative_error(a, b) for a, b in zip(local_gradients, gradients, strict=True)) < 5e-6
    expected = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    assert expected <= results[0]["grpo"][1].keys()
