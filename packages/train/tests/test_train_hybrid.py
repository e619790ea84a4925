"""A hybrid in the trainer: training, exact resume and export."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_checkpoints import SMALL, resumed, trained
from training_runs import at

from armillary.models import Llama, LlamaConfig, StateConfig
from armillary.train import ModelConfig, SaveConfig
from armillary.train.config import model_config

MODEL = ModelConfig(
    dim=32, layers=3, heads=4, kv_heads=2, hidden_dim=48, mixers=("delta_rule", "mamba2", "attention"), state_key_dim=4
)
CONFIG = replace(SMALL, model=MODEL, save=SaveConfig(every=2, keep_last=3, export=True))


def test_state_sizes_default_to_those_of_attention():
    config = model_config(MODEL, 17, 60)
    assert config.mixers == MODEL.mixers
    assert config.states == StateConfig(heads=4, key_heads=2, key_dim=4, value_dim=8)
    assert model_config(replace(MODEL, mixers=("attention",)), 17, 60).states is None


def test_resuming_a_hybrid_is_bit_identical_and_contiguous_states_train_equally(worlds, tmp_path: Path):
    first = worlds(2).run(trained, at(CONFIG, tmp_path / "first"), 0)
    second = resumed(worlds, 2, CONFIG, tmp_path / "first", tmp_path / "second")
    for (summary, _, state, _), (resumed_summary, _, resumed_state, _) in zip(first, second, strict=True):
        assert resumed_summary.losses == summary.losses[4:]
        assert summary.losses[-1] < summary.losses[0]
        assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    model = Llama.from_pretrained(tmp_path / "second" / "export" / "step-6")
    assert isinstance(model.config, LlamaConfig) and model.config.mixers == MODEL.mixers
    relaid = replace(CONFIG, parallel=replace(CONFIG.parallel, contiguous_states=True), save=SaveConfig())
    losses = worlds(2).run(trained, at(relaid, tmp_path / "relaid"), 0)[0][0].losses
    assert losses == pytest.approx(first[0][0].losses, rel=1e-4)
