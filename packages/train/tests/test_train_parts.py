"""Parts of the trainer without ranks: configuration, mesh axes, device choice and log lines."""

from math import prod

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.data.console import parse
from armillary.train import Config, ParallelConfig, TrainConfig
from armillary.train.device import choose_device
from armillary.train.internal import batch_mask, choose_axes
from armillary.train.metrics import StepMetrics


def test_whole_numbers_are_read_as_people_write_them():
    words = "--data.sequence-length 64k --train.steps 1Ki --parallel.ring 1_0 --log.profile 1k 2k --train.seed 0"
    config = parse(words.split(), Config, "armillary-train")
    assert (config.data.sequence_length, config.train.steps, config.parallel.ring) == (64_000, 1024, 10)
    assert (config.log.profile, config.train.seed) == ((1000, 2000), 0)
    assert parse([], Config, "armillary-train") == Config()


@pytest.mark.parametrize(
    ("axes", "world", "expected"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 2, (1, 1, 2, 1, 1)),
        ({}, 8, (1, 1, 4, 2, 1)),
        ({}, 16, (1, 1, 4, 4, 1)),
        ({"shard": 2}, 8, (1, 2, 2, 2, 1)),
        ({"ring": 1}, 4, (1, 1, 1, 4, 1)),
        ({"replicate": 2, "ring": 2, "ulysses": 1}, 4, (2, 1, 2, 1, 1)),
        ({"ring": 3}, 4, (1, 1, 3, 1, 1)),
        ({"tp": 2}, 8, (1, 1, 2, 2, 2)),
    ],
)
def test_open_axes_take_the_remaining_ranks(axes, world, expected):
    assert tuple(choose_axes(Config(parallel=ParallelConfig(**axes)), world).values()) == expected


@pytest.mark.parametrize(
    ("flags", "node", "expected"),
    [
        ({"cp": 8}, None, (2, 4)),  # 8 heads and 4 key heads
        ({"cp": 8}, 2, (4, 2)),
        ({"cp": 8, "tp": 2}, 16, (4, 2)),
        ({"cp": 6, "shard": 2}, None, (3, 2)),
        ({"cp": 3}, None, (3, 1)),
        ({"cp": 8}, 6, (4, 2)),  # a ulysses group of 4 would span two nodes
    ],
)
def test_a_context_parallel_degree_is_split_by_heads_and_nodes(monkeypatch, flags, node, expected):
    if node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    config = Config(parallel=ParallelConfig(**flags))
    axes = choose_axes(config, prod(flags.values()))
    assert (axes["ring"], axes["ulysses"]) == expected and prod(axes.values()) == prod(flags.values())


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that simulates a machine's GPUs for one rank."""

    def make(gpus: int, ranks: int, rank: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    return make


def test_each_rank_uses_its_local_gpu_and_all_the_cpu_if_gpus_are_too_few(machine):
    for rank in range(4):
        machine(4, 4, rank)
        assert choose_device(TrainConfig()) == torch.device("cuda", rank)
        assert choose_device(TrainConfig(device="cpu")) == torch.device("cpu")
        for gpus in (0, 1, 3):
            machine(gpus, 4, rank)
            assert choose_device(TrainConfig()) == torch.device("cpu")
            with pytest.raises(ValueError, match=f"4 ranks on this machine, which has {gpus} GPUs; use cpu or auto"):
                choose_device(TrainConfig(device="cuda"))


def test_format_of_the_log_line():
    line = StepMetrics(10, 2.34564, 1.5, 1e-3, 2**30, 1234.4, 0.0123, None).line()
    assert line == "step: 10 loss: 2.3456 grad_norm: 1.5000 lr: 1.00e-03 memory: 1.00GiB tps/rank: 1,234"
    assert StepMetrics(1, 1.0, 1.0, 1.0, 0, 1.0, 400.0, 0.4041).line().endswith("tflops/rank: 400 mfu: 40.4%")


def test_documents_of_a_row_see_each_other_unless_they_are_to_be_masked():
    documents = ((0, 3, 8),)
    assert batch_mask(documents, None, within_documents=False) == AttentionMask()
    assert batch_mask(documents, None, within_documents=True) == AttentionMask(documents=documents)
