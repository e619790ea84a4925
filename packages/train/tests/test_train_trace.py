"""Traces of steps: contents, choice of steps, and failed writes."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import armillary.train
from armillary.core import Trace, span
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    SaveConfig,
    TrainConfig,
    prepare,
    process_group,
    train_loop,
)
from armillary.train.cli import read_command
from armillary.train.profiler import StepTrace

TEXT = (Path(armillary.train.__file__).parent,)
"""Training text: reading all of Python's source would take each rank longer than training."""
SMALL = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(path=TEXT, sequence_length=64, global_batch_size=2),
    save=SaveConfig(every=10),
    train=TrainConfig(steps=4, device="cpu"),
)
CPU = torch.device("cpu")


def run(config: Config) -> str:
    output = StringIO()
    with redirect_stdout(output), process_group(config) as device:
        train_loop(prepare(config, device))
    return output.getvalue()


def run_with_trace(worlds, folder: Path, ranks: int, trace: Path, steps: tuple[int, ...] = ()) -> str:
    (folder / "text.txt").write_text("so says the trace, " * 400)
    config = replace(
        SMALL,
        data=replace(SMALL.data, path=(folder / "text.txt",), validation_fraction=0.3),
        log=LogConfig(trace=trace, trace_steps=steps, plot=False),
        train=replace(SMALL.train, output=folder / "out"),
    )
    return worlds(ranks).run(run, config)[0]


def spans(path: Path, rank: int, category: str) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["pid"] == rank and event.get("cat") == category]


def test_a_trace_has_the_second_step_of_all_ranks(worlds, tmp_path):
    path = tmp_path / "traces" / "trace.json"
    run_with_trace(worlds, tmp_path, 4, path)
    for rank in range(4):
        labels = [event["name"] for event in spans(path, rank, "label")]
        assert labels[0] == "step 2" and "step 3" not in labels and {"attention", "mlp"} <= {*labels}
        cells = [event["name"].split()[0] for event in spans(path, rank, "compute")]
        assert cells.count("forward") == cells.count("backward") == 2 * 2  # layers, and blocks in a ring of two
        assert {event["args"]["axis"] for event in spans(path, rank, "exchange")} == {"ring", "ulysses"}
        (step,) = (event for event in spans(path, rank, "label") if event["name"] == "step 2")
        for event in spans(path, rank, "compute") + spans(path, rank, "wait"):
            assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-3


def test_traced_steps_can_be_chosen(worlds, tmp_path):
    run_with_trace(worlds, tmp_path, 1, tmp_path / "trace.json", (1, 3))
    steps = [e["name"] for e in spans(tmp_path / "trace.json", 0, "label") if e["name"].startswith("step")]
    assert steps == ["step 1", "step 3"]


def test_write_failures_are_reported_and_training_continues(worlds, tmp_path):
    (tmp_path / "file").touch()
    output = run_with_trace(worlds, tmp_path, 2, tmp_path / "file" / "trace.json")
    assert f"{tmp_path}/file/trace.json: not written (" in output and "trained 4 steps" in output


def trace_of(log: LogConfig, first: int, steps: Sequence[int], last: int = 9) -> tuple[list[str], list[str]]:
    """Returns (labels, messages) of a trace in a run that makes `steps` of `first` to `last`."""
    messages: list[str] = []
    trace = StepTrace(log.trace, log.trace_steps, CPU, first, last, messages.append)
    for step in steps:
        with trace.step(step), span("inside"):
            pass
    trace.finish()
    assert Trace.current is None
    path = log.trace
    names = [event["name"] for event in spans(path, 0, "label")] if path and path.exists() else []
    return names, messages


def test_traced_steps_after_a_start_or_resume(tmp_path):
    def log(*steps: int) -> LogConfig:
        (tmp_path / "trace.json").unlink(missing_ok=True)
        return LogConfig(trace=tmp_path / "trace.json", trace_steps=steps)

    assert trace_of(log(), 1, range(1, 10)) == (["step 2"], [])
    assert trace_of(log(), 5, range(5, 10)) == (["step 6"], [])
    assert trace_of(log(), 9, [9]) == (["step 9"], [])
    assert trace_of(log(3, 7), 5, range(5, 10)) == (["step 7"], [])
    assert trace_of(log(5, 9), 5, [5, 6]) == (["step 5"], [])  # stopped before the last step
    assert trace_of(LogConfig(), 1, range(1, 10)) == ([], [])
    names, (messages,) = trace_of(log(3), 5, range(5, 10))
    assert names == [] and messages == f"{tmp_path}/trace.json: no trace is written, for steps 5 to 9 are none of 3"


@pytest.mark.parametrize("flag", ["--trace", "--log.trace"])
def test_the_flag(flag):
    assert read_command([flag, "t.json"])[0].run == Config(log=LogConfig(trace=Path("t.json")))
