"""Complete runs on gloo ranks: equal losses on every mesh, checkpoints, and refusals on every rank."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
from armillary.train.cli import main

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
        ({"ring": 2, "ulysses": 2, "attention": "upipe+wallfacer", "heads_per_stage": 4}, "zigzag"),
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
        {"tp": 2, "shard": 2},
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


def refusals(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Returns (exit code, message) of each command, and this rank, which proves that its group still exists."""
    actual = list[tuple[int, str]]()
    for argv in commands:
        messages = io.StringIO()
        with redirect_stderr(messages), pytest.raises(SystemExit) as stop:
            main(["--train.device", "cpu", *argv])
        actual.append((stop.value.code, messages.getvalue()))
    return [*actual, (dist.get_rank(), "")]


def test_invalid_runs_are_refused_on_every_rank_with_one_line(worlds, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "posts.jsonl").write_text('{"text": "a"}')
    cases = {
        ("--parallel.ring", "3"): "ring 3 x ulysses 1 x tp 1 = 3 ranks, but 4 are running; make the axes multiply to 4",
        ("--parallel.ulysses", "4", "--model.heads", "2", "--model.kv-heads", "1"): (
            "2 query heads cannot be split over 4 ranks of axis 'ulysses'; give it at most 2 ranks"
        ),
        ("--model.kv-heads", "3"): "3",
        ("--data.sequence-length", "3", "--parallel.ring", "4"): "a sequence of 3 tokens is shorter than its 4 shards",
        ("--data.path", str(tmp_path / "none")): f"{tmp_path / 'none'}",
        ("--data.path", str(tmp_path / "posts.jsonl")): "is no text to be read as it is; make a token store of it",
        ("--data.path", str(tmp_path / "file"), "--model.vocab-size", "200"): "the tokens of the data go up to 256",
        ("--data.weights", "1", "2"): "--data.weights has 2 numbers for 0 paths; give one for each of --data.path",
        ("--parallel.attention", "telepathy"): "no attention method 'telepathy'; known: local, ring, token_ring,",
        ("--parallel.attention", "ring"): "ring would leave axis 'ulysses' with 2 ranks unused",
        ("--trian.steps", "3"): "Unrecognized options: --trian.steps",
        ("--train.output", str(tmp_path / "file" / "inside")): "cannot be written to",
    }
    for rank, (*actual, last) in enumerate(worlds(4).run(refusals, list(map(list, cases)))):
        assert last == (rank, "")
        for message, (code, messages) in zip(cases.values(), actual, strict=True):
            assert code == 2
            assert messages.startswith("armillary-train: ")
            assert messages.count("\n") == 1
            assert message in messages, messages
