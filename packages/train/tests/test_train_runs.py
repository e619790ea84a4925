"""Complete runs on gloo ranks: equal losses on meshes and under checkpoint policies, and the output."""

from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import SMALL, at, on_mesh, train_small

from armillary.data import python_corpus
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.models import Checkpointing
from armillary.train import Config, LogConfig, ModelConfig, OptimizerConfig, Summary

# Uneven sizes: 250 tokens on up to 4 shards, fewer key/value heads than head ranks.
# A wrong gradient changes the loss of step 2.
UNEVEN = replace(
    SMALL,
    model=ModelConfig(dim=64, layers=2, heads=8, kv_heads=2, hidden_dim=96),
    data=replace(SMALL.data, sequence_length=250),
    validation=replace(SMALL.validation, batches=2),
    log=LogConfig(every=2, plot=False),
    train=replace(SMALL.train, steps=3),
)


def run_on(worlds, ranks: int, config: Config, folder: Path) -> Summary:
    """Returns the summary, equal on all ranks, after checking that only rank 0 prints, and what it prints."""
    (summary, output), *others = worlds(ranks).run(train_small, at(config, folder))
    assert all((other.losses, printed) == (summary.losses, "") for other, printed in others)
    first, *lines = output.splitlines()
    assert first == "warm-up: 1 of 3 steps; --optimizer.warmup-steps 10 would not end before the run does"
    assert [line.split(" loss:")[0] for line in lines[:3]] == ["step: 1", "step: 2", "step: 3"]
    assert lines[3].startswith("validation: step: 3 loss: ")
    assert lines[4].startswith("trained 3 steps, 3,000 tokens in ")
    assert lines[-1] == f"  checkpoint   {folder}/checkpoint/step-3"
    return summary


def assert_close(actual: Summary, expected: Summary) -> None:
    assert len(actual.losses) == 3
    assert max(abs(a - b) for a, b in zip(actual.losses, expected.losses, strict=True)) < 1e-5
    assert abs(actual.validation_loss - expected.validation_loss) < 1e-5


@pytest.fixture(scope="module")
def one_rank(worlds, tmp_path_factory) -> Summary:
    summary = run_on(worlds, 1, UNEVEN, tmp_path_factory.mktemp("one"))
    assert summary.losses[0] == pytest.approx(5.55, abs=0.15)  # ln 257: an untrained model
    assert summary.losses[-1] < summary.losses[0] - 0.1  # test_first_run.py checks a fall of more than 1 in 12 steps
    return summary


# With a policy other than "none" UPipe runs from hidden states, and offloading takes other code paths.
@pytest.mark.parametrize(
    ("axes", "layout", "checkpointing"),
    [
        ({"tp": 2, "ring": 2}, "striped", Checkpointing()),
        (
            {"ring": 2, "ulysses": 2, "attention": "upipe+ring"},
            "zigzag",
            Checkpointing("attention_output", offload=True, prefetch=False, chunk=50),
        ),
    ],
    ids=["tensor parallel", "attention output"],
)
def test_a_run_gives_the_same_losses_on_every_mesh(worlds, one_rank, tmp_path, axes, layout, checkpointing):
    config = replace(
        on_mesh(UNEVEN, **axes),
        data=replace(UNEVEN.data, layout=layout),
        checkpointing=checkpointing,
        optimizer=OptimizerConfig(cpu_offload=checkpointing.offload),
    )
    assert_close(run_on(worlds, 4, config, tmp_path), one_rank)


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
    one_rank = run_on(worlds, 1, config, tmp_path / "one")
    assert_close(run_on(worlds, 4, on_mesh(config, ring=4), tmp_path / "ring"), one_rank)
