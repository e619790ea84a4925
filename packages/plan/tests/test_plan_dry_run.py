"""Dry runs, and every recipe on ranks that do not exist: sharded, a step on fake tensors, and memory that fits."""

import json
from dataclasses import replace

import pytest
import torch

from armillary.models import Llama, LlamaConfig
from armillary.plan.dry_run import job_of, predict
from armillary.plan.memory import simulate
from armillary.plan.memory.estimate import estimate
from armillary.train import Config, ModelConfig, ParallelConfig, recipes
from armillary.train.cli import main

# Of the planner's clusters, the machines in the recipes' docstrings.
MACHINES = {
    "debug": (4, None),
    "llama3_8b_128k": (8, "8xh100"),
    "llama3_8b_1m": (8, "8xh100"),
    "llama3_8b_5m": (8, "8xh100"),
    "llama3_70b_128k": (32, "32xh100"),
    "gpt_wallfacer_3b": (8, "8xh100"),
    "gpt_wallfacer_7b": (8, "8xh100"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_recipe_shards_takes_a_fake_step_and_fits_its_machines(name):
    ranks, cluster = MACHINES[name]
    config = getattr(recipes, name)()
    found = predict(config, ranks if cluster is None else None, cluster)  # the whole model, sharded
    assert abs(found.local_parameters * ranks / found.parameters - 1) < 0.02
    # Blocks are all alike: two of them have every shape there is, and what formulas lack for them they lack for all.
    job = job_of(config, found.axes, replace(found.model, layers=2), torch.bfloat16)
    simulated, closed = simulate(job), estimate(job)
    lacking = simulated.device / closed.device
    # Where autograd keeps all that it wants, it is other things on the CPU than on CUDA, which the formulas are of.
    assert 0.97 < lacking < (1.4 if config.checkpointing.policy == "none" else 1.03)
    assert closed.host == pytest.approx(simulated.host, rel=0.03)
    assert found.seconds is None or found.seconds < found.limit / 4
    assert found.fits is (None if cluster is None else True)
    assert found.room is None or found.memory.device * lacking < found.room.device


def test_the_finetuning_recipe_fits_its_machines_with_an_8b(tmp_path):
    model = Llama(replace(LlamaConfig.llama31_8b(), layers=1, vocab_size=8, hidden_dim=8))
    model.save_pretrained(tmp_path, dtype=torch.bfloat16)  # for its config.json
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"num_hidden_layers": 32, "vocab_size": 128_256, "intermediate_size": 14_336}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = predict(recipes.finetune(tmp_path), cluster="8xh100")
    assert found.model.parameters() == LlamaConfig.llama3_8b().parameters() and found.model.max_positions == 131_072
    assert found.axes == {"replicate": 1, "shard": 1, "ring": 4, "ulysses": 2, "tp": 1}
    assert found.fits and found.memory.host == 0


def said(capsys, *flags: str) -> str:
    main(["--dry-run", *flags])
    return capsys.readouterr().out


def test_a_dry_run_tells_mesh_shapes_memory_and_time(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = said(capsys, "--recipe", "llama3_8b_128k", "--model.layers", "2")
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert rows[0] == "LLaMA, 1,486,901,248 parameters, bfloat16, on 8 x H100 80 GB"
    assert rows[1] == "mesh: replicate 1 x shard 1 x ring 1 x ulysses 8 x tp 1 = 8 ranks"
    for row in (
        "tokens 1 x 16,384",
        "queries 1 x 16,384 x 32 x 128",
        "keys in attention 1 x 131,072 x 1 x 128",
        "model.layers.*.mlp.down_proj.weight 2 4,096 x 14,336 512 x 14,336",
        "all 1,486,901,248 185,862,656",
        "room 74.10 221.19",
    ):
        assert row in rows
    # 1,048,576 tokens, flops_per_token of each, on 8 x 989 TFLOP/s at 40%.
    seconds = 1_048_576 * replace(LlamaConfig.llama31_8b(), layers=2).flops_per_token(131_072) / (8 * 989e12 * 0.4)
    assert rows[-1].endswith(f"{seconds:.3g} s at an assumed MFU of 40%")
    assert rows[-2].startswith("memory: fits, by closed formulas: the device's memory is ")
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_a_dry_run_for_machines_is_json(capsys):
    flags = ["--model.vocab-size", "257", "--parallel.shard", "4", "--cluster", "16xa100-40", "--mfu", "0.5", "--json"]
    found = json.loads(said(capsys, *flags))
    assert found["axes"] == {"replicate": 1, "shard": 4, "ring": 2, "ulysses": 2, "tp": 1}
    assert found["fits"] and found["cluster"]["name"] == "16 x A100 40 GB"
    assert found["memory"]["device"] == sum(found["memory"]["device_breakdown"].values()) > 0
    assert found["shapes"]["tokens"] == [1, 256]
    assert found["seconds"] == pytest.approx(found["flops"] / (16 * 312e12 * 0.5))
    assert found["parameters"] == LlamaConfig.debug().parameters()


def test_what_is_not_known_is_not_told(capsys):
    small = ["--model.vocab-size", "257"]
    shown = said(capsys, *small, "--ranks", "4", "--parallel.tp", "2")
    assert "memory: not predicted under tensor parallelism" in shown and "MFU" not in shown
    assert "name the machines by --cluster" in said(capsys, *small)
    assert "does not fit" in said(
        capsys,
        "--recipe",
        "llama3_8b_1m",
        "--parallel.attention",
        "ulysses",
        "--checkpointing.policy",
        "none",
        "--checkpointing.no-offload",
        "--model.layers",
        "4",
    )


def test_a_step_that_the_watchdog_would_end_is_told(capsys):
    flags = ["--recipe", "llama3_8b_1m", "--model.layers", "4", "--train.timeout-minutes"]
    assert "longer than the 6 s of --train.timeout-minutes" in said(capsys, *flags, "0.1")
    assert "timeout" not in said(capsys, *flags, "60")


def test_parts_of_a_step_keep_the_gradients_of_those_before():
    config = Config(ModelConfig(vocab_size=257), ParallelConfig(ring=2, ulysses=1))
    whole = predict(config)
    parts = predict(replace(config, data=replace(config.data, rows=8), train=replace(config.train, accumulation=2)))
    assert parts.shapes == whole.shapes
    assert parts.memory.device == whole.memory.device + 4 * whole.local_parameters


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--parallel.ring 3 --ranks 8", "= 6 ranks, but 8 are running"),
        ("--ranks 4 --cluster 8xh100", "--cluster 8xh100 has 8 ranks, and the run 4; make them the same"),
        ("--cluster 8xtpu", "--cluster 8xtpu: no cluster '8xtpu'; known: 8xh100"),
        ("--ranks 0", "--ranks 0: must be at least 1"),
        ("--mfu 2", "--mfu 2.0: must be above 0, and at most 1"),
        ("--ranks 32 --parallel.ulysses 16 --parallel.ring 2", "8 query heads cannot be split over 16 ranks"),
        ("--data.path nowhere", "nowhere"),
        ("--model.pretrained nowhere", "cannot read nowhere/config.json"),
        ("--optimizer.lr -1", "--optimizer.lr -1.0: must be above 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        main(["--dry-run", "--model.vocab-size", "257", *flags.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("armillary-train: ") and error.count("\n") == 1
    assert message in error
