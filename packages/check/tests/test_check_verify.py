"""`verifying` and `verify` name faults of known libraries in a running step, and raise no alarm on right ones."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from planted_faults import Model, reduce, step

from armillary.attention import ContextParallel
from armillary.check import CheckBatch, StepOutput, verify, verifying
from armillary.core.testing import mesh

transformers = pytest.importorskip("transformers")

CALLS = "windows and softcaps of calls"  # of Armillary's methods, by which this model does not attend
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
DOCUMENTS = (0, 13, 21, 40, 64)
# Fault -> the fact that is wrong, and words that name it.
OBSERVED = {
    "no-op": ("share of tokens", "nothing is sharded"),
    "computed twice": ("share of tokens", "layer 0 computes [33, 33] tokens"),
    "positions": ("positions", "restart"),
    "labels": ("labels", "2 have no gradient"),
    "labels shifted twice": ("labels", "another label"),
    "loss averaged": ("loss", "mean of the ranks' means"),
    "all not reduced": ("equal gradients", "not reduced"),
    "averaged": ("gradient of the head", "averaged"),
    "summed twice": ("gradient of the head", "summed over ranks twice"),
    "sinks": ("parameters in use", "dropped"),
}


def new_batch(rows=2, tokens=64, documents=DOCUMENTS):
    torch.manual_seed(2)
    ids = torch.randint(3, 64, (rows, tokens))
    labels = ids.clone()
    labels[:, 1:20:2] = -100
    return CheckBatch(ids, labels, documents)


def new_model(**options):
    torch.manual_seed(1)
    return Model(**options).double()


def observed_step(fault, documents=None):
    model, batch = new_model(sinks=True), new_batch(documents=documents)
    with verifying(model, batch) as proof:
        output = step(model, batch, fault)
        reduce(model, fault)
    return proof.report(output.loss).to_dict()


@pytest.mark.parametrize("fault", OBSERVED)
def test_a_running_step_shows_the_fault(worlds, fault):
    reports = worlds(2).run(observed_step, fault)
    assert reports[0] == reports[1]  # every rank comes to the same verdict
    name, words = OBSERVED[fault]
    facts = {x["name"]: x for x in reports[0]["facts"]}
    assert facts[name]["verdict"] == "wrong" and words in facts[name]["detail"], json.dumps(reports[0], indent=1)
    assert reports[0]["exit_code"] == 1


# Fault -> facts of probes that are wrong.
PROBED = {
    "own shard": {"attention across shards", "same prefix in shorter rows"},
    "documents": {"documents"},
    "window": {"windows"},
    "positions": {"same prefix in shorter rows"},
    "no halo": {"same prefix in shorter rows"},
    "averaged": {"loss along the gradient"},
    "loss averaged": {"loss"},
    "shared mask in backward": {"loss along the gradient"},
    "sinks of a rank": {"sinks and biases"},
    "biases of a rank": {"sinks and biases"},
}


def step_with_reduction(model, batch, fault):
    output = step(model, batch, fault)
    reduce(model, fault)
    return output


def probed(fault, documents, runs_backward=False):
    sinks = "of a rank" in fault or runs_backward or documents is not None
    model, batch = new_model(convolution=True, sinks=sinks), new_batch(documents=documents)
    before, random_state = [x.clone() for x in model.parameters()], torch.get_rng_state()
    loss = step_with_reduction if runs_backward else partial(step, backward=False)
    report = verify(
        model, batch, partial(loss, fault=fault), reduce=None if runs_backward else partial(reduce, fault=fault)
    )
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random_state) and model.training
    return report.to_dict()


def test_probes_of_a_right_step_raise_no_alarm_on_four_ranks(worlds):
    report = worlds(4).run(probed, "", (0, 13, 40, 64))[0]
    verdicts = {x["name"]: x["verdict"] for x in report["facts"]}
    assert verdicts.pop("no look-ahead") == verdicts.pop(CALLS) == "not observed"  # rows have several documents
    assert set(verdicts.values()) == {"right"}, json.dumps(report, indent=1)


@pytest.mark.parametrize("fault", ["", "averaged"])
def test_probes_of_a_step_that_runs_backward(worlds, fault):
    report = worlds(2).run(probed, fault, None, runs_backward=True)[0]
    wrong = {x["name"] for x in report["facts"] if x["verdict"] == "wrong"}
    assert wrong == ({"gradient of the head", *PROBED[fault]} if fault else set()), json.dumps(report, indent=1)


@pytest.mark.parametrize("fault", ["", *PROBED])
def test_probes_show_the_fault(worlds, fault):
    reports = worlds(2).run(probed, fault, DOCUMENTS if fault == "documents" else None)
    assert reports[0] == reports[1]
    wrong = {x["name"] for x in reports[0]["facts"] if x["verdict"] == "wrong"}
    assert PROBED.get(fault, set()) <= wrong, json.dumps(reports[0], indent=1)
    assert bool(wrong) == bool(fault), json.dumps(reports[0], indent=1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_right_step_raises_no_alarm(worlds, ranks):
    for documents in (None, DOCUMENTS):
        report = worlds(ranks).run(observed_step, "", documents)[0]
        verdicts = {x["verdict"] for x in report["facts"] if x["name"] != CALLS}
        assert verdicts == {"right"}, json.dumps(report, indent=1)


def step_of_ignored_windows():
    """A model of transformers whose layers keep a window that they never read, as Moshi's do."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    for layer in model.model.layers:
        layer.sliding_window = 8
    cp, batch = ContextParallel("ring", mesh(ring=2)), new_batch(documents=None)
    cp.prepare(model)

    def loss(model, rows):
        with cp.shard(rows.ids, shift_labels=rows.shifted_labels) as shard:
            output = model(**shard.inputs)
            return StepOutput(cp.loss(output.loss, shard), shard.layout.positions(cp.method.shard))

    return verify(model, batch, loss, reduce=cp.reduce_gradients).to_dict()


def test_a_window_that_layers_never_read_is_not_asked_for(worlds):
    report = worlds(2).run(step_of_ignored_windows)[0]
    assert report["right"], json.dumps(report, indent=1)


def other_rows() -> list[dict]:
    """The fact "same rows" of ranks with the same rows, and of ranks with other ones."""
    facts = list[dict]()
    for differs in (False, True):
        model, batch = new_model(), new_batch(documents=None)
        if differs and dist.get_rank() == 1:
            batch = replace(batch, labels=batch.labels.roll(1, 1))
        with verifying(model, batch) as proof:
            step(model, batch)
        facts.append(next(fact for fact in proof.report().to_dict()["facts"] if fact["name"] == "same rows"))
    return facts


def test_ranks_with_other_rows_are_named(worlds):
    for right, wrong in worlds(4).run(other_rows):
        assert right["verdict"] == "right"
        assert wrong["verdict"] == "wrong" and "[1]" in wrong["detail"]


def observed_micro_batches():
    model, batches = new_model(), (new_batch(documents=None), new_batch(tokens=80, documents=None))
    with verifying(model, batches[0]) as proof:
        for batch in batches:
            step(model, batch)
        reduce(model)
    return proof.report().to_dict()


def test_micro_batches_of_other_sizes_raise_no_alarm(worlds):
    report = worlds(2).run(observed_micro_batches)[0]
    verdicts = {x["verdict"] for x in report["facts"] if x["name"] != CALLS}
    assert verdicts == {"right"}, json.dumps(report, indent=1)
