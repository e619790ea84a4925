"""The picture of a run, from its metrics.jsonl."""

import sys

import matplotlib.image
import numpy as np
import pytest

from armillary.train.logs import Journal, draw_loss
from armillary.train.metrics import StepMetrics


def write_run(folder, losses):
    written = Journal(folder / "metrics.jsonl")
    written.on_resume(0)
    for step, loss in enumerate(losses, 1):
        written.step(StepMetrics(step, loss, 1.0 / step, 1e-3, 1, 1.0, 1.0, None, 1.0, step))
        if step % 10 == 0:
            written.on_validation(step, {"loss": 5.5 / step, "recall": 0.5})
    written.close()
    reopened = Journal(folder / "metrics.jsonl")
    reopened.on_resume(len(losses) - 1)
    reopened.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('no record\n{"step": 36, "los')


@pytest.mark.parametrize("losses", [[5.0, 4.0, float("nan"), *(5 / n for n in range(4, 60))], [float("nan")] * 2])
def test_a_run_is_drawn_despite_restarts_bad_steps_and_a_truncated_line(tmp_path, losses):
    write_run(tmp_path, losses)
    pixels = matplotlib.image.imread(draw_loss(tmp_path))
    assert pixels.shape == (780, 1080, 4)
    assert len(np.unique((255 * pixels).round().astype(np.uint8).view(np.uint32))) > 10  # colours


def test_the_strong_line_is_the_mean_of_finite_losses(tmp_path, monkeypatch):
    write_run(tmp_path, [8.0, 4.0, 3.0, float("nan"), 5.0, 7.0] * 10)  # a step and the one on either side
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda _, __, y, *args, **options: lines.append(y))
    draw_loss(tmp_path)
    assert lines[1][:6].tolist() == [8.0, 5.0, 3.5, 4.0, 6.0, 20 / 3] and lines[1][-1] == 5.0


def test_without_steps_or_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "event": "started"}')
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        draw_loss(tmp_path)
    write_run(tmp_path, [1.0, 1.0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"armillary-train\[plot\]"):
        draw_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()
