"""Resuming a stopped or killed run on any mesh."""

import json
import multiprocessing
import os
import signal
import time

from data_stores import every_shard, global_batch, layouts, numbered, read_rows, shapes, single_rank_rows, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.core import SequenceLayout
from armillary.data import PackedSequences, best_fit, greedy, one_per_row, open_store

N = 24
STORES = [numbered([30, 5, 0, 80, 1, 17, 24, 60]), numbered([9, 9, 40], name="other")]


def mesh(stores, layout, replicas, rows_per_batch, **settings):
    """Returns the loaders of all ranks of a mesh, as [replica][shard]."""
    settings |= {"replicas": replicas, "rows_per_batch": rows_per_batch}
    return [every_shard(stores, layout, replica=replica, **settings) for replica in range(replicas)]


@settings(deadline=None, max_examples=15)
@given(st.data(), shapes, st.integers(1, 30), st.sampled_from([greedy, best_fit, one_per_row]))
def test_rows_resume_on_any_mesh(data, lengths, length, packing):
    stores, state, read = [numbered(lengths), numbered([7, 40], name="other")], None, []
    for _ in range(3):
        replicas, rows_per_batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        choices = {"packing": packing, "seed": 5, "ahead": data.draw(st.sampled_from([0, 2]))}
        ranks = mesh(stores, data.draw(layouts(length)), replicas, rows_per_batch, **choices)
        for rank in (rank for shards in ranks for rank in shards if state is not None):
            assert rank.load_state_dict(json.loads(json.dumps(state))) is rank
        for _ in range(data.draw(st.integers(0, 3))):
            read += global_batch(ranks).tolist()
        states = [rank.state_dict() for shards in ranks for rank in shards]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert read == read_rows(single_rank_rows(stores, length, packing=packing, seed=5), 0, len(read))


def test_a_state_is_json_with_the_number_of_rows_and_an_earlier_one_can_be_loaded():
    rows, states, read = single_rank_rows(STORES, N, rows_per_batch=3, replicas=2, ahead=3), [], []
    for step in range(5):
        states.append(rows.state_dict())
        rows.batch(7)  # does not move the iteration
        read.append(next(rows).tokens.tolist())
        assert read[-1] == rows.batch(step).tokens.tolist()
    assert json.loads(json.dumps(states)) == states
    assert [state["rows"] for state in states] == [0, 6, 12, 18, 24]
    rows.load_state_dict(states[1])
    assert [next(rows).tokens.tolist() for _ in range(4)] == read[1:]


def test_reset_positions_layouts_prefetching_and_the_sum_of_weights_may_change():
    state = single_rank_rows(STORES, N, weights=[1, 2]).state_dict()
    choices = {"reset_positions": True, "ahead": 5, "layout_for": lambda documents: None, "weights": [2, 4]}
    assert single_rank_rows(STORES, N, **choices).load_state_dict(state).state_dict() == state


# -- killed runs ------------------------------------------------------------------------------------------------------

LENGTHS = [40, 3, 77, 0, 15, 9, 120]


def train(folder, log, state):
    """Logs each batch and then saves the state, until it is killed."""
    layout, store = SequenceLayout.contiguous(16, 1), open_store(folder)
    rows = PackedSequences(store, layout=layout, shard=0, rows_per_batch=2, packing=best_fit, seed=9, ahead=3)
    with open(log, "w", buffering=1) as out:
        for batch in rows:
            out.write(json.dumps(batch.tokens.tolist()) + "\n")
            new = state.with_name("new")
            new.write_text(json.dumps(rows.state_dict()))
            os.replace(new, state)


def test_a_killed_run_resumes_bitwise_equal(tmp_path):
    full = numbered(LENGTHS)
    documents = [full.read(i, 0, length).tolist() for i, length in enumerate(LENGTHS)]
    folder = write_folder(tmp_path / "store", documents)
    log, state_file = tmp_path / "log", tmp_path / "state"
    run = multiprocessing.get_context("fork").Process(target=train, args=(folder, log, state_file))
    run.start()
    try:
        while not (log.exists() and log.read_bytes().count(b"\n") >= 50):
            assert run.is_alive()
            time.sleep(0.01)
    finally:
        run.kill()
        run.join()
    assert run.exitcode == -signal.SIGKILL
    state = json.loads(state_file.read_text())
    read = [row for line in log.read_text().split("\n")[:-1] for row in json.loads(line)]
    expected = single_rank_rows(open_store(folder), 16, packing=best_fit, seed=9)
    assert 98 <= state["rows"] <= len(read)
    assert read == read_rows(expected, 0, len(read))
    ranks = every_shard(open_store(folder), SequenceLayout.zigzag(16, 4), rows_per_batch=3, packing=best_fit, seed=9)
    for rank in ranks:
        rank.load_state_dict(state)
    actual = [row for _ in range(4) for row in global_batch([ranks]).tolist()]
    assert actual == read_rows(expected, state["rows"], state["rows"] + 12)
