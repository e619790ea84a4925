"""Reports of failed ranks, as torchrun prints them."""

import json
import multiprocessing
import os
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from armillary.data.console import exit_on_error, report_failure


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """Returns a function that makes this process rank `rank` of one torchrun."""

    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)  # the tests' process may be a fork

    def become(rank: int, restarts: int = 0, folder: str = "attempt_0") -> None:
        (tmp_path / folder / str(rank)).mkdir(parents=True, exist_ok=True)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": 0}
        variables["TORCHELASTIC_MAX_RESTARTS"] = restarts
        variables["TORCHELASTIC_ERROR_FILE"] = tmp_path / folder / str(rank) / "error.json"
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return become


def printed_by_torchrun(tmp_path, codes: dict[int, int]) -> list[str]:
    """Lines that torchrun prints at its end for ranks with these exit codes, in the order in which they ended."""
    files = {rank: tmp_path / f"attempt_0/{rank}/error.json" for rank in codes}
    failures = {rank: ProcessFailure(rank, 100 + rank, code, str(files[rank])) for rank, code in codes.items()}
    lines = [line.strip() for line in str(ChildFailedError("train", failures)).splitlines()]
    assert set(lines[-1]) == {"="}
    return lines[:-1]


def error_of(action) -> Exception:
    with pytest.raises(Exception) as raised:
        action()
    return raised.value


def test_the_cause_is_printed_last_and_once_when_a_rank_was_killed(torchrun, tmp_path, capsys):
    cause, phase_begin = "missing: rank 0: no heartbeat since step 6", time.time() - 1
    for rank in (2, 1):
        torchrun(rank)
        assert report_failure("train", f"rank {rank} waits", cause, caused_by_peers=True, begin=phase_begin)
    lines = printed_by_torchrun(tmp_path, {0: -9, 1: 1, 2: 1})
    assert lines[-2:] == ["[rank 2] train: rank 2 waits", f"[rank 2] train: {cause}"]
    assert sum(cause in line for line in lines) == 1
    assert sum("rank 2 reports the cause" in line for line in lines) == 1
    assert capsys.readouterr().err == ""


def test_an_error_of_all_ranks_is_printed_once_and_other_errors_are_kept(torchrun, tmp_path, capsys):
    keys = [{"a": 1}, {"a": 1}, {"b": 1}]
    for rank, mapping in enumerate(keys):
        torchrun(rank)
        report_failure("train", "failed in step 3", error=error_of(lambda mapping=mapping: mapping["c"]))
    torchrun(3)
    report_failure("train", "failed in step 3", error=ValueError("first line\nsecond line"))
    lines = printed_by_torchrun(tmp_path, {3: 1, 1: 1, 2: 1, 0: 1})
    assert lines[-1] == "[rank 0] train: failed in step 3: KeyError: 'c'"
    assert sum("KeyError" in line for line in lines) == 1
    assert any("mapping[" in line for line in lines)  # the traceback
    assert "[rank 3] train: failed in step 3: ValueError: first line" in lines and "second line" in lines
    assert capsys.readouterr().err == ""


def test_a_refusal_of_all_ranks_is_one_line_and_another_error_has_a_traceback(torchrun, tmp_path, capsys):
    for rank, error in enumerate((ValueError("--ring 3"), ValueError("--ring 3"), TypeError("of a recipe"))):
        torchrun(rank)
        with pytest.raises(SystemExit) as stop, exit_on_error("train"):
            raise error
        assert stop.value.code == (2 if rank < 2 else 1)
    lines = printed_by_torchrun(tmp_path, {2: 1, 1: 2, 0: 2})
    assert lines[-2:] == ["traceback :", "[rank 0] train: --ring 3"]
    assert sum("--ring 3" in line for line in lines) == 1
    assert sum("raise error" in line for line in lines) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [MemoryError("8 EiB"), RuntimeError("can't allocate memory:\n8 EiB")])
def test_a_lack_of_memory_before_the_work_is_one_line_and_later_on_has_a_traceback(monkeypatch, capsys, error):
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop, exit_on_error("train"):
        raise error
    printed = capsys.readouterr().err
    assert stop.value.code == 1 and printed.count("\n") == 1 and "8 EiB" in printed
    with pytest.raises(type(error)), exit_on_error("train", is_started=lambda: True):
        raise error


def test_before_a_restart_the_cause_is_printed_by_the_first_rank(torchrun, capsys):
    for rank in range(3):
        torchrun(rank, restarts=2)
        report_failure("train", "the cause", caused_by_peers=True)
    assert capsys.readouterr().err == "[rank 0] train: the cause\n"


def test_forked_ranks_all_record_the_cause_and_the_first_one_prints_it(torchrun, tmp_path, monkeypatch, capsys):
    """torchrun prints the error of only one of them."""
    for rank in range(3):
        torchrun(rank)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
        report_failure("train", "the cause", caused_by_peers=True)
    assert capsys.readouterr().err == "[rank 0] train: the cause\n"
    assert all(printed_by_torchrun(tmp_path, {r: 1})[-1] == f"[rank {r}] train: the cause" for r in range(3))


def test_without_torchrun_every_rank_prints(monkeypatch, capsys):
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert not report_failure("train", "a", "failed", error=ValueError("first\nsecond"))
    assert capsys.readouterr().err == "train: a\ntrain: failed: ValueError: first\n"


def test_the_first_report_of_a_rank_stays(torchrun, tmp_path):
    torchrun(0)
    for cause in ("the cause", "a later error"):
        assert report_failure("train", cause)
    message = json.loads((tmp_path / "attempt_0/0/error.json").read_text())["message"]
    assert message["message"] == "the cause"


def test_every_rank_reports_if_the_error_files_are_not_in_torchruns_layout(torchrun, tmp_path):
    """A folder that may have the report of an earlier run."""
    for rank in range(2):
        torchrun(rank, folder="errors")
        report_failure("train", "the cause", caused_by_peers=True)
        assert "the cause" in (tmp_path / f"errors/{rank}/error.json").read_text()
    assert sorted(os.listdir(tmp_path / "errors")) == ["0", "1"]


def test_a_report_that_cannot_be_recorded_is_printed(torchrun, tmp_path, capsys):
    torchrun(0)
    (tmp_path / "attempt_0/0").rmdir()
    assert not report_failure("train", "the cause")
    assert capsys.readouterr().err == "[rank 0] train: the cause\n"
