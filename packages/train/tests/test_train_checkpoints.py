"""Checkpoints of whole runs on gloo ranks: exact resume, other meshes, kills, damage and full disks."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import timedelta
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

import armillary.train
from armillary.core.parts import compat
from armillary.core.testing import RankFailed
from armillary.models import Llama
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Run,
    SaveConfig,
    Summary,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
    trainer,
)
from armillary.train.checkpoint import Checkpoints
from armillary.train.checkpoint.checkpoints import training_state
from armillary.train.checkpoint.export import main as export
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.storage import Manifest, SavedTensors, checkpoint_fault, checksum
from armillary.train.cli import main
from armillary.train.lock import OutputLock
from armillary.train.parts import Ranks, Watchdog
from armillary.train.random_state import random_state
from armillary.train.reporting import Reporter
from armillary.train.step import train_step

RING = ParallelConfig(ring=2, ulysses=1)
TEXT = (Path(armillary.train.__file__).parent,)
"""Small, since reading all of Python's source would take longer than training."""
SMALL = Config(
    model=ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, hidden_dim=48),
    parallel=RING,
    data=DataConfig(path=TEXT, sequence_length=60, global_batch_size=4),
    validation=ValidationConfig(every=20, batches=1),
    save=SaveConfig(every=2, keep_last=3),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=6, accumulation=2, device="cpu"),
)


def at(config: Config, folder: Path, **changes) -> Config:
    return replace(config, train=replace(config.train, output=folder, **changes))


def local_state(run: Run) -> dict[str, torch.Tensor]:
    """Returns the local shards of the model and of the optimizer state."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    optimizer_state = {
        f"{name} {key}": value for name, state in optimizer["state"].items() for key, value in state.items()
    }
    return {n: (x.to_local() if isinstance(x, DTensor) else x).clone() for n, x in {**model, **optimizer_state}.items()}


def trained(config: Config, seed: int) -> tuple[Summary, str, dict[str, torch.Tensor], list[float]]:
    """Trains from random states of `seed`. Also returns the next random numbers."""
    output = io.StringIO()
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
        pytest.param(replace(SMALL, parallel=ParallelConfig(2, 1, 2, 1)), marks=pytest.mark.long),
    ],
    ids=["ring, asynchronous", "tensor parallel, on the host, on the spot", "replicas"],
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
    [
        pytest.param(4, ParallelConfig(shard=2, ring=1, ulysses=2), marks=pytest.mark.long),
        (4, ParallelConfig(replicate=2, ring=1, tp=2)),
        (2, ParallelConfig(shard=2)),
        (1, ParallelConfig()),
        pytest.param(
            8, ParallelConfig(shard=2, ring=2, ulysses=1, tp=2), marks=pytest.mark.long
        ),  # 257 rows over tp, then over 4 ranks
    ],
    ids=str,
)
def test_another_mesh_resumes_with_the_same_losses(worlds, reference, tmp_path, ranks, parallel):
    results, folder = reference
    after = resumed(worlds, ranks, replace(SMALL, parallel=parallel), folder, tmp_path)
    differences = [abs(a - b) for a, b in zip(after[0][0].losses, results[0][0].losses[4:], strict=True)]
    assert max(differences) < 1e-6
    drawn = [tuple(result[3]) for result in after]
    assert len(set(drawn)) == ranks
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
    with redirect_stdout(io.StringIO()):
        main(argv)


def losses_and_records(folder: Path) -> tuple[list[float], dict[str, object]]:
    """Returns the losses of a run and the file records of its last checkpoint."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = Manifest.read(folder / "checkpoint/step-4").files
    return [x["loss"] for x in lines if "loss" in x], {name: files[name] for name in files}


def test_the_command_resumes_equally_with_few_saved_inputs(worlds, tmp_path):
    """Losses and weights are bitwise equal, also with compiled blocks."""
    (tmp_path / "fewer.toml").write_text(FEWER)
    flags = (
        "--model.dim 32 --model.layers 3 --model.heads 4 --model.kv-heads 2 --model.hidden-dim 48 --train.device cpu "
        "--parallel.ring 2 --train.steps 4 --save.every 2 --validation.every 20 --validation.batches 1 --log.no-plot"
    )
    common_flags = [*flags.split(), "--data.path", str(TEXT[0]), "--data.sequence-length", "60"]
    policy_flags = {"all": ["--checkpointing.policy", "layer"], "fewer": ["--config", str(tmp_path / "fewer.toml")]}
    for name, flags in policy_flags.items():
        worlds(2).run(run_command, [*common_flags, *flags, "--train.output", str(tmp_path / name)])
    shutil.copytree(tmp_path / "fewer/checkpoint/step-2", tmp_path / "again/checkpoint/step-2")
    worlds(2).run(run_command, [*common_flags, *policy_flags["fewer"], "--train.output", str(tmp_path / "again")])
    (losses, weights), fewer, resumed_run = (losses_and_records(tmp_path / name) for name in ("all", "fewer", "again"))
    assert len(losses) == 4 and len(weights) == 2 and fewer == (losses, weights)
    assert resumed_run == (losses[2:], weights)


# -- kills and damage -------------------------------------------------------------------------------------------------


def killed_while_saving(config: Config) -> None:
    """Kills every rank once its file of step 4 is written and not yet on disk, while training continues."""
    sync = os.fsync

    def kill(descriptor: int) -> None:
        if "step-4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = kill
    trained(config, 0)


def test_a_run_killed_during_a_save_resumes_from_the_previous_checkpoint(worlds, reference, tmp_path):
    with pytest.raises(RankFailed):
        worlds(2).run(killed_while_saving, at(SMALL, tmp_path))
    (lock_file,) = (tmp_path / "lock").glob("*.held")
    run = json.loads(lock_file.read_text())["run"]
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", f"step-4.partial-{run}"]
    for before, after in zip(reference[0], worlds(2).run(trained, at(SMALL, tmp_path), 1), strict=True):
        assert after[0].first_step == 3 and after[0].losses == before[0].losses[2:]
        assert all(torch.equal(after[2][name], before[2][name]) for name in before[2])
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", "step-4", "step-6"]


def test_damaged_checkpoints_are_named_and_the_previous_one_is_loaded(worlds, reference, tmp_path):
    shutil.copytree(reference[1] / "checkpoint", tmp_path / "checkpoint")
    file = tmp_path / "checkpoint/step-6/rank-1.safetensors"
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    os.truncate(tmp_path / "checkpoint/step-4/rank-0.safetensors", 100)
    summary, output, *_ = worlds(2).run(trained, at(SMALL, tmp_path), 1)[0]
    assert summary.losses == reference[0][0][0].losses[2:]
    assert "step-6: file rank-1.safetensors " in output
    assert "step-4: file rank-0.safetensors has 100 " in output and output.count("resuming from step-2") == 2
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", "step-4", "step-6"]  # saved again


def test_copies_and_invalid_manifests_are_skipped(worlds, tmp_path):
    """A copy under another step's name, and manifests with other fields and a valid checksum."""
    config = at(replace(SMALL, parallel=ParallelConfig()), tmp_path, steps=2)
    worlds(1).run(trained, config, 0)
    folder = tmp_path / "checkpoint"
    for step in (7, 8, 40):
        shutil.copytree(folder / "step-2", folder / f"step-{step}")
    fields = json.loads((folder / "step-2/manifest.json").read_text()) | {"step": 8}
    del fields["crc32"], fields["loader"]
    (folder / "step-8/manifest.json").write_text(json.dumps(fields | {"crc32": checksum(fields)}))
    (folder / "step-7/manifest.json").write_text("[]")
    output = worlds(1).run(trained, at(config, tmp_path, steps=3), 0)[0][1]
    assert re.search(f"step-40: .*step 2.*{folder}/step-40.copy.*step-2", output)
    assert re.search(f"step-8: manifest.json: loader: .*{folder}/step-8.damaged", output)
    assert "step-7: manifest.json " in output and "step: 3 " in output
    assert sorted(os.listdir(folder)) == ["step-2", "step-3", "step-40.copy", "step-7.damaged", "step-8.damaged"]


def random_numbers(place: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Returns the saved random states by rank."""
    state = {f"rank-{rank}": random_state(torch.device("cpu")) for rank in range(ranks)}
    SavedTensors(place, Manifest.read(place).files).fill({"random": state})
    return list(state.values())


def test_equal_runs_save_equal_random_states_that_differ_by_rank(worlds, tmp_path):
    config, actual = replace(SMALL, parallel=ParallelConfig(ring=2, ulysses=1)), []
    for seed in (3, 4):  # seeds of the generators before the runs
        output = tmp_path / str(seed)
        worlds(2).run(trained, at(config, output, steps=1), seed)
        actual.append(random_numbers(output / "checkpoint/step-1", 2))
    for first, second in zip(*actual, strict=True):
        assert first.keys() == second.keys() >= {"python", "numpy", "torch"}
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(actual[0][0][name], actual[0][1][name]) for name in ("python", "numpy", "torch"))


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
    config = at(replace(SMALL, parallel=ParallelConfig(ring=2, ulysses=1)), tmp_path / "out")
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text in texts:
        text.write_text("on this host it is " * 50)
    configs = [replace(config, data=replace(config.data, path=(text,))) for text in texts]
    assert all(len(summary.losses) == 6 for summary, *_ in worlds(2).run(trained_on_this_rank, configs))


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
    config = replace(SMALL, parallel=ParallelConfig(ring=2, ulysses=1))
    worlds(2).run(train_during_a_save, at(config, tmp_path), old_torch)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-1", "step-2"]


def no_room(config: Config, disk: bool):
    """Context manager that fills the disk, or lets rank 1 write only small files."""
    rank, filler = dist.get_rank(), config.train.output / "filler"

    class NoRoom:
        def __enter__(self):
            dist.barrier()
            if disk and rank == 0:
                with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                    while file.write(bytes(4096)):
                        pass
            if not disk and rank == 1:
                self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self.limits[1]))
            dist.barrier()

        def __exit__(self, *_):
            if disk and rank == 0:
                filler.unlink()
            if not disk and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
            dist.barrier()

    return NoRoom()


def saves_without_room(config: Config, disk: bool) -> list[str]:
    messages: list[str] = []
    with process_group(config) as device:
        run = prepare(config, device)
        with OutputLock(config.train.output, print) as lock, Checkpoints(run, lock, messages.append) as saved:
            assert saved.restore() == 0
            saved.start(1)
            saved._wait_for_save()
            with no_room(config, disk):
                saved.start(2)
                saved._wait_for_save()
            assert saved.folder.names() == ["step-1"] and checkpoint_fault(saved.folder, 1) is None
            dist.barrier()  # all ranks have looked
            saved.start(3)
            saved._wait_for_save()
            with no_room(config, disk), pytest.raises(OSError, match=r"checkpoint/step-4: .*(No space|too large)"):
                saved.finish(4)
            assert sorted(saved.folder.names()) == ["step-1", "step-3"] and checkpoint_fault(saved.folder, 3) is None
            dist.barrier()  # all ranks have looked
            assert saved.finish(5) == saved.folder.path_of(5)
    return messages


@pytest.mark.parametrize("disk", [True, False], ids=["a full disk", "one rank"])
def test_a_failed_save_keeps_earlier_checkpoints_and_the_next_save_succeeds(worlds, tmp_path, disk):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if disk and (os.geteuid() or subprocess.run(mount, capture_output=True).returncode):
        pytest.skip("mounting a small disk takes root")
    try:
        for messages in worlds(2).run(saves_without_room, at(SMALL, tmp_path), disk):
            (line,) = [line for line in messages if "waited" not in line]
            assert line.startswith(f"step-2 could not be saved: {tmp_path}/checkpoint/step-2: rank ")
            assert line.endswith("; training continues, and earlier checkpoints are kept")
            assert ("No space left on device" if disk else "rank 1: [Errno 27] File too large") in line
    finally:
        if disk:
            subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


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
    monkeypatch.setattr(trainer, "train_step", fail)
    record_exit(Checkpoints, "waited for the save"), record_exit(Reporter, "waited for sinks")
    config = at(replace(SMALL, parallel=ParallelConfig(ring=1, ulysses=1)), tmp_path)
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


def missing_rank() -> str:
    ranks, messages = Ranks(timedelta(minutes=5)), ""
    ranks.timeout = timedelta(seconds=1)  # connecting may take longer
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as error:
            ranks.on_all(lambda: None)
        messages = str(error.value)
    dist.barrier()
    return messages


def test_a_missing_rank_is_named(worlds):
    assert "Ranks 1 " in worlds(2).run(missing_rank)[0]


def error_without_a_message() -> str:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise MemoryError

    ranks = Ranks(timedelta(minutes=5))
    with pytest.raises(RuntimeError) as error:
        ranks.on_all(fail)
    ranks.close()
    return str(error.value)


def test_an_error_without_a_message_is_named_by_its_type(worlds):
    assert all("rank 1: MemoryError" in message for message in worlds(2).run(error_without_a_message))


# -- export -----------------------------------------------------------------------------------------------------------


def logits(run: Run, model: Llama) -> torch.Tensor:
    tokens = torch.arange(60).reshape(1, 60)
    positions = torch.arange(60)
    layout = run.training.batch(0).layout
    with torch.no_grad():
        return model(tokens, positions=positions, layout=layout)


def exported_logits(config: Config, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with process_group(config) as device, redirect_stdout(io.StringIO()):
        run = prepare(config, device)
        place = train_loop(run).checkpoint
        export([str(place), str(folder)])
    actual = Llama.from_pretrained(folder, attention=run.model.model.layers[0].attention)
    return logits(run, run.model), logits(run, actual)


def test_an_exported_model_has_the_logits_of_the_trained_one(worlds, tmp_path):
    config = replace(SMALL, parallel=ParallelConfig())
    ((expected, actual),) = worlds(1).run(exported_logits, at(config, tmp_path / "run", steps=2), tmp_path / "hf")
    assert expected.shape == (1, 60, 257) and torch.equal(actual, expected)


def full_weights(config: Config) -> dict[str, torch.Tensor]:
    with process_group(config) as device, redirect_stdout(io.StringIO()):
        run = prepare(config, device)
        train_loop(run)
    return {name: x.full_tensor() for name, x in get_model_state_dict(run.model).items()}


def test_weights_of_any_mesh_are_exported_by_the_run_and_by_the_command(worlds, tmp_path):
    config = replace(SMALL, parallel=ParallelConfig(tp=2, ring=2, ulysses=1), save=SaveConfig(export=True))
    expected = worlds(4).run(full_weights, at(config, tmp_path, steps=2))[0]
    checkpoint = str(tmp_path / "checkpoint/step-2")
    export([checkpoint, str(tmp_path / "half"), "--dtype", "bfloat16"])
    for folder, dtype in {"export/step-2": torch.float32, "half": torch.bfloat16}.items():
        actual = load_file(tmp_path / folder / "model.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name].to(dtype)) for name in expected)
