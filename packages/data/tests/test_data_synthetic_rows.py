"""Batches of synthetic rows: equal on every mesh, resumable on any, and the accuracy of answers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_synthetic import TASKS, N, layouts

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE
from armillary.data.synthetic import AssociativeRecall, Copy, Needle, TaskRows, accuracy

ONE = SequenceLayout.contiguous(N, 1)
TASK = TASKS["recall"]


def reader(task=TASK, **kwargs):
    return TaskRows(task, **{"layout": ONE, "shard": 0, "rows_per_batch": 4} | kwargs)


def global_batch(layout, step, replicas, rows=4):
    """Tokens and labels [rows, N] of a step, joined from all ranks of a mesh."""

    def batch_of(replica, shard):
        options = {"rows_per_batch": rows // replicas, "replica": replica, "replicas": replicas}
        return reader(layout=layout, shard=shard, **options).batch(step)

    batches = [[batch_of(replica, shard) for shard in range(layout.shards)] for replica in range(replicas)]
    tokens = torch.cat([layout.join([batch.tokens for batch in shards]) for shards in batches])
    labels = torch.cat([layout.join([batch.labels for batch in shards]) for shards in batches])
    return tokens, labels


# -- batches ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(layout=layouts(N), step=st.integers(0, 1000), replicas=st.sampled_from([1, 2, 4]))
def test_global_batches_do_not_depend_on_the_mesh(layout, step, replicas):
    tokens, labels = global_batch(layout, step, replicas)
    every = torch.arange(N)
    assert torch.equal(tokens, torch.stack([TASK.tokens(row, every) for row in range(4 * step, 4 * step + 4)]))
    assert torch.equal(labels, torch.stack([TASK.labels(row, every) for row in range(4 * step, 4 * step + 4)]))


def test_a_batch_has_the_positions_of_its_shard():
    layout = SequenceLayout.zigzag(N, 4)
    batch = reader(layout=layout, shard=3, replicas=2).batch(5)
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (4, layout.sizes[3])
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}
    assert batch.positions.tolist() == [layout.positions(3).tolist()] * 4
    assert batch.documents == ((0, N),) * 4
    assert batch.layout is layout
    assert reader(layout=layout, shard=3, replicas=2).tokens_per_batch == 8 * N


def test_changing_a_batch_in_place_changes_no_other():
    rows = reader()
    batch, before = rows.batch(0), rows.batch(0)
    for tensor in (batch.tokens, batch.labels, batch.positions):
        tensor.zero_()
    after = rows.batch(0)
    assert torch.equal(after.positions, before.positions)
    assert torch.equal(after.tokens, before.tokens) and torch.equal(after.labels, before.labels)


def test_batches_and_descriptions_number_the_rows():
    rows = reader(Copy(N), first_row=6, replica=1, replicas=2)
    assert rows.batch(1).rows == range(12, 16)
    assert torch.equal(rows.batch(1).tokens[0], Copy(N).tokens(18, torch.arange(N)))
    assert rows.describe(12) == f"row 18 of {Copy(N)!r}"


def test_rows_before_the_first_are_not_read():
    assert torch.equal(reader(first_row=6).batch(0).tokens[:2], reader().batch(1).tokens[2:])


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_iteration_continues_after_a_break():
    rows = reader()
    first, second = next(iter(rows)), next(iter(rows))
    assert torch.equal(first.tokens, rows.batch(0).tokens)
    assert torch.equal(second.tokens, rows.batch(1).tokens)
    assert torch.equal(next(rows).tokens, rows.batch(2).tokens)


def test_a_state_resumes_with_other_batches_on_another_mesh():
    saved = reader(replica=1, replicas=2, rows_per_batch=3)
    next(saved)
    state = saved.state_dict()
    assert state == {"rows": 6, "first_row": 0, "task": repr(TASK)}
    resumed = reader(layout=SequenceLayout.zigzag(N, 2), shard=1)  # 4 rows per step, so row 6 is within a step
    assert resumed.load_state_dict(state) is resumed
    assert resumed.state_dict() == state
    every = SequenceLayout.zigzag(N, 2).positions(1)
    assert torch.equal(next(resumed).tokens, torch.stack([TASK.tokens(row, every) for row in range(6, 10)]))


OTHERS = {
    "another seed": reader(Copy(N, seed=1)),
    "another task": reader(Needle(N)),
    "another first row": reader(Copy(N), first_row=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_rows_is_refused_without_changes(name):
    rows, other = reader(Copy(N)), OTHERS[name].state_dict() | {"rows": 8}
    with pytest.raises(ValueError, match=r"task|first_row"):
        rows.load_state_dict(other)
    assert rows.state_dict()["rows"] == 0


def test_states_of_different_layouts_across_differ():
    tasks = [
        AssociativeRecall(N, 4, 8, 8, across=layout)
        for layout in (None, SequenceLayout.zigzag(N, 3), SequenceLayout.contiguous(N, 3))
    ]
    assert len({repr(task) for task in tasks}) == 3
    assert repr(tasks[1]) == repr(AssociativeRecall(N, 4, 8, 8, across=SequenceLayout.zigzag(N, 3)))
    assert repr(tasks[1]).startswith("AssociativeRecall(length=61, pairs=4, keys=8, values=8, fillers=32")


REFUSALS = {
    "first_row None, not 0": lambda: reader().load_state_dict({"rows": 8}),
    "rows=-4": lambda: reader().load_state_dict(reader().state_dict() | {"rows": -4}),
    "ahead .* got -1": lambda: reader(ahead=-1),
    "step .* got -1": lambda: reader().batch(-1),
    "rows_per_batch .* got 0": lambda: reader(rows_per_batch=0),
    "replicas .* got 0": lambda: reader(replicas=0),
    "replica 2 .*0..1": lambda: reader(replica=2, replicas=2),
    "first_row .* got -1": lambda: reader(first_row=-1),
    "shard 1 .*1 shards": lambda: reader(shard=1),
    r"61 positions.* Copy\(length=9, ": lambda: reader(Copy(9)),
    r"labels \(2, 3\).* logits \(2, 3, 'V'\)": lambda: accuracy(torch.ones(2), torch.ones(2, 3)),
    r"torch.float32 \(3,\) .*labels \(3,\)": lambda: accuracy(torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize("pattern", REFUSALS)
def test_a_refusal_names_the_argument_and_its_value(pattern):
    with pytest.raises(ValueError, match=pattern):
        REFUSALS[pattern]()


# -- accuracy ---------------------------------------------------------------------------------------------------------


def test_right_answers_are_counted_where_there_are_labels():
    labels = torch.tensor([[3, IGNORE, 1], [IGNORE, 0, 2]])
    predicted = torch.tensor([[3, IGNORE, 0], [0, 0, 2]])
    for output in (predicted, torch.nn.functional.one_hot(predicted.clamp(min=0), 4).float()):
        correct, counted = accuracy(output, labels)
        assert (correct.item(), counted.item()) == (3, 4)
        assert correct.dtype == counted.dtype == torch.int64 and correct.shape == counted.shape == ()


def test_counts_of_shards_add_up():
    layout, labels = SequenceLayout.striped(N, 3), TASK.labels(0, torch.arange(N))[None]
    predicted = labels.clone()
    predicted[0, predicted[0].argmax()] += 1
    parts = [accuracy(layout.take(predicted, s), layout.take(labels, s)) for s in range(3)]
    totals = [int(torch.stack(counts).sum()) for counts in zip(*parts, strict=True)]
    assert totals == [TASK.pairs - 1, TASK.pairs]
