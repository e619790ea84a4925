"""Models that the planner reads from Hugging Face folders."""

import json
from dataclasses import replace

import pytest
import torch

from armillary.models import GPTConfig, LatentSizes, LinearScaling, LlamaConfig, StateConfig
from armillary.models.hub.configs import FAMILIES
from armillary.models.internal import describe
from armillary.plan.arguments import model_of
from armillary.plan.memory.cli import MemoryOptions, plan_memory
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.search.trainer_config import trainer_config, write_choice
from armillary.train.cli import read_command

LLAMA = LlamaConfig(
    vocab_size=512, dim=128, layers=2, heads=8, kv_heads=4, hidden_dim=256, max_positions=4096, rope_theta=5e5
)
BIASES = {"qkv_bias": True, "out_bias": True}
MODELS = {
    "llama": replace(LLAMA, rope_scaling=LinearScaling(factor=2.0), mlp_bias=True, **BIASES),
    "mistral": replace(LLAMA, window=1024, head_dim=32),
    "qwen2": replace(LLAMA, qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=32),
    "armillary_hybrid": replace(
        LLAMA,
        mixers=("delta_rule", "attention"),
        states=StateConfig(heads=8, key_heads=4, key_dim=16, value_dim=16, conv_width=4),
    ),
    "youtu": replace(
        LLAMA, kv_heads=8, head_dim=0, latent=LatentSizes(rank=32, rotary_dim=8, key_dim=16, value_dim=16)
    ),
    "gpt2": GPTConfig(vocab_size=512, dim=128, layers=2, heads=8, max_positions=4096),
}
"""A small model of each family that `armillary.models.hub` reads."""


def write_folder(folder, kind: str):
    fields = describe(MODELS[kind], torch.bfloat16)
    assert fields["model_type"] == kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_folder_of_each_family_and_its_config_are_models(tmp_path):
    assert set(MODELS) == set(FAMILIES)
    for kind, model in MODELS.items():
        folder = write_folder(tmp_path / kind, kind)
        for name in (folder, folder / "config.json"):
            assert model_of(str(name), 1024) == model
    # Longer sequences extend RoPE.
    assert model_of(str(tmp_path / "qwen3"), 10_000).max_positions == 10_000


@pytest.mark.parametrize("kind", ["mistral", "gpt2", "youtu"])
def test_search_and_memory_take_a_folder_or_its_config(kind, tmp_path):
    folder = write_folder(tmp_path / kind, kind)
    (tmp_path / "pair.toml").write_text('like = "8xh100"\nranks_per_node = 2\n')
    cluster = str(tmp_path / "pair.toml")
    result = search(SearchOptions(model=str(folder), cluster=cluster, tokens="4Ki", attention=("ring",)))
    assert result.model == MODELS[kind] and result.fitting
    # The command trains this model: the trainer reads the same folder.
    config = trainer_config(result, result.fitting[0])
    assert config.model.pretrained == folder and config.data.sequence_length == 4096
    write_choice(result, tmp_path / "best.toml")
    assert read_command(["--config", str(tmp_path / "best.toml")])[0].run == config
    options = MemoryOptions(model=str(folder / "config.json"), cluster=cluster, tokens="4Ki", attention="ring")
    planned = plan_memory(options)
    assert planned.job.model == MODELS[kind] and planned.fits
