"""What a run asks of CUDA and NCCL, recorded where torch would be asked; and that a dry run tells it."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from armillary.attention.kernels import Dense, FlashAttn3
from armillary.core import compat
from armillary.models import LlamaConfig
from armillary.models.block import Block
from armillary.train import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig, build, kernels
from armillary.train.cli import main
from armillary.train.config import CudaConfig
from armillary.train.config.check import check
from armillary.train.cuda_setup import cuda_setup

CONFIGS = {
    "by default": (
        Config(),
        ["expandable_segments:True", (torch.device("cuda", 3), "nccl"), ("ring",)],
    ),
    "nothing": (
        Config(cuda=CudaConfig(expandable_segments=False, bind_device=False, high_priority=False)),
        [(None, "nccl"), ()],
    ),
    "with the host's tensors": (
        Config(optimizer=OptimizerConfig(cpu_offload=True)),
        ["expandable_segments:True", (None, "cpu:gloo,cuda:nccl"), ("ring",)],
    ),
}


class Enough(Exception):
    """Ends a run where its mesh would be built."""


@pytest.fixture
def torch_asked(monkeypatch):
    """What torch is asked for, in order, on a machine with 8 GPUs, as local rank 3."""
    asked, current = [], []
    for name, found in {
        "device_count": lambda: 8,
        "is_initialized": lambda: bool(current),
        "set_device": current.append,
        "current_device": lambda: torch.device(current[-1]).index,
    }.items():
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("WORLD_SIZE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compat, "set_allocator", asked.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id, **_: asked.append((device_id, backend)))
    monkeypatch.setattr(build, "check_consistent", lambda *_: None)

    def mesh(*_, high_priority, **__):
        asked.append(high_priority)
        raise Enough

    monkeypatch.setattr(build, "build_mesh", mesh)
    return asked


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_is_asked_before_anything_is_allocated(torch_asked, name):
    config, expected = CONFIGS[name]
    with pytest.raises(Enough), build.process_group(config) as device:
        build.prepare(config, device)
    assert torch_asked == expected and device == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("name", "given", "settings"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", "backend:native,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", None),
    ],
)
def test_what_the_user_has_set_stays(torch_asked, monkeypatch, name, given, settings):
    monkeypatch.setenv(name, given)
    assert cuda_setup(Config()).allocator == settings
    assert cuda_setup(replace(Config(), cuda=CudaConfig(expandable_segments=False))).allocator is None


def test_the_allocator_takes_what_it_is_given():
    compat.set_allocator("expandable_segments:True")
    with pytest.raises(Exception, match="expandable_segment"):
        compat.set_allocator("expandable_segment:True")


@pytest.mark.parametrize(("found", "margin"), [(FlashAttn3(), 4), (FlashAttn3(), 0), (Dense(), 4)])
def test_flash_attention_3_leaves_multiprocessors_to_nccl(monkeypatch, found, margin):
    monkeypatch.setattr(kernels, "choose_kernel", lambda inputs, named: found)
    config = Config(cuda=CudaConfig(sm_margin=margin), parallel=ParallelConfig(kernel="some"))
    given = kernels.kernel_with_margin(config, LlamaConfig.debug(), torch.float32, torch.device("cpu"))
    assert given == (FlashAttn3(sm_margin=4) if margin and isinstance(found, FlashAttn3) else "some")


def test_a_run_attends_with_the_kernel_that_was_found(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "kernel_with_margin", lambda *_: "dense")
    config = Config(train=TrainConfig(device="cpu", output=tmp_path), data=DataConfig(task="copy", sequence_length=64))
    with build.process_group(config) as device:
        run = build.prepare(config, device)
    assert {block.attention.kernel for block in run.model.modules() if isinstance(block, Block)} == {"dense"}


def test_a_compiled_graph_has_no_kernel_with_a_margin():
    config = Config(cuda=CudaConfig(sm_margin=4), parallel=ParallelConfig(compiler="eager"))
    with pytest.raises(ValueError, match=r"--cuda\.sm-margin 4: a compiled graph finds kernels by name"):
        check(config)


def said(capsys, *flags):
    main(["--dry-run", "--model.vocab-size", "257", *flags])
    return capsys.readouterr().out


def test_a_dry_run_tells_what_is_asked_for(capsys, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert (
        "on CUDA: allocator expandable_segments:True, device_id cuda:LOCAL_RANK, ring communicators of high priority, "
        "sm_margin 0\n"
    ) in said(capsys)
    flags = [
        "--cuda.no-expandable-segments",
        "--cuda.no-bind-device",
        "--cuda.no-high-priority",
        "--cuda.sm-margin",
        "4",
    ]
    changed = (
        "on CUDA: allocator as in the environment, device_id none, no communicators of high priority, sm_margin 4\n"
    )
    assert changed in said(capsys, *flags)
    found = json.loads(said(capsys, "--json"))["cuda"]
    assert found["device_id"] == "cuda:LOCAL_RANK" and found["high_priority"] == ["ring"]
    assert "CUDA" not in said(capsys, "--train.device", "cpu")
