"""Traces of steps: contents, choice of steps, and failed writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from training_runs import SMALL, at, train_small

from armillary.core import Trace, span
from armillary.train import Config, LogConfig
from armillary.train.cli import read_command
from armillary.train.profiler import StepTrace

CPU = torch.device("cpu")


def spans(path: Path, rank: int, category: str) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["pid"] == rank and event.get("cat") == category]


def test_a_trace_has_the_second_step_of_all_ranks(worlds, tmp_path):
    path = tmp_path / "traces" / "trace.json"
    config = replace(SMALL, log=LogConfig(trace=path, plot=False))
    worlds(4).run(train_small, at(config, tmp_path / "out", steps=3))
    for rank in range(4):
        labels = [event["name"] for event in spans(path, rank, "label")]
        assert labels[0] == "step 2" and "step 3" not in labels and {"attention", "mlp"} <= {*labels}
        cells = [event["name"].split()[0] for event in spans(path, rank, "compute")]
        assert cells.count("forward") == cells.count("backward") == 2  # blocks in a ring of two
        assert {event["args"]["axis"] for event in spans(path, rank, "exchange")} == {"ring", "ulysses"}
        (step,) = (event for event in spans(path, rank, "label") if event["name"] == "step 2")
        for event in spans(path, rank, "compute") + spans(path, rank, "wait"):
            assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-3


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
    (tmp_path / "file").touch()
    _, (message,) = trace_of(LogConfig(trace=tmp_path / "file" / "trace.json"), 1, range(1, 10))
    assert message.startswith(f"{tmp_path}/file/trace.json: not written (")
    names, (message,) = trace_of(log(3), 5, range(5, 10))
    assert names == [] and message == f"{tmp_path}/trace.json: no trace is written, for steps 5 to 9 are none of 3"


def test_the_flag():
    for flag in ("--trace", "--log.trace"):
        assert read_command([flag, "t.json"])[0].run == Config(log=LogConfig(trace=Path("t.json")))
