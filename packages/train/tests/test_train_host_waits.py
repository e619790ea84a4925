"""A training step has the host wait for the device for its metrics alone: of every method and checkpoint policy.

The device is torch's "meta": what lies there has no numbers, and what lies on "cpu" is the host's. Ops that would wait
on a GPU are those that need a number of the device's, or copy between the two without `non_blocking`.
"""

import sys
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.attention.kernels import Dense
from armillary.core import Axis, compat
from armillary.data import ByteTokenizer, Document, TokenStore
from armillary.models import Checkpointing
from armillary.models.dtensors import batch_mesh
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from armillary.train.build import shard_model
from armillary.train.config.model_sizes import model_config
from armillary.train.parallel import data_mesh
from armillary.train.rows import load_rows
from armillary.train.run import Run
from armillary.train.runtime.fake_world import fake_world
from armillary.train.step import train_step

DEVICE = torch.device("meta")
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero", "equal"}
"""Ops whose results' sizes, or that themselves, are numbers of the device."""


TELLS = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 makes tensors of numbers where no mode sees it"
)


class Waits(TorchDispatchMode):
    """Counts what would have the host wait: (what, the line of ours that asked for it)."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        there = any(isinstance(x, Tensor) and x.device == DEVICE for x in pytree.tree_leaves((args, kwargs)))
        if name == "_local_scalar_dense" and there:
            self.count("item")
            return 1.0 if args[0].is_floating_point() else 1
        if there and (name in SIZES or (name.startswith("index") and any(map(waits_for_index, places(args))))):
            self.count(name)
        if there and name.startswith("lift"):  # also what a list as an index becomes
            self.count("made of numbers")
        if name in ("_to_copy", "copy_") and (ends := ends_of(name, args, kwargs))[0] != ends[1]:
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self.count(f"from {ends[0]} to {ends[1]}")
            if ends[0] == "meta":  # there is nothing to be copied
                return args[0] if name == "copy_" else torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)

    def count(self, what):
        ours = [line for line in traceback.extract_stack() if "/src/armillary/" in line.filename]
        self.found[what, f"{ours[-1].filename.rpartition('/')[2]}: {ours[-1].line}" if ours else ""] += 1


def places(args):
    """The tensors that an op is given as indices."""
    return [x for x in pytree.tree_leaves(args[1:2]) if isinstance(x, Tensor)]


def waits_for_index(x):
    return x.device != DEVICE or x.dtype in (torch.bool, torch.uint8)


def ends_of(name, args, kwargs):
    """From which device to which an op copies."""
    if name == "copy_":
        return args[1].device.type, args[0].device.type
    return args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type


@pytest.mark.parametrize(
    ("what", "line"),
    [
        pytest.param("made of numbers", lambda x: x[[0, 2]], marks=TELLS),
        pytest.param("made of numbers", lambda x: torch.tensor([1, 2], device=x.device), marks=TELLS),
        ("item", lambda x: float(x[0])),
        ("item", lambda x: bool(x[0] > 0)),
        ("from cpu to meta", lambda x: torch.zeros(3).to(x.device)),
        ("from meta to cpu", lambda x: x.cpu()),
        ("index", lambda x: x[torch.tensor([1])]),
        ("index", lambda x: x.index_put_((torch.tensor([1]),), x[:1])),
        ("equal", lambda x: torch.equal(x, x)),
    ],
)
def test_synchronizations_are_detected(what, line):
    with Waits() as waits, suppress(RuntimeError, NotImplementedError):  # there are no numbers
        line(torch.zeros(3, device=DEVICE))
    assert any(actual.startswith(what) for actual, _ in waits.found), waits.found


def waits_of_a_step(config, **axes):
    """Those of a first step, on the first of as many ranks; without FSDP2, which wants real parameters."""
    model, mine = sys.modules["armillary.models.parallel.parallelize"], Config(train=TrainConfig(device="cpu"))
    config = replace(mine, **config)
    unsharded, unsent = (
        patch.object(model, "shard_parameters", lambda *_, **__: None),
        patch.object(compat, "start_batch", lambda *_: []),
    )
    with fake_world(**axes) as mesh, unsharded, unsent, Waits() as waits:
        sizes = model_config(config.model, 257, config.data.sequence_length)
        built, attention = shard_model(sizes, config, mesh, torch.float32)
        attention.kernel = Dense()
        store = TokenStore.of([Document("some", b"text of some length, " * 4)] * 40, ByteTokenizer())
        rows, _ = load_rows(config, [store], attention, 0)
        data, optimizer = Axis.of(data_mesh(mesh)), AdamW(built.parameters(), foreach=True)
        run = Run(config, DEVICE, data, batch_mesh(mesh), built, optimizer, rows, rows, {})
        train_step(run, 1, [next(rows) for _ in range(config.train.accumulation)])
    return waits.found


MODEL = ModelConfig(dim=32, layers=2, heads=8, kv_heads=4, hidden_dim=48, vocab_size=257)
ROWS = DataConfig(sequence_length=64, global_batch_size=2)
LAYER, OUTPUT = (Checkpointing(policy, chunk=8) for policy in ("layer", "attention_output"))
FOUR, TWO_BY_TWO = {"ring": 4}, {"ring": 2, "ulysses": 2}
CASES = {
    "ring, none": ("ring", FOUR, Checkpointing(), {}),
    "token_ring": ("token_ring", FOUR, LAYER, {}),
    "wallfacer": ("wallfacer", FOUR, LAYER, {}),
    "all_gather, tiled": ("all_gather", FOUR, Checkpointing(tiled=True, chunk=8), {}),
    "ulysses, offloaded": ("ulysses", {"ulysses": 4}, replace(LAYER, offload=True), {}),
    "usp, documents": ("usp", TWO_BY_TWO, OUTPUT, {"data": replace(ROWS, documents=True, reset_positions=True)}),
    "usp, balanced": ("usp", TWO_BY_TWO, OUTPUT, {"data": replace(ROWS, documents=True, layout="balanced")}),
    "upipe": ("upipe", {"ulysses": 4}, LAYER, {}),
    "upipe, offloaded": ("upipe+ring", TWO_BY_TWO, replace(OUTPUT, offload=True), {}),
    "upipe, none": ("upipe", {"ulysses": 2}, Checkpointing(), {"train": TrainConfig(device="cpu", accumulation=2)}),
    "tensor parallel": ("ring", {"ring": 2, "tp": 2}, LAYER, {}),
    "gpt": ("ring", FOUR, OUTPUT, {"model": ModelConfig("gpt", dim=32, layers=2, heads=8, vocab_size=257)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_only_for_its_metrics(name):
    attention, axes, checkpointing, others = CASES[name]
    parallel = ParallelConfig(attention=attention, **axes)
    config = {"model": MODEL, "data": ROWS, "parallel": parallel, "checkpointing": checkpointing, **others}
    actual = waits_of_a_step(config, **axes)
    assert {(what, line.partition("(")[0]) for what, line in actual} == {("item", "step.py: result = StepResult")}, (
        actual
    )
    assert actual.total() == 2
