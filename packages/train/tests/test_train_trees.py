"""Prompts with several completions, trained as trees: loss and gradients equal those of separate sequences."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from training_runs import on_mesh

from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from armillary.data import Batches, prefix_tree, tree_batch
from armillary.models import initialize
from armillary.models.internal import meta_model
from armillary.train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
)
from armillary.train.config import model_config
from armillary.train.internal import batch_mask
from armillary.train.loop import bad_rows, validate
from armillary.train.step import backward, sum_over_ranks

LENGTH = 40
ROWS = [
    [([5, 6, 7, 8], [1, 256], 1.0), ([5, 6, 7, 8], [1, 2, 3, 256], 0.5), ([5, 6, 7, 8], [9, 256], 1.0)],
    [([], [3, 3, 4, 256], 1.0), ([], [3, 3, 5, 6, 256], 1.0), ([8], [2, 256], 2.0)],
    [([1, 2], [30] * n + [256], 1.0) for n in range(1, 7)],
    [(list(range(100, 125)), [7, 8, 256], 1.0), (list(range(100, 125)), [9, 256], 1.0)],
]
"""Trees of a global batch: (prompt, completion, weight) of each sequence. Prompts have no labels."""
MESHES = ({"ring": 2, "ulysses": 2}, {"replicate": 2, "tp": 2})
"""Every mesh axis but `shard`, which has another layout. Trees under each method are in the tests of attention."""


class TreeRows(Batches):
    """Rows that a loader of one's own makes of token sequences."""

    def __init__(self, of: Batches, balanced: bool = False) -> None:
        self.balanced = balanced
        super().__init__(of._layout, of._shard, of._rows_per_batch, of._replica, of._replicas, 0, {})

    def _make_batch(self, rows):
        trees = []
        for row in rows:
            prompts, completions, weights = zip(*ROWS[row % len(ROWS)], strict=True)
            pairs = list(zip(prompts, completions, strict=True))
            trained = [[False] * len(prompt) + [True] * len(completion) for prompt, completion in pairs]
            trees.append(prefix_tree([prompt + end for prompt, end in pairs], trained=trained, weights=weights))
        batch = tree_batch(trees, self._layout, self._shard)
        mask = batch_mask(batch.documents, batch.parents, True)
        layout = SequenceLayout.balanced(LENGTH, self._layout.shards, mask=mask) if self.balanced else self._layout
        return replace(tree_batch(trees, layout, self._shard), rows=rows)

    def describe(self, row):
        return f"tree {row}"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("text")
    for name in "ab":
        (folder / name).write_text("text of the run that the trees replace " * 9)
    return Config(
        model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, hidden_dim=48),
        data=DataConfig(path=(folder,), sequence_length=LENGTH, global_batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=1),
        validation=ValidationConfig(batches=1),
        train=TrainConfig(steps=2, device="cpu", precision="float64", output=tmp_path_factory.mktemp("out")),
    )


def separate(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of separate training sequences on one device."""
    model = meta_model(model_config(config.model, 257, LENGTH)).to_empty(device="cpu").double()
    initialize(model, config.train.seed)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for prompt, completion, weight in (sequence for row in ROWS for sequence in row):
        ids = torch.tensor(prompt + completion)
        losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        first = max(len(prompt) - 1, 0)
        total, weights = total + weight * losses[first:].sum(), weights + weight * len(losses[first:])
    loss = total / weights
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def loss_of_first_batch(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first global batch, over all ranks."""
    with process_group(config) as device:
        run = prepare(config, device)
        run.training = TreeRows(run.training, config.data.layout == "balanced")
        run.validation = TreeRows(run.validation)
        batches = [next(run.training) for _ in range(config.train.accumulation)]
        labelled = sum_over_ranks(run, sum(batch.labelled for batch in batches))
        loss = sum_over_ranks(run, torch.stack([backward(run, batch, labelled) for batch in batches]).sum())
        grads = {name: p.grad for name, p in run.model.named_parameters()}
        full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        if config.train.accumulation > 1:
            assert not bad_rows(run, batches) and 0 < validate(run)["loss"] < 20
        return loss, full


def losses_of_first_batches(configs: list[Config]) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    return [loss_of_first_batch(config) for config in configs]


def configured(config: Config, layout: str = "zigzag", parts: int = 1, **axes: int) -> Config:
    data, train = replace(config.data, layout=layout), replace(config.train, accumulation=parts)
    return on_mesh(replace(config, data=data, train=train), **axes)


def error(actual, expected) -> float:
    (loss, grads), (exact, exact_grads) = actual, expected
    assert grads.keys() == exact_grads.keys()
    return max(relative_error(loss, exact), *(relative_error(grads[name], exact_grads[name]) for name in exact_grads))


def test_a_batch_of_trees_equals_separate_sequences(worlds, config):
    exact = separate(config)
    alone = loss_of_first_batch(configured(config))
    assert error(alone, exact) < 1e-9
    configs = [*(configured(config, **axes) for axes in MESHES), configured(config, "balanced", 2, ring=2, shard=2)]
    for rank in worlds(4).run(losses_of_first_batches, configs):
        for each, actual in zip(configs, rank, strict=True):
            assert error(actual, exact) < 1e-9, each.parallel
