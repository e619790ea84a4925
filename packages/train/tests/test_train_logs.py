"""Reports of a run: log lines, progress bar, metrics.jsonl and trackers. Their failures never stop a run."""

import gzip
import io
import json
import os
import pty
import re
import signal
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import SMALL as PLAIN
from training_runs import at, file_size_limit, train_small

from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    SaveConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)
from armillary.train.device import peak_flops, peak_memory
from armillary.train.logs import GuardedSink, Journal, Reporter, Screen, Sink, read_records
from armillary.train.metrics import StepMetrics, Stopwatch, average

SMALL = replace(
    PLAIN,
    data=replace(PLAIN.data, sequence_length=64, global_batch_size=2),
    validation=ValidationConfig(every=3, batches=1),
    save=SaveConfig(every=3),
    log=LogConfig(),
)


def metrics(step: int, loss: float = 2.0, rate: float = 100.0, seconds: float = 1.0) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 1e-3, 2**30, rate, rate / 100, None, seconds, tokens=100 * step)


def scalars(folder: Path, name: str) -> dict[int, float]:
    """Scalars by step, read by TensorBoard from its event files."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: pytest.approx(event.value, rel=1e-6) for event in events.Scalars(name)}


# -- a whole run ------------------------------------------------------------------------------------------------


def texts(folder: Path) -> DataConfig:
    """A few repetitive documents, whose loss falls fast."""
    path = folder / "texts"
    path.mkdir()
    for i in range(9):
        (path / f"{i}.txt").write_text("so says the journal, " * (50 + i))
    return replace(SMALL.data, path=(path,), validation_fraction=0.3)


class OutputThatStops(io.StringIO):
    """An output that sends SIGTERM to the process at step 9."""

    def write(self, text: str) -> int:
        if text.startswith("step: 9 "):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def run_until_a_signal(config: Config) -> tuple[int, str]:
    output = OutputThatStops()
    with redirect_stdout(output), process_group(config) as device:
        summary = train_loop(prepare(config, device))
    return summary.first_step + len(summary.losses) - 1, output.getvalue()


def test_a_run_writes_metrics_tensorboard_traces_and_a_plot_and_a_longer_one_appends(worlds, tmp_path):
    log = LogConfig(every=4, tensorboard=True, profile=(2, 3, 5))
    config = at(replace(SMALL, data=texts(tmp_path), log=log), tmp_path)
    (summary, output), (_, output_of_rank_1) = worlds(2).run(train_small, config)
    records = list(read_records(tmp_path / "metrics.jsonl"))
    steps = [record for record in records if "loss" in record]
    assert [(record["step"], record["loss"]) for record in steps] == list(enumerate(summary.losses, 1))
    assert [record["tokens"] for record in steps] == [128 * step for step in range(1, 7)]
    assert all(record["seconds"] > 0 and record["time"] > 1.7e9 for record in steps)
    assert sum(record["seconds"] for record in steps) == pytest.approx(summary.seconds)
    validation_losses = {record["step"]: record["validation"]["loss"] for record in records if "validation" in record}
    assert list(validation_losses) == [3, 6] and validation_losses[6] == summary.validation_loss
    events = [(record["event"], record["step"]) for record in records if "event" in record]
    # The first save overlaps with training.
    assert [event for event in events if event[1] == 3] == [("saving", 3), ("saved", 3)]
    assert [event for event in events if event[1] != 3] == [
        ("started", 0),
        ("saving", 6),
        ("saved", 6),
        ("finished", 6),
    ]
    assert scalars(tmp_path / "tb", "train/loss") == dict(enumerate(summary.losses, 1))
    assert scalars(tmp_path / "tb", "validation/loss") == validation_losses
    traces = {path.name for path in (tmp_path / "profile").iterdir()}
    assert traces == {f"step-{step}-rank-{rank}.json.gz" for step in (2, 3, 5) for rank in (0, 1)}
    for trace in traces:
        text = gzip.decompress((tmp_path / "profile" / trace).read_bytes()).decode()
        assert "aten::mm" in text or "aten::linear" in text
        assert len({e["name"] for e in json.loads(text)["traceEvents"] if "ProfilerStep" in e["name"]}) == 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert summary.picture == tmp_path / "loss.png"
    printed_steps = [line.split()[1] for line in output.splitlines() if line.startswith("step: ")]
    assert printed_steps == ["1", "4", "6"] and f"  loss curve   {tmp_path}/loss.png" in output
    assert output_of_rank_1 == ""
    # The longer run ends by a signal.
    (tmp_path / "loss.png").unlink()
    longer = at(replace(config, log=LogConfig(every=3), save=SaveConfig(every=10**6)), tmp_path, steps=1_000_000)
    last_step, output = worlds(1).run(run_until_a_signal, longer)[0]
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records if "loss" in record] == [*range(1, last_step + 1)]
    added = [(record["event"], record["step"]) for record in records if "event" in record][len(events) :]
    saved = [("saving", last_step), ("saved", last_step)]
    assert added == [("resumed", 6), *saved, ("stopped", last_step)] and 9 <= last_step < 1_000_000
    assert (tmp_path / "loss.png").is_file() and f"loss curve   {tmp_path}/loss.png" in output


# -- lines and the bar ------------------------------------------------------------------------------------------


def test_the_stopwatch_excludes_pauses():
    times = iter([10.0, 100.0, 101.0, 102.0])
    watch = Stopwatch(clock=lambda: next(times))
    with watch.pause():
        pass
    watch.count(100)
    watch.count(50)
    assert (watch.tokens, watch.seconds, watch.last_seconds) == (150, 2.0, 1.0)


def test_memory_is_measured_and_an_unknown_peak_is_none():
    assert peak_memory(torch.device("cpu")) > 10 * 2**20
    assert peak_flops(torch.device("cpu")) is None


def test_rates_of_a_line_cover_all_steps_since_the_previous_line():
    steps = [metrics(1, rate=100.0, seconds=3.0), metrics(2, rate=20.0, seconds=1.0)]
    averaged = average(steps)
    assert (averaged.step, averaged.tokens_per_second, averaged.tflops, averaged.utilisation) == (2, 80.0, 0.8, None)
    on_gpu = [replace(step, utilisation=step.tflops) for step in steps]
    assert average(on_gpu).utilisation == pytest.approx(0.8)


def test_lines_are_plain_without_a_terminal(capsys):
    screen = Screen(steps=30, every=10)
    screen.on_resume(12)
    for step in range(13, 31):
        screen.step(metrics(step))
    screen.on_validation(30, {"loss": 1.5, "recall": 0.25})
    screen.print("[not markup]")
    screen.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [metrics(step).line() for step in (13, 20, 30)]
    assert lines[3:] == ["validation: step: 30 loss: 1.5000 recall: 0.2500", "[not markup]"]


def test_a_terminal_shows_a_bar_with_steps_remaining_time_and_loss(monkeypatch):
    reading_end, terminal_end = pty.openpty()
    output: list[bytes] = []
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with open(terminal_end, "w") as terminal:
        reader = threading.Thread(target=lambda: output.extend(iter(lambda: read_some(reading_end), b"")))
        reader.start()
        monkeypatch.setattr(sys, "stdout", terminal)
        screen = Screen(steps=40, every=10)
        screen.on_resume(10)
        for step in range(11, 21):
            screen.step(metrics(step, loss=3.25))
        screen.close()
        monkeypatch.undo()
    reader.join()
    os.close(reading_end)
    text = b"".join(output).decode()
    assert metrics(20, loss=3.25).line() in text
    assert "20/40" in text and "loss 3.2500" in text
    assert re.search(r"left .*?\d\d:\d\d", text)


def read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # the terminal is closed
        return b""


# -- restarts ---------------------------------------------------------------------------------------------------


def report(config: Config, resumed: int, steps: list[int]) -> str:
    output = io.StringIO()
    with redirect_stdout(output), process_group(config), Reporter(config) as reporter:
        reporter.on_resume(resumed)
        for step in steps:
            reporter.step(metrics(step, loss=step + resumed / 100))
            reporter.on_validation(step, {"loss": 1.0})
    return output.getvalue()


def test_a_restart_logs_no_step_twice(worlds, tmp_path):
    log = LogConfig(tensorboard=True, plot=False)
    config = at(replace(SMALL, log=log), tmp_path)
    path = tmp_path / "metrics.jsonl"
    worlds(1).run(report, config, 0, [1, 2, 3, 4, 5])
    path.write_bytes(path.read_bytes() + b'{"step": 6, "lo')  # a write interrupted by a kill
    worlds(1).run(report, config, 3, [4, 5, 6])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["loss"] for r in records if "loss" in r] == [1, 2, 3, 4.03, 5.03, 6.03]
    assert [r["step"] for r in records if "validation" in r] == [1, 2, 3, 4, 5, 6]
    assert [(r["event"], r["step"]) for r in records if "event" in r] == [("started", 0), ("resumed", 3)]
    assert scalars(tmp_path / "tb", "train/loss") == {1: 1, 2: 2, 3: 3, 4: 4.03, 5: 5.03, 6: 6.03}


def test_a_fresh_start_replaces_the_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        journal = Journal(path)
        journal.on_resume(0)
        journal.step(metrics(1))
        journal.close()
    assert [record["step"] for record in read_records(path)] == [0, 0, 1]


def test_numbers_that_are_not_finite_are_null_and_marked(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.step(metrics(1, loss=float("nan")))
    journal.on_validation(1, {"loss": float("inf")})
    journal.step(metrics(2))
    journal.close()
    bad, validated, good = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert bad["loss"] is None and bad["bad"] is True
    assert validated["validation"] == {"loss": None} and validated["bad"] is True
    assert good["loss"] == 2.0 and "bad" not in good


def report_a_failure(config: Config) -> None:
    quiet = redirect_stdout(io.StringIO())
    with quiet, pytest.raises(FloatingPointError), process_group(config), Reporter(config) as reporter:
        reporter.on_resume(0)
        reporter.step(metrics(1, loss=float("nan")))
        raise FloatingPointError("step 2: loss nan")


def test_skipped_steps_and_failures_are_events(worlds, tmp_path):
    config = at(SMALL, tmp_path)
    worlds(1).run(report_a_failure, config)
    events = [r for r in read_records(tmp_path / "metrics.jsonl") if "event" in r]
    assert [(r["event"], r["step"]) for r in events] == [("started", 0), ("skipped", 1), ("failed", 1)]
    assert events[-1]["text"] == "FloatingPointError: step 2: loss nan"


def refused(config: Config) -> str:
    output = io.StringIO()
    with redirect_stdout(output), pytest.raises(ValueError), process_group(config), Reporter(config) as reporter:
        reporter.say("step-3 cannot be read")
        raise ValueError("no checkpoint fits this model")
    return output.getvalue()


def test_a_refused_resume_leaves_its_records_unchanged(worlds, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "lo')
    config = at(replace(SMALL, log=LogConfig(tensorboard=True)), tmp_path)
    assert worlds(1).run(refused, config) == ["step-3 cannot be read\n"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 6, "lo'
    assert not (tmp_path / "tb").exists()


# -- failures of reports do not stop a run ------------------------------------------------------------------------


class HungSink(Sink):
    """A sink that hangs at validation."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        self.go_on.wait()


def test_a_hung_sink_does_not_delay_the_run():
    sink, messages = HungSink(), list[str]()
    guarded = GuardedSink(sink, messages.append, capacity=5)
    guarded.submit(lambda sink: sink.on_validation(1, {}))
    for _ in range(10):
        guarded.submit(lambda _: None)
    assert messages == ["HungSink has 5 reports waiting; more are lost"]
    assert not guarded.flush(0.01)
    guarded.close(0.01)
    sink.go_on.set()
    assert len(messages) == 1


def full_disk(folder: Path) -> tuple[str, list[int]]:
    """A file size limit of 1,000 bytes stands for a full disk for part of the steps."""
    messages: list[str] = []
    journal = Journal(folder / "metrics.jsonl")
    guarded = GuardedSink(journal, messages.append)
    with file_size_limit(1000):
        for step in range(1, 11):
            guarded.submit(lambda sink, step=step: sink.step(metrics(step)))
        guarded.flush(60)
    guarded.submit(lambda sink: sink.step(metrics(11)))
    guarded.close(60)
    return " ".join(messages), [record["step"] for record in read_records(journal.path)]


def test_a_full_disk_is_reported_once_and_later_lines_are_written(worlds, tmp_path):
    messages, steps = worlds(1).run(full_disk, tmp_path)[0]
    assert messages == "Journal OSError: [Errno 27] File too large; training continues"
    assert steps == list(range(1, 12))


# -- optional packages --------------------------------------------------------------------------------------------

STAND_IN = '''
"""A stand-in for Weights & Biases that records the arguments of its functions."""
import json
from pathlib import Path

class Run:
    def __init__(self, dir, id): self.path, self.id = Path(dir) / "wandb-calls.jsonl", id
    def note(self, **call):
        with self.path.open("a") as file: file.write(json.dumps(call) + "\\n")
    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None, goal=None,
                      overwrite=None): self.note(define=name, by=step_metric)
    def log(self, data, step=None, commit=None): self.note(log=data, step=step)
    def finish(self, exit_code=None, quiet=None): self.note(finish=self.id)

def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None,
         mode=None, force=None, anonymous=None, reinit=None, resume=None, resume_from=None, fork_from=None,
         save_code=None, tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None):
    run = Run(dir, id)
    run.note(init=id, project=project, resume=resume, steps=config["train"]["steps"])
    return run
'''


def report_to_stand_in(config: Config, resumed: int, steps: list[int]) -> str:
    sys.path.insert(0, str(config.train.output))
    try:
        return report(config, resumed, steps)
    finally:
        sys.path.remove(str(config.train.output))
        sys.modules.pop("wandb", None)


def test_a_restart_resumes_its_wandb_run(worlds, tmp_path):
    (tmp_path / "wandb.py").write_text(STAND_IN)
    config = at(replace(SMALL, log=LogConfig(wandb="long", plot=False)), tmp_path)
    worlds(1).run(report_to_stand_in, config, 0, [1])
    worlds(1).run(report_to_stand_in, config, 1, [2])
    calls = [json.loads(line) for line in (tmp_path / "wandb-calls.jsonl").read_text().splitlines()]
    init_calls = [call for call in calls if "init" in call]
    identity = (tmp_path / "wandb-id").read_text()
    assert init_calls == [{"init": identity, "project": "long", "resume": "allow", "steps": 6}] * 2
    logged = [call["log"] for call in calls if "log" in call]
    assert [call["step"] for call in logged] == [1, 1, 2, 2]
    assert logged[0]["train/loss"] == 1 and logged[1] == {"step": 1, "validation/loss": 1.0}
    assert sum(call == {"finish": identity} for call in calls) == 2
