"""Conformance over the backend for ranks that share a GPU, with 4 ranks: on CPU tensors, and on a GPU if present."""

import pytest
import torch

from armillary.core.testing import World
from conformance import METHODS, Trial, cases, compositions, drawn
from conformance.command import main, parse_arguments
from conformance.run import run

pytestmark = pytest.mark.long

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [
    ("cpu", 1),
    pytest.param("cpu", 2, marks=pytest.mark.long),
    pytest.param("cuda", 2, marks=[pytest.mark.gpu, NO_GPU]),
]


@pytest.fixture(scope="module")
def staged():
    with World(4, backend="staged") as world:
        yield world


@pytest.mark.parametrize(("device", "depth"), DEVICES)
def test_every_method_conforms_over_it(staged, device, depth):
    """One case per method, on a GPU one per option; random DTensors, projections and sub-meshes.

    Methods of more than `depth` + 1 parts are left out: their parts send in the same way.
    """
    every = [one for one in compositions(list(METHODS), [4]) if one.method.count("+") <= depth]
    if device == "cpu":
        every = [one for one in every if "-" not in one.method]
    trials = [Trial(one, cases(brief=i)[i % 7]) for i, one in enumerate(every)]
    some = [trial for trial in map(drawn, [7] * 60, range(60)) if trial.composition.ranks in (2, 4)]
    trials += [trial for trial in some if not trial.case.compiled][:8]
    assert any(trial.case.dtensor for trial in trials) and any(trial.case.projected for trial in trials)
    assert not [(trial, verdict) for trial, verdict in run(staged, trials, device) if verdict.failure]


def test_the_command_takes_kinds_of_random_cases_only(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--kind", "dtensors"])
    assert "--kind" in capsys.readouterr().err
    assert parse_arguments(["--random", "5", "--kind", "dtensors"]).kind == ["dtensors"]


def test_the_command_chooses_the_backend_by_the_device(monkeypatch, capsys):
    assert [parse_arguments(words.split()).backend for words in ("", "--backend staged")] == ["gloo", "staged"]
    assert parse_arguments(["--device", "cuda"]).backend == "staged"
    with pytest.raises(SystemExit):
        parse_arguments(["--device", "cuda", "--backend", "gloo"])
    assert "--backend staged" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2 and "--device cuda" in capsys.readouterr().err
