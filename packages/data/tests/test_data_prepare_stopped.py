"""Preparations stopped by a kill, a full disk, an error or another process leave no store; the next run makes it."""

import errno
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from functools import partial
from itertools import count, islice
from multiprocessing import forkserver
from multiprocessing.connection import wait
from operator import neg
from pathlib import Path

import pytest
from data_stores import files_of, write_jsonl

from armillary.data import is_store, open_store, verify_folder
from armillary.data.prepare import Preparation, preparation, prepare, sources
from armillary.data.prepare.encode import map_in_order

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(40)]
BROKEN = '{"text": broken}\n'
fork = multiprocessing.get_context("fork")  # a new process that need not import torch


class Stop(Exception):
    pass


@pytest.fixture
def lines(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


def planned(source, output, **options):
    return Preparation([source], output, **{"chunk_bytes": 150} | options)


def stopping(after, error=Stop):
    """Returns a progress callback that raises after a number of chunks."""
    calls = count()

    def report(now):
        if next(calls) == after:
            raise error

    return report


def run(work):
    """Runs `work` in another process and returns the exit code."""
    process = fork.Process(target=work)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def reference(lines, tmp_path):
    """The files of a store prepared without a stop."""
    plan, steps = planned(lines, tmp_path / "reference"), []
    prepare(plan, 1, steps.append)
    assert len(steps) > 11
    return files_of(plan.output)


# -- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "after"), [(KeyboardInterrupt, 0), (Stop, 7)])
def test_interrupts_and_errors_leave_nothing_and_keep_the_store_to_replace(lines, reference, tmp_path, error, after):
    plan = planned(lines, tmp_path / "store")
    with pytest.raises(error):
        prepare(plan, 1, stopping(after, error))
    with pytest.raises(error):
        prepare(planned(lines, tmp_path / "reference", overwrite=True), 1, stopping(after, error))
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "reference"]
    assert files_of(tmp_path / "reference") == reference
    prepare(plan, 1)
    assert files_of(plan.output) == reference


def test_the_remains_of_a_killed_run_are_no_store_and_are_removed(lines, reference, tmp_path):
    plan = planned(lines, tmp_path / "store")
    assert run(lambda: prepare(plan, 1, lambda now: now.tokens and os.kill(os.getpid(), signal.SIGKILL))) < 0
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "reference", "store.lock", "store.partial"]
    with pytest.raises(ValueError, match=r"store .*store\.partial"):
        open_store(plan.output)
    assert is_store(plan.output)  # so that it is chosen, and opening it says how to finish it
    with pytest.raises(ValueError, match=r"store\.partial "):
        open_store(tmp_path / "store.partial")
    other = planned(lines, plan.output, tokenizer="bpe", vocab_size=280)
    assert run(lambda: prepare(other, 1, lambda now: now.tokens and os.kill(os.getpid(), signal.SIGKILL))) < 0
    prepare(plan, 1)
    assert files_of(plan.output) == reference
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "reference", "store"]


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_next_run_finishes_after_a_kill_before_any_disk_change(tmp_path, overwrite, monkeypatch):
    """Kills the process before each call that changes the disk, one call per run."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a killed process loses no written data
    new, old = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3]), write_jsonl(tmp_path / "b.jsonl", ["old"])
    plan = planned(new, tmp_path / "there" / "store", overwrite=overwrite, chunk_bytes=50)
    expected = prepare(planned(new, tmp_path / "reference", chunk_bytes=50), 1)
    kinds = set()
    for calls in count():
        if overwrite:
            prepare(planned(old, plan.output, overwrite=True), 1)
        if run(partial(dies_after, calls, plan)) == 0:
            break
        kinds.add(state(plan.output))
        assert prepare(plan, 1) == expected
        assert files_of(plan.output) == files_of(tmp_path / "reference")
        assert os.listdir(plan.output.parent) == ["store"]
        plan.output.rename(tmp_path / f"done {calls}")
    assert calls > 8
    # "none": between the renames of the old store and of the new one
    assert kinds == ({"old", "none", "new"} if overwrite else {"none", "new"})


def dies_after(calls, plan):
    """Prepares, and kills itself before call number `calls` that changes the disk."""
    number = count()

    def change(call, *args, **kwargs):
        return call(*args, **kwargs) if next(number) < calls else os.kill(os.getpid(), signal.SIGKILL)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        setattr(os, name, partial(change, getattr(os, name)))
    prepare(plan, 1)


def state(path):
    """Verifies the store at a path and returns "old" or "new" by its first document, or "none"."""
    if not path.exists():
        return "none"
    sum(verify_folder(path))
    store = open_store(path)
    return "old" if bytes(store.read(0, 0, 3).tolist()) == b"old" else "new"


def test_workers_exit_with_a_killed_parent_and_another_run_starts_again(lines, reference, tmp_path):
    plan, (heard, tell) = planned(lines, tmp_path / "store"), fork.Pipe(duplex=False)

    def report(now):
        tell.send([child.pid for child in multiprocessing.active_children()])

    def work():
        forkserver._forkserver.__init__()  # a new fork server, as in a new process
        prepare(plan, 2, report)

    process = fork.Process(target=work)
    process.start()
    workers = {pid for _ in range(7) for pid in heard.recv()}
    process.kill()
    process.join()
    assert len(workers) == 2 and process.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 300
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, workers))
    prepare(plan, 1)
    assert files_of(plan.output) == reference


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_raises_and_leaves_nothing(lines, reference, tmp_path):
    plan, reports = planned(lines, tmp_path / "store"), []
    earlier_workers = set(multiprocessing.active_children())  # workers of earlier tests

    def report(now):
        reports.append(now.done_bytes)
        if len(reports) == 6:
            workers = [child for child in multiprocessing.active_children() if child not in earlier_workers]
            os.kill(workers[0].pid, signal.SIGKILL)
            assert all(wait([worker.sentinel]) for worker in workers)  # the pool ends the other worker

    message = rf"{plan.output}: .* 2 worker"
    with pytest.raises(ChildProcessError, match=message):
        prepare(plan, 2, report)
    assert set(multiprocessing.active_children()) <= earlier_workers
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "reference"]


@pytest.mark.parametrize("error", [EOFError, ConnectionRefusedError])
def test_a_killed_fork_server_counts_as_a_killed_worker(lines, tmp_path, monkeypatch, error):
    def start_worker(*_):
        raise error

    monkeypatch.setattr(forkserver, "connect_to_new_process", start_worker)
    with pytest.raises(ChildProcessError, match="2 worker processes was killed"):
        prepare(planned(lines, tmp_path / "store"), 2)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


def test_worker_error_has_the_workers_traceback(lines, tmp_path):
    with lines.open("a") as file:
        file.write(BROKEN)
    with pytest.raises(ValueError, match=r"a\.jsonl:line \d+: ") as caught:
        prepare(planned(lines, tmp_path / "store"), 2)
    assert "in _batches" in str(caught.value.__cause__)
    assert not (tmp_path / "store.lock").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_the_order_of_the_items(workers):
    assert list(map_in_order(neg, range(50), workers)) == [-number for number in range(50)]
    assert list(map_in_order(neg, [], workers)) == []
    results = map_in_order(math.sqrt, [4, 9, -1, 16], workers)
    assert list(islice(results, 2)) == [2, 3]
    with pytest.raises(ValueError, match=r"math domain error|expected a nonnegative input"):
        next(results)


def test_at_most_two_items_per_worker_are_in_progress():
    class Items(list):
        started = 0

        def __iter__(self):
            for item in super().__iter__():
                self.started += 1
                yield item

    items = Items(range(20))
    started = [items.started for _ in map_in_order(neg, items, 2)]
    assert started == [*range(4, 20), *[20] * 4]
    one = Items(range(3))
    assert [one.started for _ in map_in_order(neg, one, 1)] == [1, 2, 3]


# -- disks ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing(lines, reference, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=28k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        plan = planned(lines, disk / "store")
        with pytest.raises(OSError, match=rf"{plan.output}: No space left on device"):
            fill(disk, plan)
        assert os.listdir(disk) == ["filler"]
        (disk / "filler").unlink()
        prepare(plan, 1)
        assert files_of(plan.output) == reference
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk, plan):
    """Prepares, and fills the disk after some parts."""
    calls = count()

    def report(now):
        if next(calls) == 5:
            with (disk / "filler").open("wb", buffering=0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError:
                    pass

    prepare(plan, 1, report)


@pytest.mark.parametrize("limit", [0, 1500])
def test_a_file_size_limit_leaves_nothing(lines, reference, tmp_path, limit):
    plan = planned(lines, tmp_path / "store")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        prepare(plan, 1)

    def check_error():
        try:
            work()
        except OSError as error:
            is_named = str(error.strerror).startswith(f"{plan.output}: File too large")
            os._exit(3 if error.errno == errno.EFBIG and is_named else 4)

    assert run(check_error) == 3
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "reference"]
    prepare(plan, 1)
    assert files_of(plan.output) == reference


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(lines, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    output = tmp_path / "locked" / "store"
    with pytest.raises(PermissionError, match=rf"{output}: Permission denied"):
        prepare(planned(lines, output), 1)
    assert os.listdir(output.parent) == []


# -- two processes ----------------------------------------------------------------------------------------------------


def test_second_process_is_refused_and_the_first_completes(lines, reference, tmp_path):
    plan = planned(lines, tmp_path / "store")
    (begun, begin), (go, on), calls = fork.Pipe(duplex=False), fork.Pipe(duplex=False), count()

    def report(now):
        if next(calls) == 2:
            begin.send(None)
            go.recv()

    first = fork.Process(target=prepare, args=(plan, 1, report))
    first.start()
    begun.recv()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=rf"another process .*{plan.output}"):
            prepare(planned(lines, plan.output, overwrite=overwrite), 1)
    on.send(None)
    first.join()
    assert first.exitcode == 0
    assert files_of(plan.output) == reference
    assert not (tmp_path / "store.lock").exists()


# -- foreign files and changing input ---------------------------------------------------------------------------------


def test_files_with_similar_names_beside_the_output_stay(lines, tmp_path):
    for name in ("store.older", "store.old", "older"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("precious")
    for overwrite in (False, True):
        prepare(planned(lines, tmp_path / "store", overwrite=overwrite), 1)
    assert {(tmp_path / name / "mine").read_text() for name in ("store.older", "store.old", "older")} == {"precious"}
    assert sum(verify_folder(tmp_path / "store")) > 0


def test_input_that_changes_during_reading_is_refused(lines, tmp_path):
    def change(now):
        if now.step == "encoding":
            os.utime(lines, ns=(0, 10**9))

    with pytest.raises(ValueError, match=r"changed "):
        prepare(planned(lines, tmp_path / "store"), 1, change)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    prepare(planned(lines, tmp_path / "store"), 1)
    assert is_store(tmp_path / "store")


def test_an_output_link_is_followed(lines, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk" / "store")
    for overwrite in (False, True):
        prepare(planned(lines, tmp_path / "store", overwrite=overwrite), 1)
    assert (tmp_path / "store").is_symlink() and [path.name for path in (tmp_path / "disk").iterdir()] == ["store"]


def test_tokenizer_is_trained_on_a_bounded_part_of_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "TRAINING_BYTES", 1000)
    for name in "abc":
        (tmp_path / name).write_text("word " * 4000)
    actual = sources.chunks([tmp_path], size=5000)
    assert 1000 <= sum(map(len, preparation._sample(actual))) <= 1002
