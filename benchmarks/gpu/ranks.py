"""Every attention method on several ranks compared with the float64 oracle, and a run of the trainer on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from armillary.core.testing import STAGED, World
from armillary.models import LlamaConfig
from conformance import METHODS, Trial, cases, compositions
from conformance.run import run
from gpu.arithmetic import step_flops
from gpu.check import Check, Row, Setting
from gpu.launch import environment

ON_ONE_GPU = 4
"""Ranks that share one GPU."""


def check_conformance(setting: Setting) -> Iterator[Row]:
    """Rounds of one case of each method on each of its meshes, until the time limit.

    On NCCL if there are several GPUs, else with four ranks on one GPU, which send through host memory.
    """
    several = setting.gpus > 1 and not setting.fake
    ranks, backend = (setting.ranks, "nccl") if several else (ON_ONE_GPU, STAGED)
    every = compositions(list(METHODS), [ranks])
    tried, failed, end = 0, list[str](), time.monotonic() + 0.8 * setting.seconds
    with World(ranks, backend=backend) as world:
        if several:
            world.run(take_gpu)
        for trials in islice(rounds(every), setting.size(10, 1)):
            for trial, verdict in run(world, trials[: setting.size(None, 4)], setting.device.type):
                tried += 1
                failed += [f"{trial.composition}: {trial.case}: {verdict.failure}"] * bool(verdict.failure)
            if time.monotonic() > end:
                break
    for failure in failed[:20]:
        yield Row(failure, "wrong", passed=False)
    limits = "conformance.limits"
    label = f"failed of {tried} cases of {len(every)} methods and meshes, {ranks} ranks on {backend}"
    yield Row(label, len(failed), "", "0", limits, not failed)


def take_gpu() -> None:
    """Makes this rank's GPU the current one."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def rounds(every: list) -> Iterator[list[Trial]]:
    """Yields rounds with one case of each, different in each round."""
    for number in range(1000):
        several = [cases(brief=i + number * len(every)) for i in range(len(every))]
        yield [Trial(one, some[number % len(some)]) for one, some in zip(every, several, strict=True)]


def check_train(setting: Setting) -> Iterator[Row]:
    """Thirty steps of the trainer under torchrun on all GPUs: the run must exit by itself, and the loss must fall."""
    with TemporaryDirectory() as folder:
        outcome = subprocess.run(
            training(setting, Path(folder)), env=environment(), capture_output=True, text=True, timeout=setting.seconds
        )
        metrics = Path(folder) / "metrics.jsonl"
        lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        losses = [line["loss"] for line in lines if "loss" in line]
    message = "" if outcome.returncode == 0 else f": {' '.join(outcome.stderr.split())[-300:]}"
    yield Row(f"exit code{message}", outcome.returncode, "", "0", "armillary-train", outcome.returncode == 0)
    if losses:
        fell = losses[-1] < losses[0]
        yield Row(f"loss after {len(losses)} steps, of {losses[0]:.4g} at first", losses[-1], "", "lower", "", fell)


def training(setting: Setting, folder: Path) -> list[str]:
    """The command of torchrun (`python -m`) with the trainer on Python's own text."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.ranks}"]
    sizes = ["--data.sequence-length", str(setting.size(32_768, 256)), "--train.steps", str(setting.size(30, 6))]
    ends = ["--validation.every", "1000", "--validation.batches", "1", "--save.every", "1000", "--log.no-plot"]
    places = ["--train.output", str(folder), "--train.device", setting.device.type]
    return [*start, "-m", "armillary.train", *sizes, *ends, *places]


TRAINED, GLOBAL_BATCH = LlamaConfig(vocab_size=1024, dim=128, layers=4, heads=8, kv_heads=4, hidden_dim=352), 4
"""The trainer's default model, with more tokens than the text has, and its default global batch."""


def train_flops(setting: Setting) -> float:
    """All steps, on one GPU."""
    steps, length = setting.size((30, 32_768), (6, 256))
    return steps * GLOBAL_BATCH * step_flops(TRAINED, length)


CHECKS = (
    Check(
        "conformance",
        "Every method on all GPUs, or with four ranks on one, against float64",
        check_conformance,
        holds="errors within each dtype's limits",
        seconds=80,
        nccl=True,
    ),
    Check(
        "train",
        "The trainer on all GPUs",
        check_train,
        holds="ends by itself, with a lower loss",
        seconds=50,
        flops=train_flops,
        nccl=True,
    ),
)
