"""`check_model` names planted mistakes and passes right models."""

import json
from dataclasses import replace

import pytest
import torch
from planted_faults import build, check_arguments, replicated_step

from armillary.check import Mistake, check_model
from armillary.check.compare import Comparison, GradientError, TensorError
from armillary.check.diagnose import Evidence, layers_share_backward
from armillary.check.step import CheckRun, run_step

DOCUMENTS = (0, 13, 21, 40, 64)
PLANTED = {
    "averaged": Mistake.AVERAGED,
    "summed twice": Mistake.SUMMED_TWICE,
    "not reduced": Mistake.NOT_REDUCED,
    "labels": Mistake.LABELS,
    "loss averaged": Mistake.LOSS_AVERAGED,
    "no halo": Mistake.NO_HALO,
    "positions": Mistake.POSITIONS,
    "own shard": Mistake.OWN_SHARD,
    "documents": Mistake.DOCUMENTS,
    "window": Mistake.WINDOW,
    "shared mask": Mistake.SHARED_MASK,
    "shared mask in backward": Mistake.SHARED_MASK,
    "low precision": Mistake.LOW_PRECISION,
    "recompute": Mistake.WRONG_TIME,
    "two micro-batches": Mistake.WRONG_TIME,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_check_names_planted_mistakes(worlds, fault):
    variants = [fault] if fault in ("recompute", "two micro-batches") else []
    report = check_model(
        **check_arguments(fault, convolution=fault == "no halo"),
        documents=DOCUMENTS if fault in ("documents", *variants) else None,
        world_size=2,
        variants=variants,
        limit=1e-9,
        worlds=worlds,
    )
    assert not report.right
    assert [x.mistake for x in report.diagnoses] == [PLANTED[fault]], str(report)
    with pytest.raises(AssertionError, match=report.diagnoses[0].mistake):
        report.assert_right()
    assert json.loads(json.dumps(report.to_dict()))["diagnoses"][0]["mistake"] == PLANTED[fault].name.lower()


def test_ranks_with_all_tokens_do_not_attend_to_their_shard_alone(worlds):
    report = check_model(build, replicated_step, world_size=2, variants=[], worlds=worlds)
    assert not report.evidence.plain.forward_right
    assert report.evidence.first_token_reaches is None
    assert Mistake.OWN_SHARD not in [x.mistake for x in report.diagnoses]


@pytest.mark.parametrize(("errors", "shared"), [((1.0, 1.0, 0.0), True), ((0.0, 1.0, 0.0), False)])
def test_a_shared_mask_makes_all_earlier_layers_wrong(errors, shared):
    gradients = tuple(GradientError(f"layers.{i}.weight", error, 1e-9) for i, error in enumerate(errors))
    comparison = Comparison(CheckRun(4, 64), TensorError("loss", 0.0, 1e-9), (), gradients, (), ())
    assert (layers_share_backward(Evidence(comparison)) is not None) == shared


class DoubledGradients:
    """Worlds in this process whose ranks, all alike, have wrong gradients; of one rank they are right."""

    def __init__(self):
        self.size, self.sizes = 0, list[int]()

    def __call__(self, size):
        self.size = size
        self.sizes.append(size)
        return self

    def run(self, function, *arguments, timeout):
        record = function(*arguments)
        gradients = {name: x * (1 if self.size == 1 else 2) for name, x in record.gradients.items()}
        return [replace(record, gradients=gradients)] * self.size


def test_three_wrong_ranks_are_run_on_six_too():
    worlds = DoubledGradients()
    report = check_model(micro_step_model, micro_step, world_size=3, tokens=48, variants=[], worlds=worlds)
    assert not report.right and set(worlds.sizes) == {1, 3, 6}  # half of three would be the reference itself


@pytest.mark.parametrize(("ranks", "dtype"), [(4, torch.float64), (2, torch.bfloat16)])
def test_check_passes_right_models(worlds, ranks, dtype):
    report = check_model(
        **check_arguments("", convolution=True),
        world_size=ranks,
        documents=DOCUMENTS,
        dtype=dtype,
        variants=["recompute", "two micro-batches"],
        worlds=worlds,
    )
    report.assert_right()
    assert report.diagnoses == ()


def micro_step_model():
    return torch.nn.Sequential(torch.nn.Embedding(64, 4), torch.nn.Linear(4, 64))


def micro_step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch.ids).flatten(0, 1), batch.shifted_labels.flatten())


def micro_step_with_backward(model, batch):
    loss = micro_step(model, batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [micro_step, micro_step_with_backward])
def test_both_micro_batches_run_backward(step):
    run = CheckRun(ranks=1, tokens=16, variant="two micro-batches")
    actual = run_step(micro_step_model, step, None, run).gradients
    torch.manual_seed(run.seed)
    model = micro_step_model().double()
    for batch in run.batches():
        micro_step(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(actual[name], parameter.grad)


def test_the_fixture_fails_with_the_mistake(context_parallel_check):
    arguments = check_arguments("averaged")
    with pytest.raises(AssertionError, match=Mistake.AVERAGED):
        context_parallel_check(world_size=2, variants=[], limit=1e-9, **arguments)


REFUSED = [
    ({"world_size": 1}, "world_size"),
    ({"dtype": torch.int64}, "int64"),
    ({"variants": ["recompute", "faster"]}, "faster"),
    ({"documents": [0, 70]}, "70"),
    ({"tokens": 3}, "tokens"),
]


def test_wrong_arguments_are_refused_before_ranks_start():
    for arguments, named in REFUSED:
        with pytest.raises(ValueError, match=named):
            check_model(**check_arguments(""), **arguments)
