"""The check that users run on their own methods: right methods pass, wrong tensors are named on every rank."""

import re
from pathlib import Path

import pytest
import torch

from armillary.attention import AttentionMask, Local, Ring, Ulysses
from armillary.check import CheckedTensor, MethodReport, check_method
from armillary.core.testing import mesh


class ScaledKeyGradient(Ring):
    def backward(self, dout, saved, spec):
        dq, dk, dv = super().backward(dout, saved, spec)
        return dq, dk * 1.0001, dv


class NoisyOut(Local):
    calls = 0

    def forward(self, q, k, v, spec):
        out, saved = super().forward(q, k, v, spec)
        NoisyOut.calls += 1
        return out + 1e-13 * NoisyOut.calls, saved


def check_right_methods() -> None:
    ranks = mesh(ring=2, ulysses=2)
    for dtype in (torch.float64, torch.float32):
        report = check_method(Ulysses(ranks["ulysses"], inner=Ring(ranks["ring"])), dtype=dtype)
        report.assert_right()
        assert len(report.errors) == 4 * 2 * 5


def wrong_tensors() -> set[str]:
    report = check_method(ScaledKeyGradient(mesh(ring=4)["ring"]), masks={"causal": AttentionMask()})
    with pytest.raises(AssertionError, match="dk"):
        report.assert_right()
    return {checked.tensor for checked in report.errors if checked.error > checked.limit}


def test_right_methods_pass(worlds):
    worlds(4).run(check_right_methods)


def test_a_wrong_gradient_is_named_on_every_rank(worlds):
    assert worlds(4).run(wrong_tensors) == [{"dk"}] * 4


def test_results_that_differ_between_runs_are_named_and_dtypes_without_a_limit_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        check_method(Local(), dtype=torch.bfloat16)
    report = check_method(NoisyOut(), layouts=["contiguous"])
    assert "out" in {name.split(": ")[1] for name in report.differing}
    with pytest.raises(AssertionError, match="out"):
        report.assert_right()


def test_the_example_of_the_readme_runs():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    names = {}
    exec(example, names)
    assert {each.tensor for each in names["report"].errors if each.error > each.limit} == {"dk"}


def test_nan_is_wrong():
    report = MethodReport((CheckedTensor("causal", "zigzag", "dk", float("nan"), limit=1e-12),))
    with pytest.raises(AssertionError, match="causal zigzag: dk"):
        report.assert_right()
