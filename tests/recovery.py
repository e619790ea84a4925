"""A small run on 4 ranks under torchrun, and its comparison with a run without failures."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from launches import TRAINER, Launch, agent

from armillary.train.checkpoint.tensors_and_manifest import Manifest, SavedTensors

STEPS = 16
SMALL = (
    "--model.dim 32 --model.layers 1 --model.heads 4 --model.kv-heads 2 --model.hidden-dim 64 --data.path text.txt "
    "--data.sequence-length 64 --data.global-batch-size 4 --data.validation-fraction 0.5 --validation.batches 1 "
    "--log.every 1 "
    f"--validation.every 8 --save.every 4 --log.no-plot --train.device cpu --train.steps {STEPS}"
).split()


def folder(parent: Path, name: str) -> Path:
    """Creates a folder with a text to train on."""
    path = parent / name
    path.mkdir()
    (path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(2000)))
    return path


def training(*options: str, flags: Sequence[str] = SMALL, script: str = TRAINER) -> Callable[[], None]:
    """Returns a function that runs torchrun with 4 ranks."""
    return agent("--nproc-per-node", "4", *options, flags=flags, script=script)


def losses(printed: str) -> dict[int, str]:
    """Returns the losses by step, as printed last if a step was trained twice."""
    return {int(step): loss for step, loss in re.findall(r"^step: (\d+) loss: (\S+)", printed, re.MULTILINE)}


def cause(printed: str) -> str:
    """Returns the last line of torchrun's report, which is the cause of the failure."""
    *_, cause, border = (line.strip() for line in printed.strip().splitlines())
    assert set(border) == {"="}, printed
    return cause


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the last checkpoint: weights, optimizer state and random states."""
    folder = run_folder / f"outputs/checkpoint/step-{STEPS}"
    files = Manifest.read(folder).files
    return {
        f"{prefix}.{name}": tensor
        for prefix in ("model", "optimizer", "random")
        for name, tensor in SavedTensors(folder, files).read(prefix).items()
    }


def assert_same_end(run_folder: Path, printed: str, undisturbed: tuple[Path, str]) -> None:
    """Asserts that all losses and tensors equal those of a run without failures."""
    expected, actual = weights(undisturbed[0]), weights(run_folder)
    assert losses(printed) == losses(undisturbed[1])
    assert expected.keys() == actual.keys() and len(expected) > 20
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []


def run_undisturbed(parent: Path) -> tuple[Path, str]:
    """Trains without a failure; returns the folder and the output."""
    run_folder = folder(parent, "undisturbed")
    with Launch(training(), run_folder) as launch:
        assert launch.wait() == 0, launch.printed
        assert list(losses(launch.printed)) == list(range(1, STEPS + 1))
        return run_folder, launch.printed
