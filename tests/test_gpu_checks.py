"""benchmarks/gpu: rehearsal of its checks without a GPU, verdicts on wrong results, time-outs and exit codes."""

import json
import re
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from gpu import command
from gpu.check import ASSUMED_FLOPS, Check, Row, Setting, correct, not_run
from gpu.device import CpuDevice

SLOW = ("compile", "hang", "length", "memory", "offload", "train", "upipe-memory")
"""Checks that are not rehearsed here, because they take seconds: compilers, simulations, launchers, many steps."""
AMPLE = ("--minutes", "1000")
"""Time limits of a rehearsal that other work on the machine cannot exhaust."""


@pytest.mark.parametrize("name", [name for name in command.ORDER if name not in SLOW])
def test_every_check_can_be_rehearsed(name, tmp_path, capsys):
    assert command.main([name, "--here", "--fake", *AMPLE, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"gpu-{name}.json").read_text())["rows"]
    assert rows and all(list(row) == ["what", "measured", "unit", "bar", "source", "passed"] for row in rows)
    assert "a rehearsal" in (tmp_path / f"gpu-{name}.md").read_text()
    assert "1 of 1 checks passed" in capsys.readouterr().out


def test_arithmetic_fits_into_the_time_limits_on_an_h100():
    setting, checks = Setting(CpuDevice(), fake=False), command.checks()
    seconds = {name: check.flops(setting) / ASSUMED_FLOPS for name, check in checks.items()}
    assert [name for name, check in checks.items() if seconds[name] > check.seconds] == []
    # Closed forms that count steps would fall to nothing if a check lost them.
    assert all(seconds[name] > 5 for name in ("mfu", "share", "length", "offload", "baseline", "fsdp"))


def test_order_lists_all_checks_and_a_session_has_time_for_them():
    checks = command.checks()
    every = [check for module in command.MODULES for check in import_module(f"gpu.{module}").CHECKS]
    assert sorted(check.name for check in every) == sorted(command.ORDER) == sorted(checks)
    assert list(checks) == list(command.ORDER) and all(check.holds for check in checks.values())
    assert sum(check.seconds * (2 if check.nccl else 1) for check in every) <= 60 * command.SESSION


def test_a_table_ends_a_session(tmp_path, capsys):
    """One check runs in a process of its own; another session has no time for it."""
    assert command.main(["streams", "--fake", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    table = [line.split() for line in output.splitlines() if "told" in line or "verdict" in line]
    assert table[0] == ["check", "must", "hold", "measured", "verdict", "seconds"] and table[1][0] == "streams"
    assert json.loads((tmp_path / "gpu-streams.json").read_text())["rows"]
    assert command.main(["streams", "--fake", "--minutes", "0.001"]) == 0, "a check without enough time must not start"
    assert "left out" in capsys.readouterr().out


def test_session_ends_a_hung_process_with_its_children(monkeypatch, tmp_path):
    options = command.parsed(command.checks(), ["streams", "--fake"])
    (run,) = command.runs([command.checks()["streams"]], options)
    child = tmp_path / "child"
    code = f"import os, subprocess; open('{child}', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); "
    real = subprocess.Popen
    with monkeypatch.context() as patched:
        hanging = [sys.executable, "-c", f"{code}__import__('time').sleep(600)"]
        patched.setattr(subprocess, "Popen", lambda _, **options: real(hanging, **options))
        patched.setattr(command, "STARTING", 3.0)
        outcome = command.apart(run._replace(check=replace(run.check, seconds=0)), options, 1e4)
        assert outcome.verdict == "OUT OF TIME" and "ended after 3 s" in outcome.measured
        patched.setattr(subprocess, "Popen", lambda _, **options: real([sys.executable, "-c", "exit(3)"], **options))
        assert command.apart(run, options, 1e4).verdict == "FAILED"
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child.read_text()}").exists() and "Z" not in status_of(child.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_archive_has_all_reports(tmp_path, capsys):
    archive = tmp_path / "sent" / "reports.tgz"
    for name in ("streams", "pinned"):
        places = ["--out", str(tmp_path / "out"), "--archive", str(archive)]
        assert command.main([name, "--here", "--fake", *AMPLE, *places]) == 0
    with tarfile.open(archive) as packed:
        assert packed.getnames() == [f"gpu-{name}.{kind}" for name in ("pinned", "streams") for kind in ("json", "md")]
        rows = json.load(packed.extractfile("gpu-pinned.json"))["rows"]
    assert "not run" in rows[0]["measured"] and [path.name for path in archive.parent.iterdir()] == ["reports.tgz"]
    with pytest.raises(SystemExit):
        command.main(["streams", "--fake", "--archive", str(archive)])
    assert "--archive" in capsys.readouterr().err


def status_of(process: str) -> str:
    """State of a process; "Z" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


@pytest.mark.parametrize(
    ("passed", "ended", "verdict", "measured"),
    [
        ([True, None, True], True, "passed", "2: 2"),
        ([None, None], True, "told", "1: 1"),
        ([True, False, True], True, "FAILED", "1: 1"),
        ([True], False, "OUT OF TIME", "0: 0; why"),
        ([], True, "left out", "why"),
    ],
)
def test_the_verdict_of_a_check_follows_from_its_rows(passed, ended, verdict, measured):
    rows = [Row(str(i), i, passed=each) for i, each in enumerate(passed)]
    outcome = command.Outcome(rows, 1.0, ended, "why" if not ended or not rows else "")
    assert (outcome.verdict, outcome.measured) == (verdict, measured)


def test_a_check_whose_measurements_are_not_run_is_left_out():
    refused = not_run("something", "why")
    outcome = command.Outcome([refused, refused])
    assert outcome.verdict == "left out" and "not run: why" in outcome.measured
    assert command.Outcome([refused, Row("x", 1.0)]).verdict == "told"


def wrong(_: Setting):
    yield Row("first", 1.0)
    yield correct("second", 0.2, 0.1, "somebody")
    yield correct("third", 0.1, 0.1, "somebody")


def crashing(_: Setting):
    yield correct("first", 0.0, 0.1, "somebody")
    raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")


def endless(_: Setting):
    while True:
        yield Row("again", 1.0)


@pytest.mark.parametrize(("run", "message"), [
    (wrong, r"FAILED second: 0\.2 \(at most 0\.1; somebody\)"),
    (crashing, "FAILED made up .*pydantic"),
    (endless, "stopped after 0 s"),
], ids=["wrong", "crashing", "endless"])  # fmt: skip
def test_failing_and_endless_checks_exit_with_1(run, message, monkeypatch, capsys):
    seconds = 600 if run is not endless else 0
    monkeypatch.setattr(command, "checks", lambda: {"made up": Check("made up", "Something", run, "much", seconds)})
    assert command.main(["--fake", "--here"]) == 1
    assert re.search(message, capsys.readouterr().out)


def test_speeds_are_checked_only_on_a_gpu_and_errors_everywhere():
    rehearsal, real = Setting(CpuDevice(), fake=True), Setting(CpuDevice(), fake=False)
    assert rehearsal.at_least("x", 1.0, 2.0, "", "").passed is None
    assert [real.at_least("x", x, 2.0, "", "").passed for x in (1.0, 2.0)] == [False, True]
    assert [real.at_most("x", x, 2.0, "", "").passed for x in (2.0, 2.1)] == [True, False]
    assert not correct("x", float("nan"), 1.0, "").passed


def test_missing_gpu_unknown_check_or_old_torch_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2 and "--fake" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command.main(["kernel"])
    assert ended.value.code == 2 and re.search("kernel.*groups, kernels", capsys.readouterr().err)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    assert command.main(["--fake"]) == 2 and "2.11 or newer" in capsys.readouterr().err
