"""Prefetched batches equal unprefetched ones, and the caller gets errors of the thread."""

import gc
import multiprocessing
import threading
import traceback
from itertools import islice

import pytest
from data_stores import numbered, single_rank_rows

from armillary.data import TokenStore
from armillary.data.loader.batches import Prefetch

N = 16
LENGTHS = [30, 5, 80, 1, 17, 60]


class Flaky(TokenStore):
    """A store that fails once, at read number `fails_at`."""

    fails_at, reads, failed = -1, 0, threading.Event()

    def read(self, document, start, stop, step=1):
        self.reads += 1
        if self.reads == self.fails_at:
            self.fail()
        return super().read(document, start, stop, step)

    def fail(self):
        self.failed.set()
        raise OSError(5, "Input/output error")


def tokens(rows, batches):
    return [batch.tokens.tolist() for batch in islice(rows, batches)]


@pytest.mark.parametrize("ahead", [0, 1, 3, 20])
def test_batches_do_not_depend_on_the_number_of_prefetched_ones(ahead):
    expected = [
        single_rank_rows(numbered(LENGTHS), N, rows_per_batch=2).batch(step).tokens.tolist() for step in range(60)
    ]
    assert tokens(single_rank_rows(numbered(LENGTHS), N, rows_per_batch=2, ahead=ahead), 60) == expected


def test_batches_are_planned_in_the_thread_that_reads_them():
    planned = list[tuple[str, range]]()
    rows = single_rank_rows(
        numbered(LENGTHS), N, plan=lambda batch: planned.append((threading.current_thread().name, batch.rows))
    )
    read = [batch.rows for batch in islice(rows, 5)]
    assert [batch_rows for _, batch_rows in planned][:5] == read
    assert all("prefetch" in name for name, _ in planned)


def test_batches_by_number_are_right_during_prefetching():
    rows = single_rank_rows(numbered(LENGTHS), N, ahead=3)
    expected = tokens(single_rank_rows(numbered(LENGTHS), N), 40)
    for step in range(20):
        assert rows.batch(39 - step).tokens.tolist() == expected[39 - step]
        assert next(rows).tokens.tolist() == expected[step]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("fails_at", [1, 2, 7, 20])
def test_failed_batch_is_read_again(fails_at, ahead):
    store = numbered(LENGTHS, kind=Flaky)
    store.fails_at = fails_at
    rows, actual, errors = single_rank_rows(store, N, ahead=ahead), [], []
    for _ in range(31):
        before = rows.state_dict()
        try:
            actual.append(next(rows).tokens.tolist())
        except OSError as error:
            errors.append(error)
            assert rows.state_dict() == before
    assert actual == tokens(single_rank_rows(numbered(LENGTHS), N), 30)
    assert [error.errno for error in errors] == [5]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_keeps_its_type_and_traceback(ahead):
    store = numbered(LENGTHS, kind=Flaky)
    store.fails_at = 1
    with pytest.raises(OSError, match="Input/output error") as failure:
        next(single_rank_rows(store, N, ahead=ahead))
    names = [frame.name for frame in traceback.extract_tb(failure.value.__traceback__)]
    assert "fail" in names and "read_shard" in names


def test_errors_of_unused_batches_are_not_raised():
    store = numbered([N] * 4, kind=Flaky)
    rows = single_rank_rows(store, N, ahead=1)
    store.fails_at, store.failed = 2, threading.Event()
    next(rows)
    assert store.failed.wait(10)
    rows.load_state_dict(rows.state_dict() | {"rows": 10})
    assert tokens(rows, 2) == tokens(single_rank_rows(numbered([N] * 4), N), 12)[10:]
    assert store.reads > 2


def test_forked_process_continues_without_the_thread():
    rows, expected = single_rank_rows(numbered(LENGTHS), N, ahead=3), tokens(single_rank_rows(numbered(LENGTHS), N), 6)
    assert tokens(rows, 2) == expected[:2]
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sending.send(tokens(rows, 4)))
    child.start()
    assert receiving.poll(30), "the fork waits for a thread that it does not have"
    assert receiving.recv() == expected[2:]
    child.join()
    assert tokens(rows, 4) == expected[2:]


# -- the thread -------------------------------------------------------------------------------------------------------


def test_one_thread_prefetches_in_order():
    numbers, started = [], threading.Event()

    def make(number):
        numbers.append((number, threading.current_thread().name))
        if number == 3:
            started.set()
        return -number

    prefetch = Prefetch(make)
    assert prefetch.get(0, [1, 2, 3]) == 0
    assert started.wait(10)
    assert [number for number, _ in numbers] == [0, 1, 2, 3]
    assert len({name for _, name in numbers}) == 1 and numbers[0][1] != threading.current_thread().name
    assert [prefetch.get(number) for number in (1, 2, 3)] == [-1, -2, -3]


def test_prefetched_batches_are_made_once_unless_canceled():
    numbers, ahead = [], threading.Event()

    def make(number):
        numbers.append(number)
        if number == 3:
            ahead.set()

    prefetch = Prefetch(make)
    for number in (0, 1, 2):
        prefetch.get(number, [number + 1])
    assert ahead.wait(10)
    assert numbers == [0, 1, 2, 3]
    prefetch.get(7)
    prefetch.get(3)
    assert numbers == [0, 1, 2, 3, 7, 3]


def test_prefetching_ends_with_its_rows():
    before = set(threading.enumerate())
    rows = single_rank_rows(numbered(LENGTHS), N, ahead=2)
    next(rows)
    (thread,) = set(threading.enumerate()) - before
    del rows
    for _ in range(1000):  # the thread finishes its current batch first
        gc.collect()
        thread.join(0.01)
        if not thread.is_alive():
            break
    assert not thread.is_alive()
