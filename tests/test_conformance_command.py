"""`python -m conformance`: its report, failures and exit codes."""

import json
import re

import pytest
import torch
import torch.distributed as dist

from conformance import drawn
from conformance.command import main, parse_arguments
from conformance.run import Verdict


def test_the_command_reports_its_cases(tmp_path, capsys):
    file = tmp_path / "result.json"
    arguments = ["--ranks", "2", "--method", "ring-keys", "ulysses", "--random", "40", "--kind", "strided"]
    assert main([*arguments, "--json", str(file)]) == 0
    messages, actual = capsys.readouterr().out, json.loads(file.read_text())
    ran = sum(row["cases"] for row in actual["rows"])
    assert ran == actual["tried"]["cases"] == actual["tried"]["strided"] > 1
    assert f"[{ran}/{ran}] 0 failed" in messages and f"{ran} cases, 0 failed" in messages
    assert all(0 < row["worst"] < 1 for row in actual["rows"]) and not actual["failures"]


def test_the_command_names_failures_and_returns_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("conformance.run.judge", judge_badly)
    assert main(["--seed", "7", "--case", "0", "1", "2"]) == 1
    messages = capsys.readouterr().out
    assert "3 cases, 3 failed" in messages
    assert re.search(
        rf"^FAILED --seed 7 --case 0: {drawn(7, 0).composition}: B\d.*: dq off by 3 \(limit 1\)$", messages, re.M
    )
    assert re.search(r"^FAILED --seed 7 --case 1: .*: RuntimeError: no$", messages, re.M)


def judge_badly(chunk, device):
    """Raises on one rank for the second case."""
    if dist.get_rank() and any(trial.number == 1 for trial in chunk):
        raise RuntimeError("no")
    return [Verdict(3.0, "dq", "dq off by 3 (limit 1)") for _ in chunk]


def test_the_command_chooses_the_backend_by_the_device(monkeypatch, capsys):
    assert [parse_arguments(words.split()).backend for words in ("", "--backend staged")] == ["gloo", "staged"]
    assert parse_arguments(["--device", "cuda"]).backend == "staged"
    for refused, flag in (("--device cuda --backend gloo", "--backend staged"), ("--kind dtensors", "--kind")):
        with pytest.raises(SystemExit):
            parse_arguments(refused.split())
        assert flag in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2 and "--device cuda" in capsys.readouterr().err
