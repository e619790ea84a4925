"""benchmarks/scoreboard: verdicts on contenders that are right, wrong, refuse, hang or crash; and its page."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import AttentionMask, build_attention
from armillary.core.testing import mesh

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "scoreboard"))
from contender import Contender, contenders
from outcome import run
from setting import Setting
from table import cell, markdown

ROOT = Path(__file__).parent.parent
CAUSAL, WINDOW = (Setting.read(f"{mask}/zigzag/8x4/float32/2") for mask in ("causal", "window"))
MARK = "<!-- written by benchmarks/scoreboard: what follows is its table -->\n"


class Twice(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return 2 * dx


class Careless(Contender):
    """A ring that doubles dk and ignores windows."""

    name = "careless"
    layouts = ("zigzag",)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring, setting = build_attention("ring", mesh(ring=2)), self.setting
        return ring(q, Twice.apply(k), v, mask=AttentionMask(setting.causal), layout=self.layout(64, "zigzag"))


class Refusing(Contender):
    name = "refusing"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert not self.setting.causal, "only full attention"
        return q


class Hanging(Contender):
    name = "hanging"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), src=1)
        return q + 0 * (k.sum() + v.sum())


class Crashing(Contender):
    name = "crashing"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        os._exit(3)


@pytest.mark.long  # the verdicts behind docs/scoreboard.md
def test_right_methods_pass_and_wrong_ones_get_their_errors():
    assert [each.outcome for each in run(contenders()["armillary, ring"], [CAUSAL, WINDOW])] == ["right", "right"]
    doubled, unseen = run(Careless, [CAUSAL, WINDOW])
    assert (doubled.outcome, unseen.outcome) == ("wrong", "wrong")
    off = {name: error for name, (error, _) in doubled.errors.items()}
    assert off.pop("dk") == pytest.approx(1, rel=1e-5)  # doubled
    assert set(off) == {"out", "dq", "dv"} and max(off.values()) < 2e-6
    assert min(error for error, _ in unseen.errors.values()) > 0.1


@pytest.mark.long  # the verdicts behind docs/scoreboard.md
def test_a_refusal_hang_or_crash_is_reported_and_the_next_case_runs():
    refused, other = run(Refusing, [CAUSAL, WINDOW])
    assert (refused.outcome, refused.said) == ("refused", "AssertionError: only full attention")
    assert other.outcome == "refused"
    (hung,) = run(Hanging, [CAUSAL], patience=2)
    assert hung.outcome == "hung"
    (crashed,) = run(Crashing, [CAUSAL])
    assert crashed.outcome == "crashed" and re.fullmatch(r"rank [01] died \(exit code 3\)", crashed.said)
    assert cell([refused, other, hung, crashed]) == "2 refused, 1 hung, 1 crashed"


def test_the_page_shows_the_stored_results():
    stored = json.loads((ROOT / "docs/benchmarks/scoreboard.json").read_text())
    assert (ROOT / "docs/scoreboard.md").read_text().partition(MARK)[2] == f"\n{markdown(stored)}"
    assert [each["name"] for each in stored["contenders"]] == list(contenders())
    own_methods = [each for each in stored["contenders"] if each["name"].startswith("armillary")]
    assert {outcome["outcome"] for each in own_methods for outcome in each["outcomes"]} == {"right"}
