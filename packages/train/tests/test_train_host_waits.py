"""In a training step the host waits for the device only to read metrics, for every method and checkpoint policy.

Torch's "meta" device stands for a GPU and "cpu" for the host. Ops that would synchronize on a GPU need a value of a
meta tensor, or copy between the two devices without `non_blocking`.
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
from armillary.core import Axis
from armillary.core.internal import compat
from armillary.core.testing import fake_world
from armillary.data import ByteTokenizer, Document, TokenStore
from armillary.models import Checkpointing
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig, Run, TrainConfig
from armillary.train.axes import data_mesh
from armillary.train.config import model_config
from armillary.train.internal import load_rows, shard_model
from armillary.train.step import train_step

DEVICE = torch.device("meta")
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero", "equal"}
"""Ops whose result or its shape depends on device values."""


NEEDS_TORCH_2_15 = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="before 2.15 torch builds tensors from Python numbers outside of dispatch modes"
)


class Waits(TorchDispatchMode):
    """Counts synchronizations by (op, our innermost source line)."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        on_device = any(isinstance(x, Tensor) and x.device == DEVICE for x in pytree.tree_leaves((args, kwargs)))
        if name == "_local_scalar_dense" and on_device:
            self.count("item")
            return 1.0 if args[0].is_floating_point() else 1
        if on_device and (
            name in SIZES or (name.startswith("index") and any(map(waits_for_index, index_tensors(args))))
        ):
            self.count(name)
        if on_device and name.startswith("lift"):  # torch.tensor, or a list as an index
            self.count("from numbers")
        if name in ("_to_copy", "copy_") and (devices := devices_of_copy(name, args, kwargs))[0] != devices[1]:
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self.count(f"from {devices[0]} to {devices[1]}")
            if devices[0] == "meta":  # has no values to copy
                return args[0] if name == "copy_" else torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)

    def count(self, op):
        source_lines = [line for line in traceback.extract_stack() if "/src/armillary/" in line.filename]
        line = source_lines[-1] if source_lines else None
        self.counts[op, f"{line.filename.rpartition('/')[2]}: {line.line}" if line else ""] += 1


def index_tensors(args):
    return [x for x in pytree.tree_leaves(args[1:2]) if isinstance(x, Tensor)]


def waits_for_index(x):
    return x.device != DEVICE or x.dtype in (torch.bool, torch.uint8)


def devices_of_copy(name, args, kwargs):
    """Returns the device types (source, destination) of a copy."""
    if name == "copy_":
        return args[1].device.type, args[0].device.type
    return args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type


@pytest.mark.parametrize(
    ("op", "line"),
    [
        pytest.param("from numbers", lambda x: torch.tensor([1, 2], device=x.device), marks=NEEDS_TORCH_2_15),
        ("item", lambda x: float(x[0])),
        ("item", lambda x: bool(x[0] > 0)),
        ("from cpu to meta", lambda x: torch.zeros(3).to(x.device)),
        ("from meta to cpu", lambda x: x.cpu()),
        ("index", lambda x: x[torch.tensor([1])]),
        ("index", lambda x: x.index_put_((torch.tensor([1]),), x[:1])),
        ("equal", lambda x: torch.equal(x, x)),
    ],
)
def test_synchronizations_are_detected(op, line):
    with Waits() as waits, suppress(RuntimeError, NotImplementedError):  # meta tensors have no values
        line(torch.zeros(3, device=DEVICE))
    assert any(actual.startswith(op) for actual, _ in waits.counts), waits.counts


def waits_of_a_step(config, **axes):
    """Synchronizations of the first step on rank 0 of a fake mesh, without FSDP2, which needs real parameters."""
    model, defaults = sys.modules["armillary.models.parallel.parallelize"], Config(train=TrainConfig(device="cpu"))
    config = replace(defaults, **config)
    without_fsdp, without_sends = (
        patch.object(model, "shard_parameters", lambda *_, **__: None),
        patch.object(compat, "start_batch", lambda *_: []),
    )
    with fake_world(**axes) as mesh, without_fsdp, without_sends, Waits() as waits:
        sizes = model_config(config.model, 257, config.data.sequence_length)
        sharded_model, attention = shard_model(sizes, config, mesh, torch.float32)
        attention.kernel = Dense()
        store = TokenStore.of([Document("some", b"text of some length, " * 4)] * 40, ByteTokenizer())
        rows, _ = load_rows(config, [store], attention, 0)
        data, optimizer = Axis.of(data_mesh(mesh)), AdamW(sharded_model.parameters(), foreach=True)
        run = Run(config, DEVICE, data, sharded_model, optimizer, rows, rows)
        train_step(run, 1, [next(rows) for _ in range(config.train.accumulation)])
    return waits.counts


MODEL = ModelConfig(dim=32, layers=2, heads=8, kv_heads=4, hidden_dim=48, vocab_size=257)
ROWS = DataConfig(sequence_length=64, global_batch_size=2)
LAYER, OUTPUT = (Checkpointing(policy, chunk=8) for policy in ("layer", "attention_output"))
FOUR, TWO_BY_TWO = {"ring": 4}, {"ring": 2, "ulysses": 2}
CASES = {
    "token_ring, none": ("token_ring", FOUR, Checkpointing(), {}),
    "wallfacer": ("wallfacer", FOUR, LAYER, {}),
    "all_gather, tiled": ("all_gather", FOUR, Checkpointing(tiled=True, chunk=8), {}),
    "usp, balanced": ("usp", TWO_BY_TWO, OUTPUT, {"data": replace(ROWS, documents=True, layout="balanced")}),
    "upipe": ("upipe", {"ulysses": 4}, LAYER, {}),
    "upipe, offloaded": ("upipe+ring", TWO_BY_TWO, replace(OUTPUT, offload=True), {}),
    "upipe, none": ("upipe", {"ulysses": 2}, Checkpointing(), {"train": TrainConfig(device="cpu", accumulation=2)}),
    "tensor parallel": ("ring", {"ring": 2, "tp": 2}, LAYER, {}),
    "gpt": ("ring", FOUR, OUTPUT, {"model": ModelConfig("gpt", dim=32, layers=2, heads=8, vocab_size=257)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_synchronizes_only_for_its_metrics(name):
    attention, axes, checkpointing, changes = CASES[name]
    parallel = ParallelConfig(attention=attention, **axes)
    config = {"model": MODEL, "data": ROWS, "parallel": parallel, "checkpointing": checkpointing, **changes}
    actual = waits_of_a_step(config, **axes)
    assert {(op, line.partition("(")[0]) for op, line in actual} == {("item", "step.py: result = StepResult")}, actual
    assert actual.total() == 2
