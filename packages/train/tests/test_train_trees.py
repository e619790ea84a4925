"""Prompts with several completions, trained as trees: loss and gradients equal those of separate sequences."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from armillary.core.testing import relative_error
from armillary.data import open_store
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.models import initialize
from armillary.models.initialize import meta_model
from armillary.train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
)
from armillary.train.bad_steps import bad_rows
from armillary.train.config.model_sizes import model_config
from armillary.train.step import backward, sum_over_ranks
from armillary.train.validation import validate

LENGTH, END = 40, 256
LINES = [
    {"prompt": "2 + 2 =", "completions": [" 4", {"text": " five", "weight": 0.5}, " 4"]},
    {"prompt": "who?", "train": True, "completions": ["me", "you"]},
    {"text": "a", "children": [{"text": "bc", "children": [{"text": "d"}, {"text": "ef"}]}, {"text": "g"}]},
    {"text": "a plain document"},
    {"prompt": "xy", "completions": ["z" * n for n in range(1, 9)]},
    {"prompt": "one prompt that is longer", "completions": ["yes", "no"]},
    {"prompt": "q", "completions": [{"text": "r", "children": ["s", "t"]}, "u"]},
]
MESHES = ({"ring": 4}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}, {"replicate": 2, "tp": 2}, {"ring": 2, "tp": 2})


def sequences(node, before=(), trained=()):
    """Returns (tokens, label flags, weight) of each sequence of a line."""
    kind = next(name for name in ("prompt", "text") if name in node)
    text, train = list(node[kind].encode()), node.get("train", kind != "prompt")
    children = node.get("completions", node.get("children", []))
    tokens, trained = (*before, *text), (*trained, *[train] * len(text))
    if not children:
        return [((*tokens, END), (*trained, train), node.get("weight", 1.0))]
    each = ({"text": child} if isinstance(child, str) else child for child in children)
    return [actual for child in each for actual in sequences(child, tokens, trained)]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("trees")
    (folder / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    prepare_store(Preparation([folder / "trees.jsonl"], folder / "store", format="trees"), workers=1)
    return Config(
        model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, hidden_dim=48),
        data=DataConfig(path=(folder / "store",), sequence_length=LENGTH, global_batch_size=4, packing="best_fit"),
        optimizer=OptimizerConfig(warmup_steps=1),
        validation=ValidationConfig(batches=1),
        train=TrainConfig(steps=2, device="cpu", precision="float64", output=tmp_path_factory.mktemp("out")),
    )


def separate(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of separate training sequences on one device."""
    sizes = model_config(config.model, 257, LENGTH)
    model = meta_model(sizes).to_empty(device="cpu").double()
    initialize(model, config.train.seed)
    store = open_store(config.data.path[0])
    training = store.split(config.data.validation_fraction)[0].starts.tolist()
    lines = [LINES[store.starts.tolist().index(start)] for start in training]
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for tokens, trained, weight in (actual for line in lines for actual in sequences(line)):
        ids = torch.tensor(tokens)
        losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        each = weight * torch.tensor(trained[1:]).double()
        total, weights = total + (losses * each).sum(), weights + each.sum().item()
    loss = total / weights
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def loss_of_first_batch(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first global batch, over all ranks."""
    with process_group(config) as device:
        run = prepare(config, device)
        assert run.training.rows_per_epoch == 4
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


def on_mesh(config: Config, layout: str = "zigzag", parts: int = 1, **axes: int) -> Config:
    data, train = replace(config.data, layout=layout), replace(config.train, accumulation=parts)
    return replace(config, data=data, train=train, parallel=ParallelConfig(**{"ring": 1, "ulysses": 1} | axes))


def error(actual, expected) -> float:
    (loss, grads), (exact, exact_grads) = actual, expected
    assert grads.keys() == exact_grads.keys()
    return max(relative_error(loss, exact), *(relative_error(grads[name], exact_grads[name]) for name in exact_grads))


def test_a_batch_of_trees_equals_separate_sequences(worlds, config):
    exact = separate(config)
    alone = loss_of_first_batch(on_mesh(config))
    assert error(alone, exact) < 1e-9
    configs = [*(on_mesh(config, **axes) for axes in MESHES), on_mesh(config, "balanced", 2, ring=2, shard=2)]
    for rank in worlds(4).run(losses_of_first_batches, configs):
        for each, actual in zip(configs, rank, strict=True):
            assert error(actual, exact) < 1e-9, each.parallel


def test_greedy_packing_is_refused_by_its_flag(config):
    cut = replace(config, data=replace(config.data, packing="greedy"))
    with pytest.raises(ValueError, match=r"--data.packing greedy"):
        loss_of_first_batch(on_mesh(cut))
