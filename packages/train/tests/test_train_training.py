"""Training: accumulation, precisions and bad steps."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import on_mesh

from armillary.attention.call import spec
from armillary.data.prepare import Preparation
from armillary.data.prepare import prepare as prepare_store
from armillary.train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Run,
    SaveConfig,
    TrainConfig,
    prepare,
    process_group,
    train_loop,
)
from armillary.train.cli import main
from armillary.train.loop import BadSteps, validate
from armillary.train.step import StepResult, train_step
from armillary.train.stop_signal import StopSignal


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Config:
    """Documents of many lengths, so that micro-batches differ in their number of labels. One contains a Z."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        text = f"document {i} of sixty: {'tick tock ' * (i % 7)}"
        (folder / f"{i:02}.txt").write_text("a Zebra" if i == 33 else text)
    return Config(
        model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
        data=DataConfig(path=(folder,), sequence_length=50, global_batch_size=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(steps=3, device="cpu", output=tmp_path_factory.mktemp("out")),
    )


def with_options(config: Config, **train_options: Any) -> Config:
    return replace(config, train=replace(config.train, **train_options))


def prepare_run(config: Config) -> Run:
    with process_group(config) as device:
        return prepare(config, device)


def step(run: Run, number: int) -> StepResult:
    return train_step(run, number, [next(run.training) for _ in range(run.config.train.accumulation)])


def losses_of(configs: list[Config]) -> list[list[float]]:
    runs = [prepare_run(config) for config in configs]
    return [[step(run, i + 1).loss for i in range(run.config.train.steps)] for run in runs]


def largest_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


# -- accumulation -----------------------------------------------------------------------------------------------------


def test_accumulation_gives_the_losses_of_one_batch(worlds, small):
    ((full,),) = worlds(1).run(losses_of, [small])
    meshes = [on_mesh(small, ring=2), on_mesh(small, shard=2)]
    configs = [with_options(each, accumulation=n) for each, n in zip(meshes, (2, 4), strict=True)]
    configs += [replace(each, parallel=replace(each.parallel, zero_stage=1)) for each in configs]
    for actual in worlds(2).run(losses_of, configs):
        assert len(actual) == 4 and len(full) == 3
        assert max(largest_difference(losses, full) for losses in actual) < 1e-5


class Collectives(TorchDispatchMode):
    """Dtypes of the inputs of collectives, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, list[set[torch.dtype]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            self.dtypes.setdefault(func.overloadpacket.__name__.strip("_"), []).append({x.dtype for x in tensors})
        return func(*args, **(kwargs or {}))


def collectives_of(config: Config) -> tuple[dict[str, list[set[torch.dtype]]], set[torch.dtype]]:
    """Returns (dtypes sent by each collective of a step, dtypes of parameters and optimizer state)."""
    run = prepare_run(config)
    with Collectives() as collectives:
        step(run, 1)
    state = [x for x in run.optimizer.state.values() for x in x.values() if x.ndim > 0]
    return collectives.dtypes, {x.dtype for x in [*run.model.parameters(), *state]}


def test_zero_stage_1_gathers_and_reduces_once_a_step(worlds, small):
    configs = [with_options(on_mesh(small, shard=2, zero_stage=stage), accumulation=4) for stage in (1, 2)]
    first, second = (worlds(2).run(collectives_of, config)[0][0] for config in configs)
    for name in ("allgather_base", "reduce_scatter_base"):
        assert len(second[name]) == 4 * len(first[name]) > 0


def rows_and_validation(config: Config) -> tuple[list[range], dict[str, float]]:
    run = prepare_run(config)
    return [next(run.training).rows for _ in range(config.train.accumulation)], validate(run)


def test_micro_batches_and_validation_have_the_rows_of_a_step(worlds, small):
    ((_, full),) = worlds(1).run(rows_and_validation, small)
    actual = worlds(2).run(rows_and_validation, with_options(on_mesh(small, shard=2), accumulation=2))
    assert [rows for rows, _ in actual] == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    assert all(values["loss"] == pytest.approx(full["loss"], abs=1e-6) for _, values in actual)


def planning_threads(config: Config) -> list[set[str]]:
    """For each step, names of the threads that computed kernel calls from masks and layouts."""
    run, names, threads = prepare_run(config), list[str](), list[set[str]]()
    kernel_calls = spec.kernel_calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "kernel_calls", lambda *a: names.append(current_thread().name) or kernel_calls(*a))
        for number in range(1, 7):
            batches = [next(run.training)]
            names.clear()
            train_step(run, number, batches)
            threads.append(set(names))
    return threads


def test_attention_of_packed_documents_is_planned_by_the_reader_threads(worlds, small):
    config = replace(small, data=replace(small.data, documents=True, layout="balanced"))
    for threads in worlds(2).run(planning_threads, on_mesh(config, ring=2)):
        assert "MainThread" in threads[0]  # the first call determines heads and kernel
        # Two batches were prefetched before it.
        assert not any("MainThread" in each for each in threads[3:])


# -- precision --------------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_weights_and_gradient_sums_in_float32_and_follows_float32(worlds, small):
    small = on_mesh(with_options(small, steps=5), shard=2)
    half = with_options(small, precision="bfloat16")
    for sent_dtypes, state_dtypes in worlds(2).run(collectives_of, half):
        reduced, gathered = (
            set().union(*(dtypes for name, sent in sent_dtypes.items() if part in name for dtypes in sent))
            for part in ("reduce_scatter", "allgather")
        )
        assert reduced == {torch.float32} == state_dtypes
        assert torch.bfloat16 in gathered
    for losses, exact in worlds(2).run(losses_of, [half, small]):
        assert 1e-6 < largest_difference(losses, exact) < 1e-2


def test_float64_is_used_everywhere_and_meshes_agree(worlds, small):
    float64, float32 = with_options(small, precision="float64"), small
    ((expected, float32_losses),) = worlds(1).run(losses_of, [float64, float32])
    configs = [on_mesh(float64, **axes) for axes in ({"ring": 2}, {"ulysses": 2}, {"shard": 2}, {"tp": 2})]
    for actual in worlds(2).run(losses_of, configs):
        assert max(largest_difference(losses, expected) for losses in actual) < 1e-12
    for sent_dtypes, state_dtypes in worlds(2).run(collectives_of, configs[3]):
        dtypes = set().union(*(dtypes for sent in sent_dtypes.values() for dtypes in sent))
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        assert floats == {torch.float64} == state_dtypes
    assert 1e-9 < largest_difference(expected, float32_losses) < 1e-4  # float32 differs


# -- bad steps --------------------------------------------------------------------------------------------------------


def poison(run: Run, token: int) -> None:
    """Makes the embedding of `token` NaN."""
    table = run.model.get_submodule("model.embed_tokens").weight
    with torch.no_grad():
        full = table.full_tensor()
        full[token] = torch.nan
        table.copy_(distribute_tensor(full, table.device_mesh, table.placements))


def state_bytes(run: Run) -> list[Tensor]:
    """Bytes of the local weights and optimizer state, in which NaN equals NaN."""
    weights = [p for group in run.optimizer.param_groups for p in group["params"]]
    state = [x for states in run.optimizer.state.values() for x in states.values()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in [*weights, *state]]
    return [x.detach().flatten().clone().view(torch.uint8) for x in local]


def run_with_bad_steps(config: Config) -> tuple[list[tuple[bool, bool]], list[str], list[float], list[int]]:
    """Returns (good, state unchanged) of each step, messages, learning rates and the rows with a Z."""
    run, messages = prepare_run(config), list[str]()
    poison(run, ord("Z"))
    bad_steps, outcomes, rates = BadSteps(run, messages.append), list[tuple[bool, bool]](), list[float]()
    steps = [i for i in range(8 * config.train.steps) if has_z(run, i)]
    for number in range(1, config.train.steps + 1):
        before = state_bytes(run)
        batches = [next(run.training) for _ in range(config.train.accumulation)]
        result = train_step(run, number, batches)
        bad_steps.count(number, result, batches)
        outcomes.append((result.good, all(map(torch.equal, before, state_bytes(run)))))
        rates.append(run.optimizer.param_groups[0]["lr"])
    return outcomes, messages, rates, steps


def has_z(run: Run, number: int) -> bool:
    row = run.training.row(number)
    return any(ord("Z") in row.store.read(p.document, p.start, p.start + p.length) for p in row.pieces)


def test_a_skipped_step_changes_no_bit_and_names_rows_and_rank(worlds, small):
    config = with_options(on_mesh(small, shard=2), bad_step="skip", steps=12, accumulation=2)
    actual = worlds(2).run(run_with_bad_steps, config)
    outcomes, messages, rates, rows_with_z = actual[0]
    bad = sorted({row // 8 for row in rows_with_z})
    assert 0 < len(bad) < 12
    assert [good for good, _ in outcomes] == [number not in bad for number in range(12)]
    assert [same for _, same in outcomes] == [number in bad for number in range(12)]
    assert all(a != b for a, b in pairwise(rates))
    for row, line in zip(rows_with_z, messages, strict=True):  # each rank has 2 of the 4 rows of a micro-batch
        assert line.startswith(
            f"step {row // 8 + 1}: loss nan, gradient norm nan; no finite loss on rank {row % 4 // 2}"
        )
        assert f" in row {row} ({config.data.path[0]}, tokens " in line
        assert line.endswith("; skipped, weights unchanged")
    assert actual[1][1] == messages


def test_only_bad_steps_in_a_row_end_a_run(monkeypatch):
    monkeypatch.setattr("armillary.train.loop.describe_bad_rows", lambda *_: "")
    config = Config(train=TrainConfig(bad_step="skip", bad_steps=2))
    bad_steps = BadSteps(SimpleNamespace(config=config), lambda _: None)
    good, bad = StepResult(1.0, 1.0), StepResult(1.0, float("nan"))
    for step, result in enumerate([bad, good, bad, good, bad], 1):
        bad_steps.count(step, result, [])
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        bad_steps.count(6, bad, [])
    with pytest.raises(FloatingPointError, match=r"step 1: loss 1\.0, gradient norm nan"):  # by default the first one
        BadSteps(SimpleNamespace(config=Config()), lambda _: None).count(1, bad, [])


SIZES = {"model.dim": 32, "model.layers": 2, "model.heads": 4, "model.kv-heads": 2, "model.hidden-dim": 48}


def command_line(data: Path, output: Path, **flags: object) -> list[str]:
    """Flags of the command for a small run."""
    values = {"train.device": "cpu", "data.sequence-length": 50, "data.path": data, "train.output": output}
    return ["--log.no-plot", *(f"--{name}={value}" for name, value in (SIZES | values | flags).items())]


def messages_of(argv: list[str]) -> list[str]:
    """Lines on stderr of a command that must exit with 1."""
    messages = io.StringIO()
    with redirect_stderr(messages), redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 1 and "Traceback" not in messages.getvalue()
    return messages.getvalue().splitlines()


def test_a_diverged_run_fails_with_one_line_and_keeps_its_last_good_checkpoint(worlds, small, tmp_path):
    unstable = {"train.bad-step": "skip", "optimizer.lr": "1e30", "optimizer.warmup-steps": 0}
    argv = command_line(small.data.path[0], tmp_path, **unstable, **{"save.every": 1, "save.keep-last": 1})
    for rank, messages in enumerate(worlds(2).run(messages_of, argv)):
        failed, _, failure = messages[-1].partition("FloatingPointError: ")
        assert failed == f"[rank {rank}] armillary-train: failed in step 4: "
        assert failure.startswith("step 4: loss 5.5") and "gradient norm nan" in failure  # norms hide the rest
        assert failure.endswith("; losses are finite on every rank, in rows 12..15, as for 3 steps in a row")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir() if path.is_dir()] == ["step-1"]


def test_corrupt_tokens_end_a_run_with_a_line_that_names_the_place(worlds, small, tmp_path):
    store = tmp_path / "store"
    prepare_store(Preparation(small.data.path, store), workers=1)
    tokens = np.memmap(store / "tokens.bin", np.uint16, "r+")
    tokens[:] = 60_000
    tokens.flush()
    for rank, (line,) in enumerate(worlds(2).run(messages_of, command_line(store, tmp_path / "run"))):
        assert line.startswith(f"[rank {rank}] armillary-train: failed in step 1: DamagedInput: {store}: token ")
        assert re.search(" 60000,.* 257", line)


class StopAfter(StopSignal):
    """Requests a stop after `steps` steps, like a signal."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def is_requested(self, device: torch.device) -> bool:
        self.left -= 1
        return self.left < 0


def run_stopped_after(config: Config, steps: int) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        train_loop(prepare_run(config), StopAfter(steps))
    return output.getvalue()


def test_a_run_stopped_after_a_bad_step_keeps_older_checkpoints_and_exports_nothing(worlds, small, tmp_path):
    blown_up = replace(small.optimizer, lr=1e30, warmup_steps=0)
    config = replace(with_options(small, steps=5, output=tmp_path, bad_step="skip"), optimizer=blown_up)
    config = replace(config, save=SaveConfig(every=1, keep_last=1, export=True))
    (output,) = worlds(1).run(run_stopped_after, config, 3)
    assert "step 2: loss" in output and "step 3: loss" in output
    assert "step 3 of 5" in output
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1", "step-3"]
    assert not (tmp_path / "export").exists()
    # A run with fewer steps than were already trained does only the work of the last step.
    (output,) = worlds(1).run(run_stopped_after, with_options(config, steps=2), 9)
    assert output.endswith(f"nothing left to train: {tmp_path}/checkpoint/step-3 is the last step\n")
    assert (tmp_path / "export/step-3").exists()
