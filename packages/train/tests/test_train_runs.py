"""Complete runs on gloo ranks: equal losses on every mesh, and checkpoints."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import armillary.train
from armillary.data import python_corpus
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.models import Checkpointing
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SaveConfig,
    Summary,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)

STEPS = 3  # a wrong gradient changes the loss of step 2
TEXT = (Path(armillary.train.__file__).parent,)
"""Training text: reading all of Python's source would take each rank longer than training."""
# Uneven sizes: 250 tokens on up to 4 shards, fewer key/value heads than head ranks.
SMALL = Config(
    model=ModelConfig(dim=64, layers=2, heads=8, kv_heads=2, hidden_dim=96),
    data=DataConfig(path=TEXT, sequence_length=250, global_batch_size=4),
    validation=ValidationConfig(every=20, batches=2),
    save=SaveConfig(every=20),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=STEPS, device="cpu"),
)


def run(config: Config) -> tuple[Summary, str]:
    output = io.StringIO()
    with redirect_stdout(output), process_group(config) as device:
        summary = train_loop(prepare(config, device))
    return summary, output.getvalue()


def run_on(worlds, ranks: int, config: Config, folder: Path) -> tuple[Summary, str]:
    """Returns the summary, equal on all ranks, and the output of rank 0; other ranks must print nothing."""
    config = replace(config, train=replace(config.train, output=folder))
    results = worlds(ranks).run(run, config)
    assert all(summary.losses == results[0][0].losses for summary, _ in results)
    assert all(output == "" for _, output in results[1:])
    return results[0]


@pytest.fixture(scope="module")
def one_rank(worlds, tmp_path_factory) -> Summary:
    return run_on(worlds, 1, SMALL, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({"ring": 4}, "zigzag"),
        pytest.param({"ring": 4}, "striped", marks=pytest.mark.long),
        pytest.param({"ring": 2, "ulysses": 2}, "zigzag", marks=pytest.mark.long),
        pytest.param({"ring": 2, "ulysses": 2, "attention": "ulysses+token_ring"}, "zigzag", marks=pytest.mark.long),
        pytest.param({"ulysses": 4, "attention": "upipe"}, "zigzag", marks=pytest.mark.long),
        pytest.param(
            {"ring": 2, "ulysses": 2, "attention": "upipe+wallfacer", "heads_per_stage": 4},
            "zigzag",
            marks=pytest.mark.long,
        ),
        pytest.param({"shard": 2, "ring": 2}, "zigzag", marks=pytest.mark.long),
        pytest.param({"replicate": 2, "ulysses": 2}, "contiguous", marks=pytest.mark.long),
        pytest.param({"replicate": 2, "shard": 2}, "contiguous", marks=pytest.mark.long),
        ({"tp": 2, "ring": 2}, "zigzag"),
        pytest.param({"tp": 2, "shard": 2}, "contiguous", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_steps_give_the_same_losses_on_every_mesh(worlds, one_rank, tmp_path, parallel, layout):
    axes = {"ring": 1, "ulysses": 1} | parallel
    config = replace(SMALL, parallel=ParallelConfig(**axes), data=replace(SMALL.data, layout=layout))
    summary, _ = run_on(worlds, 4, config, tmp_path)
    assert len(summary.losses) == STEPS
    differences = [abs(a - b) for a, b in zip(summary.losses, one_rank.losses, strict=True)]
    assert max(differences) < 1e-5
    assert abs(summary.validation_loss - one_rank.validation_loss) < 1e-5


# With a policy other than "none" UPipe runs from hidden states, and offloading takes other code paths.
@pytest.mark.parametrize(
    ("attention", "checkpointing", "on_host"),
    [
        pytest.param("usp", Checkpointing("none", tiled=True, chunk=9), False, marks=pytest.mark.long),
        ("usp", Checkpointing("layer", offload=True, chunk=16), True),
        pytest.param("usp", Checkpointing("attention_output"), False, marks=pytest.mark.long),
        pytest.param("upipe+ring", Checkpointing("layer", offload=True, chunk=16), False, marks=pytest.mark.long),
        ("upipe+ring", Checkpointing("attention_output", offload=True, prefetch=False, chunk=50), True),
    ],
    ids=str,
)
def test_steps_give_the_same_losses_under_every_checkpoint_policy(
    worlds, one_rank, tmp_path, attention, checkpointing, on_host
):
    config = replace(
        SMALL,
        parallel=ParallelConfig(shard=1, ring=2, ulysses=2, attention=attention),
        checkpointing=checkpointing,
        optimizer=OptimizerConfig(cpu_offload=on_host),
    )
    summary, _ = run_on(worlds, 4, config, tmp_path)
    differences = [abs(a - b) for a, b in zip(summary.losses, one_rank.losses, strict=True)]
    assert len(differences) == STEPS and max(differences) < 1e-5


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> DataConfig:
    """Two stores of short and long documents, mixed and packed with a document mask."""
    folder = tmp_path_factory.mktemp("stores")
    documents = python_corpus()
    for name, part in {"short": documents[10:300:10], "long": documents[5::100]}.items():
        for i, document in enumerate(part):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{i}.txt").write_bytes(document.text[: 150 if name == "short" else 3000])
        prepare_store(Preparation([folder / name], folder / f"{name}.store"), workers=1)
    paths = folder / "short.store", folder / "long.store"
    packed = {"packing": "best_fit", "documents": True, "reset_positions": True, "layout": "balanced"}
    return replace(SMALL.data, path=paths, weights=(1.0, 2.0), validation_fraction=0.2, **packed)


@pytest.fixture(scope="module")
def packed_on_one_rank(worlds, stores, tmp_path_factory) -> Summary:
    config = replace(SMALL, data=stores)
    return run_on(worlds, 1, config, tmp_path_factory.mktemp("packed"))[0]


@pytest.mark.parametrize(
    "parallel",
    [
        {"ring": 4},
        pytest.param({"ring": 2, "ulysses": 2, "attention": "upipe+wallfacer"}, marks=pytest.mark.long),
        pytest.param({"tp": 2, "shard": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_packed_documents_give_the_same_losses_on_every_mesh(worlds, stores, packed_on_one_rank, tmp_path, parallel):
    axes = {"ring": 1, "ulysses": 1} | parallel
    config = replace(SMALL, parallel=ParallelConfig(**axes), data=stores)
    summary, _ = run_on(worlds, 4, config, tmp_path)
    differences = [abs(a - b) for a, b in zip(summary.losses, packed_on_one_rank.losses, strict=True)]
    assert len(differences) == STEPS and max(differences) < 1e-5


def test_the_loss_falls(one_rank):
    assert one_rank.losses[0] == pytest.approx(5.55, abs=0.15)  # ln 257: an untrained model
    assert one_rank.losses[-1] < one_rank.losses[0] - 0.1  # test_first_run.py checks a fall of more than 1 in 12 steps


def test_output_of_a_run(worlds, tmp_path):
    short = replace(SMALL, log=LogConfig(every=2, plot=False), train=replace(SMALL.train, steps=3))
    _, output = run_on(worlds, 2, short, tmp_path)
    first, *lines = output.splitlines()
    assert first == "warm-up: 1 of 3 steps; --optimizer.warmup-steps 10 would not end before the run does"
    assert [line.split(" loss:")[0] for line in lines[:3]] == ["step: 1", "step: 2", "step: 3"]
    assert lines[3].startswith("validation: step: 3 loss: ")
    assert lines[4].startswith("trained 3 steps, 3,000 tokens in ")
    assert lines[-1] == f"  checkpoint   {tmp_path}/checkpoint/step-3"


def checkpoint_equals_model(config: Config) -> bool:
    """Returns whether loading the checkpoint into another model gives the trained weights."""
    with process_group(config) as device, redirect_stdout(io.StringIO()):
        trained = prepare(config, device)
        place = train_loop(trained).checkpoint
        other_run = prepare(replace(config, train=replace(config.train, seed=1)), device)
        state = {"model": get_model_state_dict(other_run.model)}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(place)))
    expected = get_model_state_dict(trained.model)
    loaded = state["model"]
    return all(torch.equal(loaded[name].full_tensor(), expected[name].full_tensor()) for name in expected)


def test_checkpoints_have_the_trained_weights_also_after_a_resume(worlds, tmp_path):
    config = replace(SMALL, train=replace(SMALL.train, steps=2, output=tmp_path))
    assert worlds(2).run(checkpoint_equals_model, config) == [True, True]
    assert worlds(2).run(checkpoint_equals_model, config) == [True, True]
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["step-2"]
