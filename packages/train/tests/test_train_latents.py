"""Multi-head latent attention in the trainer: equal losses on meshes, exact resume, export, and transformers' loss."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from test_train_checkpoints import SMALL, resumed, trained
from training_runs import at

from armillary.models import LatentSizes, Llama
from armillary.train import Config, ModelConfig, ParallelConfig, SaveConfig, prepare, process_group
from armillary.train.config import model_config
from armillary.train.device import inputs_of
from armillary.train.optimizer import build_optimizer, learning_rate
from armillary.train.parts import dry_run

MODEL = ModelConfig(
    dim=32,
    layers=2,
    heads=4,
    hidden_dim=48,
    latent_rank=12,
    latent_query_rank=16,
    latent_rotary_dim=4,
    latent_value_dim=6,
)
CONFIG = replace(SMALL, model=MODEL, save=SaveConfig(every=2, keep_last=3, export=True))
MESHES = {
    "upipe": {"ulysses": 2, "attention": "upipe", "heads_per_stage": 2},
    "ulysses": {"ulysses": 2},
    "tp": {"tp": 2},
}


def test_sizes_of_latents_have_defaults():
    assert model_config(MODEL, 17, 60).latent == LatentSizes(
        rank=12, query_rank=16, rotary_dim=4, key_dim=8, value_dim=6
    )
    config = model_config(ModelConfig(latent_rank=24), 257, 60)
    assert config.latent == LatentSizes(rank=24, rotary_dim=8, key_dim=16, value_dim=16)
    assert (config.kv_heads, config.head_dim) == (8, 24) and model_config(ModelConfig(), 17, 60).latent is None


def test_a_dry_run_shows_latents_and_kernels_are_chosen_for_their_head_dims():
    inputs = inputs_of(CONFIG, model_config(MODEL, 257, 60), torch.float32, torch.device("cpu"))
    assert (inputs.head_dim, inputs.value_dim) == (12, 6)
    shapes = dry_run(replace(CONFIG, parallel=ParallelConfig(ring=2, ulysses=1)), 2).shapes
    assert (shapes["rotary keys"], shapes["latents"]) == ((2, 30, 4), (2, 30, 12)) and "keys, values" not in shapes
    assert shapes["queries"] == (2, 30, 4, 12)


def losses_of(configs: list[Config]) -> list[list[float]]:
    return [trained(config, 0)[0].losses for config in configs]


def trained_by_both(config: Config) -> tuple[list[float], list[float]]:
    """Returns the losses of fine-tuning a folder by the trainer and, on the same rows, with transformers' model."""
    from transformers import AutoModelForCausalLM

    with redirect_stdout(StringIO()), process_group(config) as device:
        training, steps = prepare(config, device).training, config.train.steps
        batches = [next(training) for _ in range(steps)]
    model, losses = AutoModelForCausalLM.from_pretrained(config.model.pretrained), []
    optimizer = build_optimizer(model, config.optimizer)
    for step, batch in enumerate(batches, 1):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(step, steps, config.optimizer)
        logits = model(batch.tokens, position_ids=batch.positions).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return trained(config, 0)[0].losses, losses


def test_losses_on_every_mesh_are_those_of_one_rank_and_resuming_is_bit_identical(worlds, tmp_path: Path):
    alone = replace(CONFIG, parallel=ParallelConfig(), save=SaveConfig())
    ((expected,),) = worlds(1).run(losses_of, [at(alone, tmp_path / "one")])
    assert expected[-1] < expected[0] - 0.01
    # 1. Two ranks of each axis.
    configs = [
        at(replace(alone, parallel=ParallelConfig(**{"ring": 1, "ulysses": 1} | axes)), tmp_path / name)
        for name, axes in MESHES.items()
    ]
    for losses in worlds(2).run(losses_of, configs):
        assert losses == [pytest.approx(expected, abs=1e-5)] * len(configs)
    # 2. A ring, stopped and resumed.
    first = worlds(2).run(trained, at(CONFIG, tmp_path / "first"), 0)
    assert first[0][0].losses == pytest.approx(expected, abs=1e-5)
    second = resumed(worlds, 2, CONFIG, tmp_path / "first", tmp_path / "second")
    for (summary, _, state, _), (resumed_summary, _, resumed_state, _) in zip(first, second, strict=True):
        assert resumed_summary.losses == summary.losses[4:]
        assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    # 3. The export, on the next rows of data.
    exported = tmp_path / "second" / "export" / "step-6"
    model = Llama.from_pretrained(exported)
    assert model.config == model_config(replace(MODEL, pretrained=exported), 1, 60) == model_config(MODEL, 257, 60)
    pytest.importorskip("transformers")
    tuned = replace(alone, model=ModelConfig(pretrained=exported), train=replace(alone.train, steps=3, accumulation=1))
    ((losses, expected),) = worlds(1).run(trained_by_both, at(tuned, tmp_path / "tuned"))
    assert losses == pytest.approx(expected, abs=1e-5) and losses[-1] < losses[0] - 0.01
