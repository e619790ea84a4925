"""Checkpoints of whole runs on gloo ranks: exact resume, other meshes, kills, damage and full disks."""

import json
import os
import random
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.tensor import DTensor
from training_runs import SMALL as PLAIN
from training_runs import TEXT, at, file_size_limit, on_mesh

from armillary.core.internal import compat
from armillary.train import (
    Config,
    OptimizerConfig,
    ParallelConfig,
    Run,
    SaveConfig,
    Summary,
    loop,
    prepare,
    process_group,
    train_loop,
)
from armillary.train.checkpoint import Checkpoints
from armillary.train.checkpoint.checkpoints import training_state
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import Manifest, checkpoint_fault, checksum
from armillary.train.cli import main
from armillary.train.internal import Ranks, Watchdog
from armillary.train.lock import OutputLock
from armillary.train.logs import Reporter
from armillary.train.step import train_step

SMALL = replace(
    on_mesh(PLAIN, ring=2),
    save=SaveConfig(every=2, keep_last=3),
    train=replace(PLAIN.train, accumulation=2),
)


def local_state(run: Run) -> dict[str, torch.Tensor]:
    """Returns the local shards of the model and of the optimizer state."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    optimizer_state = {
        f"{name} {key}": value for name, state in optimizer["state"].items() for key, value in state.items()
    }
    return {n: (x.to_local() if isinstance(x, DTensor) else x).clone() for n, x in {**model, **optimizer_state}.items()}


def trained(config: Config, seed: int) -> tuple[Summary, str, dict[str, torch.Tensor], list[float]]:
    """Trains from random states of `seed`. Also returns the next random numbers."""
    output = StringIO()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed + dist.get_rank())
    with redirect_stdout(output), process_group(config) as device:
        run = prepare(config, device)
        summary = train_loop(run)
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    return summary, output.getvalue(), local_state(run), drawn


def resumed(worlds, ranks: int, config: Config, reference: Path, folder: Path):
    """Resumes step 4 of the reference run in another folder."""
    shutil.copytree(reference / "checkpoint" / "step-4", folder / "checkpoint" / "step-4")
    results = worlds(ranks).run(trained, at(config, folder), 1)
    assert f"resuming from {folder}/checkpoint/step-4" in results[0][1]
    assert all(summary.first_step == 5 and len(summary.losses) == 2 for summary, *_ in results)
    return results


@pytest.fixture(scope="module")
def reference(worlds, tmp_path_factory):
    """A run of six steps with asynchronous saves after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("reference")
    return worlds(2).run(trained, at(SMALL, folder), 0), folder


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(
            SMALL,
            parallel=ParallelConfig(tp=2, shard=2),
            save=SaveConfig(4, asynchronous=False),
            optimizer=OptimizerConfig(cpu_offload=True),
        ),
    ],
    ids=["ring, asynchronous", "tensor parallel, on the host, on the spot"],
)
def test_resuming_is_bit_identical(worlds, reference, tmp_path, config):
    results, folder = reference
    ranks = 2 if config is SMALL else 4
    if config is not SMALL:
        folder = tmp_path / "whole"
        results = worlds(ranks).run(trained, at(config, folder), 0)
    for before, after in zip(results, resumed(worlds, ranks, config, folder, tmp_path / "again"), strict=True):
        assert after[0].losses == before[0].losses[4:]
        assert after[0].validation_loss == before[0].validation_loss
        assert len(before[2]) > 40 and all(torch.equal(after[2][name], before[2][name]) for name in before[2])
        assert after[3] == before[3]
    assert Manifest.read(tmp_path / "again/checkpoint/step-6").tokens == 6 * 4 * 60


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(4, ParallelConfig(replicate=2, ring=1, tp=2)), (2, ParallelConfig(shard=2)), (1, ParallelConfig())],
    ids=["replicas and tp", "shard", "one rank"],
)
def test_another_mesh_resumes_with_the_same_losses(worlds, reference, tmp_path, ranks, parallel):
    results, folder = reference
    after = resumed(worlds, ranks, replace(SMALL, parallel=parallel), folder, tmp_path)
    differences = [abs(a - b) for a, b in zip(after[0][0].losses, results[0][0].losses[4:], strict=True)]
    assert max(differences) < 1e-6
    drawn = [tuple(result[3]) for result in after]
    assert all(len({*numbers}) == ranks for numbers in zip(*drawn, strict=True))  # of each generator
    assert (drawn == [tuple(result[3]) for result in results]) == (
        ranks == 2
    )  # another number of ranks draws from the seed


def test_a_complete_run_is_not_trained_again(worlds, reference):
    results, folder = reference
    resumed = worlds(2).run(trained, at(SMALL, folder), 1)
    assert resumed[0][0].losses == [] and resumed[0][0].checkpoint == folder / "checkpoint" / "step-6"
    assert f"nothing left to train: {folder}/checkpoint/step-6" in resumed[0][1]
    for before, after in zip(results, resumed, strict=True):
        assert all(torch.equal(after[2][name], before[2][name]) for name in before[2])


FEWER = """
[checkpointing]
policy = "attention_output"
offload = true
inputs = 2
outputs = 2
on-device = 1
[parallel]
compiler = "eager"
"""
"""Three blocks: the first saves x on the host, the second out, and the last both on the device."""


def run_command(argv: list[str]) -> None:
    """Runs `armillary-train` from fixed random states."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with redirect_stdout(StringIO()):
        main(argv)


def losses_and_records(folder: Path) -> tuple[list[float], dict[str, object]]:
    """Returns the losses of a run and the file records of its last checkpoint."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x], {**Manifest.read(folder / "checkpoint/step-3").files}


def test_the_command_trains_equally_with_few_saved_inputs(worlds, tmp_path):
    """Losses and weights are bitwise equal, also with compiled blocks."""
    (tmp_path / "fewer.toml").write_text(FEWER)
    flags = (
        "--model.dim 32 --model.layers 3 --model.heads 4 --model.kv-heads 2 --model.hidden-dim 48 --train.device cpu "
        "--parallel.ring 2 --train.steps 3 --validation.every 20 --validation.batches 1 --log.no-plot "
        f"--data.path {TEXT[0]} --data.sequence-length 60"
    )
    for name, policy in {"all": "--checkpointing.policy layer", "few": f"--config {tmp_path}/fewer.toml"}.items():
        worlds(2).run(run_command, [*flags.split(), *policy.split(), "--train.output", str(tmp_path / name)])
    losses, weights = losses_and_records(tmp_path / "all")
    assert len(losses) == 3 and len(weights) == 2 and losses_and_records(tmp_path / "few") == (losses, weights)


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_checkpoints_and_copies_are_named_and_the_previous_one_is_loaded(worlds, reference, tmp_path):
    """Also a copy under another step's name, and manifests with other fields and a valid checksum."""
    folder = Path(shutil.copytree(reference[1] / "checkpoint", tmp_path / "checkpoint"))
    file = folder / "step-6/rank-1.safetensors"
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    os.truncate(folder / "step-4/rank-0.safetensors", 100)
    for step in (7, 8, 40):
        shutil.copytree(folder / "step-2", folder / f"step-{step}")
    fields = json.loads((folder / "step-2/manifest.json").read_text()) | {"step": 8}
    del fields["crc32"], fields["loader"]
    (folder / "step-8/manifest.json").write_text(json.dumps(fields | {"crc32": checksum(fields)}))
    (folder / "step-7/manifest.json").write_text("[]")
    summary, output, *_ = worlds(2).run(trained, at(SMALL, tmp_path), 1)[0]
    assert summary.losses == reference[0][0][0].losses[2:]
    assert re.search(f"step-40: .*step 2.*{folder}/step-40.copy.*step-2", output)
    assert re.search(f"step-8: manifest.json: loader: .*{folder}/step-8.damaged", output)
    assert "step-7: manifest.json " in output and "step-6: file rank-1.safetensors " in output
    assert "step-4: file rank-0.safetensors has 100 " in output and output.count("resuming from step-2") == 5
    kept = {"step-40.copy", "step-7.damaged", "step-8.damaged"}
    assert {*os.listdir(folder)} == {"step-2", "step-4", "step-6", *kept}  # 4 and 6 were saved again


def test_changed_settings_are_printed_once(worlds, tmp_path):
    config = at(replace(SMALL, parallel=ParallelConfig()), tmp_path, steps=1)
    output = worlds(1).run(trained, config, 0)[0][1]
    assert " -> " not in output.partition("step: 1")[0]
    changed = replace(
        at(config, tmp_path, steps=2, precision="bfloat16"),
        optimizer=OptimizerConfig(lr=1e-3),
        data=replace(SMALL.data, documents=True, layout="striped"),
    )
    output = worlds(1).run(trained, changed, 0)[0][1]
    assert output.splitlines()[:6] == [
        f"resuming from {tmp_path}/checkpoint/step-1",
        "  train.steps      1 -> 2",
        "  train.precision  auto -> bfloat16",
        "  data.documents   False -> True",
        "  data.layout      zigzag -> striped",
        "  optimizer.lr     0.003 -> 0.001",
    ]
    step = next(i for i, line in enumerate(output.splitlines()) if line.startswith("step: 2 "))
    labels = [line.partition(":")[0] for line in output.splitlines()[6:step]]  # the default warm-up would not end
    assert labels == ["warm-up", "learning rate of step 2"] and output.count("optimizer.lr ") == 1


def test_ranks_may_read_equal_text_from_other_paths(worlds, tmp_path):
    config = at(SMALL, tmp_path / "out", steps=1)
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text in texts:
        text.write_text("on this host it is " * 50)
    configs = [replace(config, data=replace(config.data, path=(text,))) for text in texts]
    assert all(len(summary.losses) == 1 for summary, *_ in worlds(2).run(trained_on_this_rank, configs))


def trained_on_this_rank(configs: list[Config]):
    return trained(configs[dist.get_rank()], 0)


# -- saves that overlap, and saves that fail --------------------------------------------------------------------------


def weights(place: Path, run: Run) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint, read with torch's default planner."""
    loaded = {"model": {name: torch.zeros_like(x) for name, x in get_model_state_dict(run.model).items()}}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(place)))
    return {name: x.full_tensor() for name, x in loaded["model"].items()}


def close_after_each_copy(patch: pytest.MonkeyPatch) -> None:
    """Lets torch's stager close itself after each copy, as in torch 2.11 and 2.12."""
    stage = DefaultStager.stage

    def stage_and_close(self: DefaultStager, state: dict[str, Any], **options: Any) -> Any:
        copy = stage(self, state, **options)
        self._state_dict_stager._deepcopy_dispatch.clear()
        return copy

    patch.setattr(DefaultStager, "stage", stage_and_close)
    patch.setattr(compat, "stager_is_reusable", lambda: False)


def train_during_a_save(config: Config, old_torch: bool) -> None:
    gate, begin = Event(), CheckpointFolder.begin

    def wait(self: CheckpointFolder, step: int) -> None:
        assert gate.wait(300)
        begin(self, step)

    with process_group(config) as device, pytest.MonkeyPatch.context() as patch:
        run = prepare(config, device)
        if old_torch:
            close_after_each_copy(patch)
        patch.setattr(CheckpointFolder, "begin", wait)
        before = {name: x.full_tensor().clone() for name, x in get_model_state_dict(run.model).items()}
        with OutputLock(config.train.output, print) as lock, Checkpoints(run, lock, print) as saved:
            assert saved.restore() == 0
            saved.start(1)
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.zero_()
            assert saved.folder.steps() == []
            gate.set()
            saved.start(2)  # at most one is in flight
            assert saved.folder.steps()[0] == 1
            assert saved.finish(2) == saved.folder.path_of(2)  # the checkpoint is not written twice
        first, second = (weights(saved.folder.path_of(step), run) for step in (1, 2))
    assert any(x.any() for x in before.values()) and all(torch.equal(first[name], before[name]) for name in before)
    assert not any(x.any() for x in second.values())


@pytest.mark.parametrize("old_torch", [False, True])
def test_a_save_excludes_steps_made_meanwhile(worlds, tmp_path, old_torch):
    worlds(2).run(train_during_a_save, at(SMALL, tmp_path), old_torch)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-1", "step-2"]


@contextmanager
def no_room(ranks: tuple[int, ...]) -> Generator[None]:
    """Lets these ranks write only small files, as on a full disk."""
    dist.barrier()
    with file_size_limit(2000) if dist.get_rank() in ranks else nullcontext():
        yield
    dist.barrier()


def saves_without_room(config: Config, ranks: tuple[int, ...]) -> list[str]:
    messages: list[str] = []
    with process_group(config) as device:
        run = prepare(config, device)
        with OutputLock(config.train.output, print) as lock, Checkpoints(run, lock, messages.append) as saved:
            assert saved.restore() == 0
            saved.start(1)
            saved._wait_for_save()
            with no_room(ranks):
                saved.start(2)
                saved._wait_for_save()
            assert saved.folder.names() == ["step-1"] and checkpoint_fault(saved.folder, 1) is None
            dist.barrier()  # all ranks have looked
            saved.start(3)
            saved._wait_for_save()
            with no_room(ranks), pytest.raises(OSError, match=r"checkpoint/step-4: .*too large"):
                saved.finish(4)
            assert sorted(saved.folder.names()) == ["step-1", "step-3"] and checkpoint_fault(saved.folder, 3) is None
            dist.barrier()  # all ranks have looked
            assert saved.finish(5) == saved.folder.path_of(5)
    return messages


def test_a_failed_save_keeps_earlier_checkpoints_and_the_next_save_succeeds(worlds, tmp_path):
    for ranks in ((1,), (0, 1)):
        folder = tmp_path / str(ranks)
        for messages in worlds(2).run(saves_without_room, at(SMALL, folder), ranks):
            (line,) = [line for line in messages if "waited" not in line]
            assert line.startswith(f"step-2 could not be saved: {folder}/checkpoint/step-2: rank ")
            assert line.endswith("; training continues, and earlier checkpoints are kept")
            assert f"rank {ranks[0]}: [Errno 27] File too large" in line


def test_an_error_is_reported_before_the_waits_for_a_save_and_for_sinks(monkeypatch, tmp_path):
    """A save in flight never ends if a rank is missing, so the other ranks must learn of the error before."""
    events: list[str] = []

    @contextmanager
    def reporting(watchdog: Watchdog) -> Generator[None]:
        try:
            yield
        except ValueError:
            events.append("reported")
            raise

    def record_exit(block: type, event: str) -> None:
        leave = block.__exit__
        monkeypatch.setattr(block, "__exit__", lambda *arguments: events.append(event) or leave(*arguments))

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(Watchdog, "reporting", reporting)
    monkeypatch.setattr(loop, "train_step", fail)
    record_exit(Checkpoints, "waited for the save"), record_exit(Reporter, "waited for sinks")
    config = at(on_mesh(SMALL), tmp_path)
    with process_group(config) as device:
        run = prepare(config, device)
        with pytest.raises(ValueError):
            train_loop(run)
    assert events == ["reported", "waited for the save", "reported", "waited for sinks"]


def early_save_keeps_the_first_step(config: Config) -> bool:
    with process_group(config) as device:
        saved, plain = prepare(config, device), prepare(config, device)
        training_state(saved)
        for run in (saved, plain):
            train_step(run, 1, [next(run.training)])
    first, second = local_state(saved), local_state(plain)
    return all(torch.equal(first[name], second[name]) for name in second)


def test_saving_before_the_first_step_does_not_change_that_step(worlds, tmp_path):
    config = replace(SMALL, parallel=ParallelConfig())
    assert worlds(1).run(early_save_keeps_the_first_step, at(config, tmp_path)) == [True]


def errors_of_ranks() -> tuple[str, str]:
    """Returns the errors if rank 1 raises one without a message, and (on rank 0) if it is missing."""

    def fail() -> None:
        if dist.get_rank() == 1:
            raise MemoryError

    ranks, missing = Ranks(timedelta(minutes=5)), ""
    with pytest.raises(RuntimeError) as unnamed:
        ranks.on_all(fail)
    ranks.timeout = timedelta(seconds=0.5)  # connecting may take longer
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as error:
            ranks.on_all(lambda: None)
        missing = str(error.value)
    dist.barrier()
    return str(unnamed.value), missing


def test_errors_name_the_type_of_one_without_a_message_and_missing_ranks(worlds):
    (first, missing), (second, _) = worlds(2).run(errors_of_ranks)
    assert "rank 1: MemoryError" in first and "rank 1: MemoryError" in second and "Ranks 1 " in missing


# -- export -----------------------------------------------------------------------------------------------------------


def full_weights(config: Config) -> dict[str, torch.Tensor]:
    with process_group(config) as device, redirect_stdout(StringIO()):
        run = prepare(config, device)
        train_loop(run)
    return {name: x.full_tensor() for name, x in get_model_state_dict(run.model).items()}


def test_weights_of_any_mesh_are_exported_by_the_run_and_by_the_command(worlds, tmp_path):
    config = replace(SMALL, parallel=ParallelConfig(tp=2, ring=2, ulysses=1), save=SaveConfig(export=True))
    expected = worlds(4).run(full_weights, at(config, tmp_path, steps=2))[0]
    checkpoint = str(tmp_path / "checkpoint/step-2")
    export([checkpoint, str(tmp_path / "half"), "--dtype", "bfloat16"])
    export([str(tmp_path), str(tmp_path / "newest")])
    dtypes = {"export/step-2": torch.float32, "newest": torch.float32, "half": torch.bfloat16}
    for folder, dtype in dtypes.items():
        actual = load_file(tmp_path / folder / "model.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name].to(dtype)) for name in expected)
