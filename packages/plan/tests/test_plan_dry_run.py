"""`armillary-plan run`: memory and time of a training run; and all recipes on their machines, by formulas."""

import json
from dataclasses import replace

import pytest
import torch
from test_plan_memory_command import by_formulas

from armillary.models import Llama, LlamaConfig
from armillary.plan.arguments import cluster_of
from armillary.plan.cli import main
from armillary.plan.memory import Job, estimate
from armillary.plan.memory.room import Room
from armillary.plan.trainer_run import job_of, predict, time_of
from armillary.train import Config, ModelConfig, ParallelConfig, recipes
from armillary.train.config import model_config
from armillary.train.internal import dry_run

# As in the recipes' docstrings.
MACHINES = {
    "llama3_8b_128k": "8xh100",
    "llama3_8b_1m": "8xh100",
    "llama3_8b_5m": "8xh100",
    "llama3_70b_128k": "32xh100",
    "gpt_wallfacer_3b": "8xh100",
    "gpt_wallfacer_7b": "8xh100",
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_recipe_fits_its_machines_by_formulas(name):
    config = getattr(recipes, name)()
    cluster = cluster_of(MACHINES[name])
    run = dry_run(config, cluster.ranks)
    job = job_of(config, run.axes, run.model, torch.bfloat16)
    assert Room.of(cluster).share(estimate(job)) < 0.97
    assert time_of(config, job, cluster).seconds < 15 * config.train.timeout_minutes


def test_the_finetuning_recipe_fits_its_machines_with_an_8b(tmp_path):
    small = replace(LlamaConfig.llama31_8b(), layers=1, vocab_size=8, hidden_dim=8)
    Llama(small).save_pretrained(tmp_path, dtype=torch.bfloat16)  # for its config.json
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"num_hidden_layers": 32, "vocab_size": 128_256, "intermediate_size": 14_336}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").unlink()  # config.json is enough
    config = recipes.finetune(tmp_path)
    cluster, run = cluster_of("8xh100"), dry_run(config, 8)
    memory = estimate(job_of(config, run.axes, run.model, torch.bfloat16))
    assert Room.of(cluster).share(memory) < 0.97 and memory.host == 0


def printed(capsys, *flags: str) -> str:
    main(["run", *flags])
    return capsys.readouterr().out


DEBUG = ["--model.vocab-size", "257", "--model.layers", "1"]


def test_the_command_prints_mesh_shapes_memory_and_time(capsys):
    output = printed(capsys, *DEBUG, "--cluster", "8xh100", "--train.timeout-minutes", "1e-9")
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert rows[0].endswith(" parameters, bfloat16, on 8 x H100 80 GB")
    assert rows[1] == "mesh: replicate 1 x shard 1 x ring 4 x ulysses 2 x tp 1 = 8 ranks"
    assert "tokens 4 x 128" in rows and "room 74.10 221.19" in rows
    assert rows[-3].startswith("an upper bound: ")
    assert rows[-4].startswith("memory: fits, by simulation: the device's memory is ")
    assert " by its communication plan, an MFU of " in rows[-2]
    assert rows[-1].startswith("longer than --train.timeout-minutes (")


def test_the_command_prints_json(capsys):
    axes = {"replicate": 2, "shard": 2, "tp": 2}
    flags = [word for axis, size in axes.items() for word in (f"--parallel.{axis}", str(size))]
    output = json.loads(printed(capsys, *DEBUG, *flags, "--cluster", "16xa100-40", "--json"))
    assert output["run"]["axes"] == {**axes, "ring": 2, "ulysses": 1}
    assert output["fits"] and output["cluster"]["name"] == "16 x A100 40 GB" and output["time"]["tensor"] > 0
    seconds = sum(output["time"].values())
    assert output["mfu"] == pytest.approx(output["run"]["flops"] / (16 * 312e12 * seconds))


def test_accumulation_adds_gradients_and_zero_stage_1_sends_parameters_once_per_step():
    parallel = ParallelConfig(ring=8, ulysses=1, zero_stage=2)
    config = Config(model=ModelConfig(vocab_size=257, layers=1), parallel=parallel)
    one = predict(config, "8xh100")
    rows, accumulating = replace(config.data, global_batch_size=8), replace(config.train, accumulation=2)
    two = replace(config, data=rows, train=accumulating)
    unsharded, sharded = (
        predict(replace(two, parallel=replace(parallel, zero_stage=stage)), "8xh100") for stage in (1, 2)
    )
    assert one.time.tensor == 0
    assert sharded.memory.device == one.memory.device + 4 * one.run.local_parameters
    assert sharded.time.seconds == pytest.approx(2 * one.time.seconds - one.time.optimizer)
    assert 2 * unsharded.time.parameters == pytest.approx(sharded.time.parameters)
    total = 4 * 8 * sharded.run.local_parameters
    assert unsharded.memory.device_breakdown["gradients"] > 0.99 * total
    assert sharded.memory.device_breakdown["gradients"] < 0.5 * total


def test_hybrids_are_predicted_by_simulation_and_plan(monkeypatch, capsys):
    simulated = list[tuple[Job, int]]()

    def recorded(job, progress=None):
        memory = by_formulas(job, progress)
        simulated.append((job, memory.device))
        return memory

    monkeypatch.setattr("armillary.plan.trainer_run.simulate", recorded)
    flags = "--recipe hybrid --cluster 8xh100 --parallel.ring 8 --parallel.ulysses 1 --data.sequence-length 64 --json"
    hybrid_flags = ["--model.layers", "2", "--model.mixers", "mamba2", "attention"]
    output = json.loads(printed(capsys, *flags.split(), *hybrid_flags))
    recipe, data = recipes.hybrid(), replace(recipes.hybrid().data, sequence_length=64)
    model = replace(recipe.model, layers=2, mixers=("mamba2", "attention"))
    config = replace(recipe, model=model, data=data, parallel=ParallelConfig(ring=8, ulysses=1))
    run, cluster = dry_run(config, 8), cluster_of("8xh100")
    job = job_of(config, run.axes, run.model, torch.bfloat16)
    assert simulated == [(job, output["memory"]["device"])] and output["fits"]
    assert isinstance(job.model, LlamaConfig)
    blocks = sum(count * job.model.block_parameters(mixer) for mixer, count in job.model.mixer_counts().items())
    products = 6 * blocks * job.rows * job.length / 8 / (cluster.accelerator.flops * cluster.accelerator.matmul)
    assert output["time"]["dense"] == pytest.approx(products, rel=1e-6)


def hybrid_time(length: int, layers: int, policy: str = "layer"):
    recipe = recipes.hybrid()
    model = replace(recipe.model, vocab_size=257, mixers=("mamba2",), layers=layers)
    config = replace(
        recipe,
        model=model,
        data=replace(recipe.data, sequence_length=length, global_batch_size=8),
        checkpointing=replace(recipe.checkpointing, policy=policy),
    )
    axes = {"replicate": 1, "shard": 1, "ring": 8, "ulysses": 1, "tp": 1}
    return time_of(config, job_of(config, axes, model_config(model, 257, length), torch.bfloat16), cluster_of("8xh100"))


def test_states_are_exchanged_by_layer_and_policy_not_by_length():
    short, long, deep = (hybrid_time(length, layers) for length, layers in ((1024, 2), (8192, 2), (1024, 4)))
    assert short.exchange == pytest.approx(long.exchange) and short.exchange > 0
    assert deep.exchange == pytest.approx(2 * short.exchange)
    assert long.attention == pytest.approx(8 * short.attention)  # the recurrence is linear in tokens
    assert hybrid_time(1024, 2, "none").exchange < short.exchange  # recomputed blocks exchange states once more
    assert hybrid_time(1024, 2, "attention_output").exchange == pytest.approx(short.exchange)
