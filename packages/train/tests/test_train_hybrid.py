"""A hybrid in the trainer: training, exact resume, export and text generation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_checkpoints import SMALL, at, resumed, trained

from armillary.models import Llama, LlamaConfig, StateConfig
from armillary.train import ModelConfig, ParallelConfig, SaveConfig, recipes
from armillary.train.config import model_config

MODEL = ModelConfig(
    dim=32, layers=3, heads=4, kv_heads=2, hidden_dim=48, mixers=("delta_rule", "mamba2", "attention"), state_key_dim=4
)
CONFIG = replace(
    SMALL,
    model=MODEL,
    parallel=ParallelConfig(ring=2, ulysses=1),
    save=SaveConfig(every=2, keep_last=3, export=True),
)


def test_state_sizes_default_to_those_of_attention():
    config = model_config(MODEL, 17, 60)
    assert config.mixers == MODEL.mixers
    assert config.states == StateConfig(heads=4, key_heads=2, key_dim=4, value_dim=8)
    assert model_config(replace(MODEL, mixers=("attention",)), 17, 60).states is None


def test_resuming_a_hybrid_is_bit_identical(worlds, tmp_path: Path):
    first = worlds(2).run(trained, at(CONFIG, tmp_path / "first"), 0)
    second = resumed(worlds, 2, CONFIG, tmp_path / "first", tmp_path / "second")
    for (summary, _, state, _), (resumed_summary, _, resumed_state, _) in zip(first, second, strict=True):
        assert resumed_summary.losses == summary.losses[4:]
        assert summary.losses[-1] < summary.losses[0]
        assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    model = Llama.from_pretrained(tmp_path / "second" / "export" / "step-6")
    assert isinstance(model.config, LlamaConfig) and model.config.mixers == MODEL.mixers


def test_the_recipe_lowers_the_loss(worlds, tmp_path: Path):
    recipe = recipes.hybrid()
    validation = replace(recipe.validation, every=15, batches=1)
    config = replace(recipe, validation=validation, log=SMALL.log, data=replace(SMALL.data, sequence_length=128))
    summaries = worlds(2).run(trained, at(config, tmp_path, steps=15, device="cpu"), 0)
    assert summaries[0][0].losses[-1] < 0.9 * summaries[0][0].losses[0]


def test_contiguous_states_train_equally(worlds, tmp_path: Path):
    relaid = replace(CONFIG, parallel=replace(CONFIG.parallel, contiguous_states=True), save=SMALL.save)
    losses = [
        worlds(2).run(trained, at(config, tmp_path / name, steps=3), 0)[0][0].losses
        for name, config in (("same", replace(CONFIG, save=relaid.save)), ("relaid", relaid))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
