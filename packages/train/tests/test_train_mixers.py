"""Multi-head latent attention and layers with a state in the trainer: losses, exact resume, export, sizes."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from test_train_checkpoints import SMALL, resumed, trained
from training_runs import at, on_mesh

from armillary.models import LatentSizes, Llama, StateConfig, initialize
from armillary.train import Config, ModelConfig, ParallelConfig, SaveConfig, prepare, process_group
from armillary.train.config import model_config
from armillary.train.device import inputs_of
from armillary.train.internal import dry_run
from armillary.train.optimizer import build_optimizer, learning_rate

SIZES = {"dim": 32, "heads": 4, "hidden_dim": 48}
LATENT = ModelConfig(**SIZES, layers=2, latent_rank=12, latent_query_rank=16, latent_rotary_dim=4, latent_value_dim=6)
HYBRID = ModelConfig(**SIZES, layers=3, kv_heads=2, mixers=("delta_rule", "mamba2", "attention"), state_key_dim=4)


def test_sizes_of_latents_and_states_default_to_those_of_attention():
    sizes = LatentSizes(rank=12, query_rank=16, rotary_dim=4, key_dim=8, value_dim=6)
    assert model_config(LATENT, 17, 60).latent == sizes
    config = model_config(ModelConfig(latent_rank=24), 257, 60)
    assert config.latent == LatentSizes(rank=24, rotary_dim=8, key_dim=16, value_dim=16)
    assert (config.kv_heads, config.head_dim) == (8, 24) and model_config(ModelConfig(), 17, 60).latent is None

    hybrid = model_config(HYBRID, 17, 60)
    assert hybrid.states == StateConfig(heads=4, key_heads=2, key_dim=4, value_dim=8)
    assert model_config(replace(HYBRID, mixers=("attention",)), 17, 60).states is None


def test_a_dry_run_shows_latents_and_kernels_are_chosen_for_their_head_dims():
    config = replace(SMALL, model=LATENT)
    inputs = inputs_of(config, model_config(LATENT, 257, 60), torch.float32, torch.device("cpu"))
    assert (inputs.head_dim, inputs.value_dim) == (12, 6)
    shapes = dry_run(on_mesh(config, ring=2), 2).shapes
    assert (shapes["rotary keys"], shapes["latents"]) == ((2, 30, 4), (2, 30, 12)) and "keys, values" not in shapes
    assert shapes["queries"] == (2, 30, 4, 12)


@pytest.mark.parametrize(
    ("model", "ranks", "parallel"),
    [
        (LATENT, 1, ParallelConfig()),
        (HYBRID, 2, ParallelConfig(ring=2, ulysses=1, contiguous_states=True)),
    ],
    ids=["latents", "hybrid"],
)
def test_a_ring_trains_as_another_mesh_and_resumes_bit_identically(worlds, tmp_path: Path, model, ranks, parallel):
    ring = replace(SMALL, model=model, save=SaveConfig(every=2, keep_last=3, export=True))
    other = replace(ring, parallel=parallel, save=SaveConfig())
    expected = worlds(ranks).run(trained, at(other, tmp_path / "other"), 0)[0][0].losses
    first = worlds(2).run(trained, at(ring, tmp_path / "first"), 0)
    assert first[0][0].losses == pytest.approx(expected, abs=1e-5) and expected[-1] < expected[0] - 0.01
    second = resumed(worlds, 2, ring, tmp_path / "first", tmp_path / "second")
    for (summary, _, state, _), (resumed_summary, _, resumed_state, _) in zip(first, second, strict=True):
        assert resumed_summary.losses == summary.losses[4:]
        assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    exported = tmp_path / "second" / "export" / "step-6"
    config = model_config(model, 257, 60)
    assert Llama.from_pretrained(exported).config == config
    assert model_config(replace(model, pretrained=exported), 1, 60) == config


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


def test_fine_tuning_latents_gives_the_losses_of_transformers(worlds, tmp_path):
    pytest.importorskip("transformers")
    model = Llama(model_config(LATENT, 257, 60))
    initialize(model, seed=0)
    model.save_pretrained(tmp_path / "folder")
    tuned = replace(SMALL, model=ModelConfig(pretrained=tmp_path / "folder"), parallel=ParallelConfig())
    ((losses, expected),) = worlds(1).run(trained_by_both, at(tuned, tmp_path / "tuned", steps=3, accumulation=1))
    assert losses == pytest.approx(expected, abs=1e-5) and losses[-1] < losses[0] - 0.01
