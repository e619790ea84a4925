"""CUDA and NCCL settings of a run, recorded at torch's functions, and their output in a dry run."""

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.attention.internal import FlashAttn3
from armillary.attention.kernels import Dense
from armillary.core.internal import compat
from armillary.models import LlamaConfig
from armillary.models.block import Block
from armillary.train import Config, CudaConfig, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig, build
from armillary.train import device as run_device
from armillary.train.cli import main
from armillary.train.device import CONNECTIONS, cuda_setup, set_allocator

BOUND, AXES = (torch.device("cuda", 3), "nccl"), ("ring", "ulysses", "nodes", "devices")
EXPANDABLE = "expandable_segments:True"
CONFIGS = {
    "by default": (Config(), [EXPANDABLE, BOUND, (AXES, None)]),
    "nothing": (
        Config(cuda=CudaConfig(expandable_segments=False, bind_device=False, high_priority=False)),
        [(None, "nccl"), ((), None)],
    ),
    "few thread blocks": (Config(cuda=CudaConfig(max_ctas=8)), [EXPANDABLE, BOUND, (AXES, 8)]),
    "with the host's tensors": (
        Config(optimizer=OptimizerConfig(cpu_offload=True)),
        [EXPANDABLE, (None, "cpu:gloo,cuda:nccl"), (AXES, None)],
    ),
}


class StopRun(Exception):
    """Raised in place of building the mesh."""


@pytest.fixture
def torch_settings(monkeypatch):
    """Records settings passed to torch, in order, by local rank 3 of a machine with 8 GPUs."""
    settings, current = [], []
    for name, actual in {
        "device_count": lambda: 8,
        "is_initialized": lambda: bool(current),
        "set_device": current.append,
        "current_device": lambda: torch.device(current[-1]).index,
    }.items():
        monkeypatch.setattr(torch.cuda, name, actual)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(CONNECTIONS, "")  # monkeypatch restores it after the run has set it
    for name in ("WORLD_SIZE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compat, "nccl_binds_devices", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id, **_: settings.append((device_id, backend))
    )
    monkeypatch.setattr(build, "check_consistent", lambda *_: None)

    def mesh(*_, high_priority, max_ctas, **__):
        settings.append((high_priority, max_ctas))
        raise StopRun

    monkeypatch.setattr(build, "build_mesh", mesh)
    return settings


@pytest.mark.parametrize("name", CONFIGS)
def test_the_allocator_is_configured_before_any_allocation(torch_settings, name):
    config, expected = CONFIGS[name]
    with pytest.raises(StopRun), build.process_group(config) as device:
        build.prepare(config, device)
    assert torch_settings == expected and device == torch.device("cuda", 3)


@pytest.mark.parametrize(("before", "connections", "queues"), [("", 32, "32"), ("", 4, "4"), ("8", 32, "8")])
def test_work_queues_are_set_before_cuda_starts(torch_settings, monkeypatch, before, connections, queues):
    monkeypatch.setenv(CONNECTIONS, before)
    environments = []
    choose = build.choose_device
    monkeypatch.setattr(
        build, "choose_device", lambda config: environments.append(os.environ[CONNECTIONS]) or choose(config)
    )
    with pytest.raises(StopRun), build.process_group(Config(cuda=CudaConfig(connections=connections))):
        raise StopRun
    assert environments == [queues]


@pytest.mark.parametrize(
    ("name", "value", "settings"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", "backend:native,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", None),
    ],
)
def test_user_settings_of_the_allocator_are_kept(torch_settings, monkeypatch, name, value, settings):
    monkeypatch.setenv(name, value)
    assert cuda_setup(Config(), 1).allocator == settings
    assert cuda_setup(replace(Config(), cuda=CudaConfig(expandable_segments=False)), 1).allocator is None


def test_the_allocator_accepts_its_settings():
    set_allocator("expandable_segments:True")
    with pytest.raises(Exception, match="expandable_segment"):
        set_allocator("expandable_segment:True")


@pytest.mark.parametrize(
    ("chosen", "sm_margin", "ring", "margin"),
    [
        (FlashAttn3(), 4, 1, 4),
        (FlashAttn3(), 0, 8, 0),
        (FlashAttn3(), None, 8, 16),
        (FlashAttn3(), None, 1, 0),
        (Dense(), 4, 8, 0),
        (Dense(), None, 8, 0),
    ],
)
def test_flash_attention_3_leaves_multiprocessors_to_nccl(monkeypatch, chosen, sm_margin, ring, margin):
    monkeypatch.setattr(run_device, "choose_kernel", lambda inputs, named: chosen)
    config = Config(cuda=CudaConfig(sm_margin=sm_margin), parallel=ParallelConfig(kernel="some"))
    kernel = run_device.kernel_with_sm_margin(config, LlamaConfig.debug(), torch.float32, torch.device("cpu"), ring)
    assert kernel == (FlashAttn3(sm_margin=margin) if margin else "some")


def test_a_compiled_graph_leaves_no_margin_by_default():
    assert run_device.sm_margin(Config(parallel=ParallelConfig(compiler="eager")), ring=8) == 0


def test_a_run_uses_the_chosen_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "kernel_with_sm_margin", lambda *_: "dense")
    data = DataConfig(path=(Path(__file__),), sequence_length=64)
    config = Config(train=TrainConfig(device="cpu", output=tmp_path), data=data)
    with build.process_group(config) as device:
        run = build.prepare(config, device)
    assert {block.attention.kernel for block in run.model.modules() if isinstance(block, Block)} == {"dense"}


def dry_run_output(capsys, *flags):
    main(["--dry-run", "--model.vocab-size", "257", *flags])
    return capsys.readouterr().out


def cuda_settings(capsys, *flags):
    return json.loads(dry_run_output(capsys, "--json", *flags))["cuda"]


def test_a_dry_run_prints_cuda_settings(capsys, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", CONNECTIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compat, "nccl_binds_devices", lambda: False)
    names = ("allocator", "device_id", "high_priority", "max_ctas", "sm_margin", "connections")
    default = (EXPANDABLE, "cuda:LOCAL_RANK", ["ring", "ulysses"], None, 0, 32)
    assert cuda_settings(capsys) == dict(zip(names, default, strict=True))
    assert cuda_settings(capsys, "--parallel.ring", "2")["sm_margin"] == 16
    words = "--cuda.no-expandable-segments --cuda.no-bind-device --cuda.no-high-priority"
    flags = [*words.split(), *["--cuda.sm-margin", "4", "--cuda.max-ctas", "8", "--cuda.connections", "16"]]
    assert cuda_settings(capsys, *flags) == dict(zip(names, (None, None, [], 8, 4, 16), strict=True))
    (line,) = [line for line in dry_run_output(capsys, *flags).splitlines() if line.startswith("on CUDA: ")]
    assert all(word in line for word in ("sm_margin 4", "max_ctas 8", "16 work queues"))
    assert "CUDA" not in dry_run_output(capsys, "--train.device", "cpu")


def test_a_dry_run_shows_when_nccl_binds_its_device(capsys, monkeypatch):
    for binds, flag in product((False, True), ("--cuda.no-bind-device", "--optimizer.cpu-offload")):
        monkeypatch.setattr(compat, "nccl_binds_devices", lambda binds=binds: binds)
        assert cuda_settings(capsys, flag)["device_id"] == ("cuda:LOCAL_RANK" if binds else None), (binds, flag)
