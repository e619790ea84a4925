"""Complete runs on gloo ranks: equal losses on meshes and under checkpoint policies, and the output."""

from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import SMALL, at, train_small

from armillary.data import python_corpus
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.models import Checkpointing
from armillary.train import Config, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, Summary

# Uneven sizes: 250 tokens on up to 4 shards, fewer key/value heads than head ranks.
# A wrong gradient changes the loss of step 2.
UNEVEN = replace(
    SMALL,
    model=ModelConfig(dim=64, layers=2, heads=8, kv_heads=2, hidden_dim=96),
    data=replace(SMALL.data, sequence_length=250),
    validation=replace(SMALL.validation, batches=2),
    train=replace(SMALL.train, steps=3),
)


def run_on(worlds, ranks: int, config: Config, folder: Path) -> tuple[Summary, str]:
    """Returns the summary, equal on all ranks, and the output of rank 0; other ranks must print nothing."""
    results = worlds(ranks).run(train_small, at(config, folder))
    assert all(summary.losses == results[0][0].losses for summary, _ in results)
    assert all(output == "" for _, output in results[1:])
    return results[0]


def assert_close(actual: Summary, expected: Summary) -> None:
    assert len(actual.losses) == 3
    assert max(abs(a - b) for a, b in zip(actual.losses, expected.losses, strict=True)) < 1e-5
    assert abs(actual.validation_loss - expected.validation_loss) < 1e-5


@pytest.fixture(scope="module")
def one_rank(worlds, tmp_path_factory) -> Summary:
    summary = run_on(worlds, 1, UNEVEN, tmp_path_factory.mktemp("one"))[0]
    assert summary.losses[0] == pytest.approx(5.55, abs=0.15)  # ln 257: an untrained model
    assert summary.losses[-1] < summary.losses[0] - 0.1  # test_first_run.py checks a fall of more than 1 in 12 steps
    return summary


# With a policy other than "none" UPipe runs from hidden states, and offloading takes other code paths.
@pytest.mark.parametrize(
    ("parallel", "layout", "checkpointing"),
    [
        ({"tp": 2, "ring": 2}, "striped", None),
        ({"ring": 2, "ulysses": 2}, "zigzag", Checkpointing("layer", offload=True, chunk=16)),
        (
            {"ring": 2, "ulysses": 2, "attention": "upipe+ring"},
            "zigzag",
            Checkpointing("attention_output", offload=True, prefetch=False, chunk=50),
        ),
    ],
    ids=["tensor parallel", "layer", "attention output"],
)
def test_steps_give_the_same_losses_on_every_mesh(worlds, one_rank, tmp_path, parallel, layout, checkpointing):
    config = replace(
        UNEVEN,
        parallel=ParallelConfig(**{"ring": 1, "ulysses": 1} | parallel),
        data=replace(UNEVEN.data, layout=layout),
        checkpointing=checkpointing or UNEVEN.checkpointing,
        optimizer=OptimizerConfig(cpu_offload=checkpointing is not None),
    )
    assert_close(run_on(worlds, 4, config, tmp_path)[0], one_rank)


def test_packed_documents_give_the_same_losses_on_every_mesh(worlds, tmp_path):
    """Two stores of short and long documents, mixed and packed with a document mask."""
    documents = python_corpus()
    for name, part in {"short": documents[10:300:10], "long": documents[5::100]}.items():
        (tmp_path / name).mkdir()
        for i, document in enumerate(part):
            (tmp_path / name / f"{i}.txt").write_bytes(document.text[: 150 if name == "short" else 3000])
        prepare_store(Preparation([tmp_path / name], tmp_path / f"{name}.store"), workers=1)
    packed = {"packing": "best_fit", "documents": True, "reset_positions": True, "layout": "balanced"}
    paths = tmp_path / "short.store", tmp_path / "long.store"
    data = replace(UNEVEN.data, path=paths, weights=(1.0, 2.0), validation_fraction=0.2, **packed)
    config = replace(UNEVEN, data=data)
    one_rank, _ = run_on(worlds, 1, config, tmp_path / "one")
    ring = replace(config, parallel=ParallelConfig(ring=4, ulysses=1))
    assert_close(run_on(worlds, 4, ring, tmp_path / "ring")[0], one_rank)


def test_output_of_a_run(worlds, tmp_path):
    _, output = run_on(worlds, 2, replace(UNEVEN, log=LogConfig(every=2, plot=False)), tmp_path)
    first, *lines = output.splitlines()
    assert first == "warm-up: 1 of 3 steps; --optimizer.warmup-steps 10 would not end before the run does"
    assert [line.split(" loss:")[0] for line in lines[:3]] == ["step: 1", "step: 2", "step: 3"]
    assert lines[3].startswith("validation: step: 3 loss: ")
    assert lines[4].startswith("trained 3 steps, 3,000 tokens in ")
    assert lines[-1] == f"  checkpoint   {tmp_path}/checkpoint/step-3"
