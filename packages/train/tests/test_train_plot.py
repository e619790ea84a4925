"""Plots of runs: reading metrics, smoothing, and the command."""

import json
import sys

import matplotlib.image
import numpy as np
import pytest

from armillary.train.reporting import journal
from armillary.train.reporting.metrics import StepMetrics
from armillary.train.reporting.plot import moving_average, plot_runs, read_curves
from armillary.train.reporting.plot_cli import main


def write_run(folder, steps=40, bad=None):
    folder.mkdir()
    written = journal.Journal(folder / "metrics.jsonl")
    written.on_resume(0)
    for step in range(1, steps + 1):
        loss = float("nan") if step == bad else 5.0 / step
        written.step(StepMetrics(step, loss, 1.0 / step, 1e-3, 1, 1.0, 1.0, None, 1.0, step))
        if step % 10 == 0:
            written.on_validation(step, {"loss": 5.5 / step, "recall": 0.5})
    written.close()
    return folder


def test_curves_are_read_despite_restarts_bad_steps_and_a_truncated_line(tmp_path):
    folder = write_run(tmp_path / "run", bad=7)
    reopened = journal.Journal(folder / "metrics.jsonl")
    reopened.on_resume(35)
    reopened.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('no record\n{"step": 36, "los')
    curves = read_curves(folder)
    assert curves.steps == list(range(1, 36)) and curves.restarts == [35]
    assert np.isnan(curves.loss[6]) and curves.loss[7] == 5.0 / 8
    assert curves.validation == {10: 0.55, 20: 0.275, 30: 5.5 / 30}
    assert curves.learning_rate == [1e-3] * 35


def test_smoothing_averages_finite_values():
    values = np.array([8.0, 4.0, 3.0, np.nan, 5.0, 7.0])
    assert moving_average(values, 0)[[0, 1, 2, 4, 5]].tolist() == [8.0, 4.0, 3.0, 5.0, 7.0]
    assert moving_average(values, 1).tolist() == [8.0, 5.0, 3.5, 4.0, 6.0, 6.0]
    assert np.isnan(moving_average(np.array([np.nan, np.nan]), 1)).all()


def test_the_command_draws_one_run_or_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, two = write_run(tmp_path / "ring", bad=3), write_run(tmp_path / "upipe", steps=1)
    main([str(one)])
    main([str(one), str(two)])
    main([str(one), "--output", "else.png"])
    assert capsys.readouterr().out.split() == [f"{one}/loss.png", "losses.png", "else.png"]
    for path in (one / "loss.png", tmp_path / "losses.png", tmp_path / "else.png"):
        pixels = matplotlib.image.imread(path)
        assert pixels.shape == (780, 1080, 4)
        assert len(np.unique((255 * pixels).round().astype(np.uint8).view(np.uint32))) > 10  # colours


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "metrics.jsonl"),
        ({"metrics.jsonl": json.dumps({"step": 0, "event": "started"})}, "has no step yet"),
    ],
)
def test_invalid_plots_are_refused_in_one_line(tmp_path, capsys, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    messages = capsys.readouterr().err
    assert stop.value.code == 2 and messages.count("\n") == 1
    assert messages.startswith("armillary-plot: ") and message in messages


def test_without_matplotlib_the_error_names_the_package(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"armillary-train\[plot\]"):
        plot_runs([folder], folder / "loss.png")
    assert not (folder / "loss.png").exists()
