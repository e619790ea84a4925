"""Models that the planner reads from Hugging Face folders, and the changes with which a step would fit."""

import json
import re
from dataclasses import replace

import pytest
import torch

from armillary.models import Checkpointing, GPTConfig, LinearScaling, LlamaConfig, StateConfig
from armillary.models.hub.configs import FAMILIES
from armillary.models.parts import describe
from armillary.plan.arguments import cluster_of, model_of
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice, Job, estimate
from armillary.plan.memory.cli import MemoryOptions, plan_memory
from armillary.plan.memory.room import Room, fewer_tokens, fitting_method, fitting_policy
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
    "gpt2": GPTConfig(vocab_size=512, dim=128, layers=2, heads=8, max_positions=4096),
}
"""A small model of each family that `armillary.models.hub` reads."""


def write_folder(folder, kind: str):
    fields = describe(MODELS[kind], torch.bfloat16)
    assert fields["model_type"] == kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_every_family_of_the_hub_has_a_model():
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_and_its_config_are_models(kind, tmp_path):
    folder = write_folder(tmp_path / kind, kind)
    for name in (folder, folder / "config.json"):
        assert model_of(str(name), 1024) == MODELS[kind]


SLOW = "armillary_hybrid"  # the search simulates layers with a state


@pytest.mark.parametrize("kind", [*sorted({*MODELS} - {SLOW}), pytest.param(SLOW, marks=pytest.mark.long)])
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


def test_longer_sequences_extend_rope(tmp_path):
    assert model_of(str(write_folder(tmp_path / "qwen3", "qwen3")), 10_000).max_positions == 10_000


# -- steps that do not fit --------------------------------------------------------------------------------------------

CLUSTER = cluster_of("8xh100")
ROOM = Room.of(CLUSTER)
JOB = Job(
    model=model_of("llama3-8b", 1 << 20),
    axes={"shard": 1, "ring": 8, "ulysses": 1},
    attention=AttentionChoice("ring"),
    length=1 << 20,
)


def share(job: Job) -> float:
    return ROOM.share(estimate(job))


def test_the_nearest_policy_is_the_fastest_that_fits():
    assert share(JOB) > 1
    changed = fitting_policy(JOB, ROOM)
    assert changed is not None and share(changed) <= 1
    assert replace(changed, checkpointing=JOB.checkpointing) == JOB
    # Policies that need more memory do not fit.
    assert changed.checkpointing.policy == "attention_output" and share(replace(JOB, on_host=True)) > 1
    # The optimizer moves to the host only if no policy suffices where it is.
    large = replace(JOB, model=model_of("llama3-70b", 1 << 15), length=1 << 15)
    moved = fitting_policy(large, ROOM)
    assert moved is not None and moved.on_host and share(moved) <= 1


def test_the_nearest_method_keeps_ranks_and_policy():
    job = replace(JOB, length=6 << 20, checkpointing=Checkpointing("layer", offload=True, prefetch=False), on_host=True)
    assert share(job) > 1
    changed = fitting_method(job, ROOM)
    assert changed is not None and share(changed) <= 1
    assert changed.attention != job.attention and changed.checkpointing == job.checkpointing
    assert changed.axes["ring"] * changed.axes["ulysses"] == 8


def test_fewer_tokens_are_the_most_that_fit():
    length = fewer_tokens(JOB, CLUSTER, ROOM)
    assert length is not None and share(replace(JOB, length=length)) <= 1 < share(replace(JOB, length=length + 8192))
    assert fewer_tokens(JOB, CLUSTER, Room(1, 1)) is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("search --model llama3-70b --tokens 4M --attention ring", ("tokens",)),
        ("search --tokens 6M --attention ring", ("upipe", "tokens")),
        ("memory --tokens 64M", ("tokens",)),
        ("run --recipe llama3_8b_128k --data.sequence-length 64M", ("tokens",)),
    ],
)
def test_commands_name_what_fits(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*argv.split(), "--cluster", "8xh100"])
    output = "".join(capsys.readouterr())
    (advice,) = re.findall(r"it fits with (.*); by formulas [\d,]+ accelerators .*suffice", output)
    assert stop.value.code == 1 and [word for word in words if word not in advice] == []
