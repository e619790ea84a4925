"""A model trained on 2 ranks recalls values on the other rank, and only through attention."""

import io
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from armillary.attention import AttentionMask, Local
from armillary.models.block import Block
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Run,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)

RECALL = Config(
    # Few, high RoPE frequencies, so that a head soon learns to attend to the previous token.
    model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=4, hidden_dim=256, rope_theta=10.0),
    data=DataConfig(task="recall", sequence_length=16, pairs=1, symbols=8, global_batch_size=64),
    parallel=ParallelConfig(ring=2, ulysses=1, attention="ring"),
    optimizer=OptimizerConfig(lr=3e-3, min_lr=0.0, schedule="linear", warmup_steps=20, weight_decay=0.3),
    validation=ValidationConfig(every=1000, batches=4, tasks=("recall",)),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=100, device="cpu"),
)


class OwnShard:
    """Causal attention among local tokens, without the keys of other ranks."""

    def __call__(self, q, k, v, *, mask, layout):
        return Local()(q, k, v, mask=AttentionMask())


def attend_locally(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, Block):
            module.attention = OwnShard()


def correct_fraction(config: Config, broken: bool) -> float:
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        run = prepare(config, device)
        if broken:
            attend_locally(run)
        return train_loop(run).validation["recall"]


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True])
def test_values_on_other_ranks_are_recalled_only_through_attention(worlds, tmp_path, broken):
    config = replace(RECALL, train=replace(RECALL.train, output=tmp_path))
    right_shares = worlds(2).run(correct_fraction, config, broken)
    assert right_shares[0] == right_shares[1]
    assert right_shares[0] < 2 / 8 if broken else right_shares[0] > 0.95  # guessing gives 1 in 8
