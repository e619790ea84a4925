"""The examples agree with one rank. They run unmodified, on the test's ranks."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from armillary.check import Mistake, check_model
from armillary.core import sum_gradients

EXAMPLES = Path(__file__).parent.parent / "examples"
RANKS = 4


def example(name: str):
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # scripts import their neighbours
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def errors(name: str) -> list[float]:
    return example(name).errors(RANKS)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("attention_sdpa", 1e-5),
        ("attention_transformers", 1e-5),
        ("attention_fsdp", 1e-9),
        ("context_parallel", 1e-9),
        ("diffusers_token_ring", 1e-9),
        ("checkpoint_on_another_mesh", 1e-9),
    ],
)
def test_ranks_equal_one_rank(worlds, name, limit):
    for actual in worlds(RANKS).run(errors, name):
        assert max(actual) < limit, actual


def norms(summed: bool) -> list[float]:
    fsdp = example("attention_fsdp")
    cp = fsdp.ContextParallel("ring", fsdp.build_mesh("cpu", ring=RANKS))
    model = fsdp.sharded(RANKS)
    if summed:
        sum_gradients(model)
    fsdp.STEPS = 1
    return fsdp.train(model, cp)[1]


def test_with_sum_gradients_fsdp_no_longer_averages(worlds):
    (averaged,), (summed,) = (worlds(RANKS).run(norms, summed)[0] for summed in (False, True))
    assert summed == pytest.approx(averaged * RANKS, rel=1e-9)


def torch_training(**faults):
    module = example("check_torch_context_parallel")
    return module.Model(), partial(module.step, **faults), module.reduce


def test_torch_context_parallel_is_right(worlds):
    report = check_model(torch_training, world_size=2, dtype=torch.float32, variants=[], worlds=worlds)
    report.assert_right()


def test_check_names_restarting_positions_under_torch_context_parallel(worlds):
    wrong = partial(torch_training, positions_restart=True)
    report = check_model(wrong, world_size=2, dtype=torch.float32, variants=[], limit=2e-5, worlds=worlds)
    assert [x.mistake for x in report.diagnoses] == [Mistake.POSITIONS]


def accelerate_training():
    return example("check_accelerate").build()


def accelerate_on_one_rank():
    return example("check_accelerate").one_rank()


@pytest.mark.long  # reproduces a result of docs/check.md
def test_accelerate_context_parallel_is_right():
    pytest.importorskip("accelerate")
    check_model(
        accelerate_training, reference=accelerate_on_one_rank, world_size=2, dtype=torch.float32, variants=[]
    ).assert_right()  # on new ranks, because accelerate sets environment variables
