"""The rows of benchmarks/recall.py, and a model on two ranks that answers their questions only through attention."""

import io
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from armillary.core import SequenceLayout
from armillary.data import IGNORE
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
    process_group,
    train_loop,
)

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import equality
from recall import Recall, RecallRows, prepare_recall, recall_config, right_answers

LAYOUTS = {
    "one": SequenceLayout.contiguous(61, 1),
    "zigzag": SequenceLayout.zigzag(240, 4),
    "odd": SequenceLayout.zigzag(61, 3),
    "striped": SequenceLayout.striped(240, 3),
    "full": SequenceLayout.zigzag(16, 4),  # no filler between pairs and queries
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_asked_for_once_and_on_other_shards(name):
    layout = LAYOUTS[name]
    task, positions = Recall(layout, pairs=4, symbols=8), np.arange(layout.length)
    shards = layout.shards_at(positions)
    for row in range(20):
        tokens, labels = task.tokens(row, positions), task.labels(row, positions)
        queries = np.flatnonzero(labels != IGNORE)
        assert queries.tolist() == list(range(layout.length - 8, layout.length, 2))
        assert len(set(tokens[queries])) == 4 and max(tokens) < task.vocabulary
        for query in queries:
            (place,) = np.flatnonzero(tokens[: layout.length - 8] == tokens[query])
            assert tokens[place + 1] == labels[query] == tokens[query + 1]
            assert layout.shards == 1 or shards[query] not in shards[place : place + 2]
    rows = [RecallRows(task, shard, 4, first_row=12).batch(2) for shard in range(layout.shards)]
    full = np.stack([task.tokens(12 + 8 + i, positions) for i in range(4)])
    assert layout.join([batch.tokens for batch in rows]).tolist() == full.tolist()


@pytest.mark.parametrize(
    "layout, pairs, message",
    [(LAYOUTS["one"], 9, "pairs=9"), (LAYOUTS["full"], 5, "5 pairs"), (SequenceLayout.striped(240, 2), 2, "2 pairs")],
)
def test_rows_without_places_for_the_pairs_are_refused(layout, pairs, message):
    with pytest.raises(ValueError, match=message):
        Recall(layout, pairs, 8)


CONFIG = Config(
    # Few, high RoPE frequencies, so that a head soon learns to attend to the previous token.
    model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=4, hidden_dim=256, rope_theta=10.0),
    data=DataConfig(sequence_length=16, global_batch_size=64),
    parallel=ParallelConfig(ring=2, ulysses=1, attention="ring"),
    optimizer=OptimizerConfig(lr=3e-3, min_lr=0.0, schedule="linear", warmup_steps=20, weight_decay=0.3),
    validation=ValidationConfig(every=1000, batches=4),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=100, device="cpu"),
)


def answers(config: Config, broken: bool) -> float:
    """Share of right answers of a trained run."""
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        run = prepare_recall(config, 1, 8, device)
        if broken:
            equality.end_with_shard(run)
        train_loop(run)
        return right_answers(run)


@pytest.mark.long  # reproduces docs/benchmarks/equality-recall.md
@pytest.mark.parametrize("broken", [False, True])
def test_values_on_other_ranks_are_recalled_only_through_attention(worlds, tmp_path, broken):
    config = replace(CONFIG, train=replace(CONFIG.train, output=tmp_path / "outputs"))
    right, right_of_other_rank = worlds(2).run(answers, recall_config(config, 8, tmp_path / "store"), broken)
    assert right == right_of_other_rank
    assert right < 2 / 8 if broken else right > 0.95  # guessing gives 1 in 8
