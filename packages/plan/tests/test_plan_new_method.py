"""A new method takes one file (`gathered_queries.py`) and one line in the registry, and works in every command.

Commands that need a plan skip a method without one, and refuse it if the user names it.
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gathered_queries import GatheredQueries, GatheredQueriesPlan
from test_plan_estimate import measured, sizes

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan
from armillary.attention.comm_plans.method_plan import SequencePlan
from armillary.attention.plans import SEQUENCE_METHODS, named_method, names
from armillary.attention.registry import SequenceEntry
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh, refusal
from armillary.models import Checkpointing, LlamaConfig
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice, Job, estimate, simulate
from armillary.plan.search.candidates import candidates
from armillary.plan.search.cli import heading
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.tune import Measurement, read_options, tune
from armillary.train import Config, DataConfig, ModelConfig, TrainConfig
from armillary.train.cli import read_command
from conformance import cases, check
from conformance.compositions import named

CAUSAL = AttentionMask(causal=True)
NEW, UNPLANNED, COUNTED = "gather_q", "gather_q_unplanned", "gather_q_counted"
PLANNED_LINE = {NEW: SequenceEntry(GatheredQueries, GatheredQueriesPlan)}
UNPLANNED_LINE = {UNPLANNED: SequenceEntry(GatheredQueries)}


class CountedPlan(SequencePlan):
    """A communication plan without memory formulas."""

    comm_plan = GatheredQueriesPlan.comm_plan


@contextmanager
def registered() -> Iterator[None]:
    """Context manager that adds the method to the registry."""
    with patch.dict(SEQUENCE_METHODS, PLANNED_LINE):
        yield


@pytest.fixture(autouse=True)
def added():
    with registered():
        yield


def printed(capsys, *argv: str) -> str:
    main(argv)
    return capsys.readouterr().out


# -- attention --------------------------------------------------------------------------------------------------------


def conform() -> None:
    """Runs the conformance suite on the meshes that it chooses for the registered name."""
    with registered():
        for i, name in enumerate((NEW, f"ulysses+{NEW}", f"upipe+{NEW}")):
            assert name in names()
            (axes,) = named(name).meshes(4)
            attend = named(name).build(mesh(**axes))
            for case in cases(brief=i)[i::4]:
                check(attend, case)


def test_conformance_alone_and_inside_head_methods(worlds):
    worlds(4).run(conform)


def count_bytes() -> list[tuple[int, int]]:
    """Returns (bytes that this rank sends in a call, bytes by the plan) of the method alone and in a head method."""
    results = list[tuple[int, int]]()
    with registered():
        for name, axes in ((NEW, {"ring": 4}), (f"ulysses+{NEW}", {"ring": 2, "ulysses": 2})):
            attend = named(name).build(mesh(**axes))
            layout = SequenceLayout.zigzag(48, axes["ring"])
            shape = AttentionShape.of(layout, CAUSAL, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
            q, k, v = (torch.randn(1, 12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
            with CommLedger() as ledger:
                attend(q, k, v, mask=CAUSAL, layout=layout).sum().backward()
            plan = build_comm_plan(name, shape, axes["ring"], axes.get("ulysses", 1))
            results.append((ledger.bytes(), plan.bytes(dist.get_rank())))
    return results


def test_bytes_equal_its_communication_plan(worlds):
    for results in worlds(4).run(count_bytes):
        assert all(counted == planned > 0 for counted, planned in results)


# -- the planner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(32, 8), (16, 16)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_formula_of_its_memory(ranks, heads):
    x, method = sizes(*heads), AttentionChoice(NEW).method
    plan = method.sequence_plan(ranks)
    assert [plan.forward_memory(x, ranks), plan.backward_memory(x, ranks)] == pytest.approx(
        measured(AttentionChoice(NEW), ranks, *heads), rel=0.04
    )


@pytest.mark.parametrize(
    ("name", "axes", "policy"),
    [
        (NEW, {"ring": 8}, "layer"),
        pytest.param(f"upipe+{NEW}", {"ring": 4, "ulysses": 2}, "attention_output", marks=pytest.mark.long),
    ],
)
def test_the_estimate_of_a_step_agrees_with_the_simulation(name, axes, policy):
    job = Job(
        model=replace(LlamaConfig.llama3_8b(), layers=1),
        axes=axes,
        attention=AttentionChoice(name),
        length=2**17,
        checkpointing=Checkpointing(policy),
    )
    assert estimate(job).device == pytest.approx(simulate(job).device, rel=0.05)


def test_the_search_includes_it(capsys):
    flags = ("--cluster", "8xh100", "--tokens", "128Ki")
    actual = json.loads(printed(capsys, *flags, "--json"))["choices"]
    actual = [choice for choice in actual if choice["axes"]["tp"] == 1]
    choices = [choice for choice in actual if choice["attention"]["name"].endswith(NEW)]
    meshes = {(choice["axes"]["ring"], choice["axes"]["ulysses"]) for choice in choices}
    assert meshes == {(8, 1), (4, 2), (2, 4)}
    assert all(f"--parallel.attention {choice['attention']['name']}" in choice["command"] for choice in choices)
    (alone,) = [choice for choice in choices if choice["attention"]["name"] == NEW]
    (ring,) = [choice for choice in actual if choice["attention"]["name"] == "ring"]
    assert alone["parts"]["dense"] == ring["parts"]["dense"] and alone["parts"]["exchange"] > ring["parts"]["exchange"]
    table = printed(capsys, *flags, "--attention", NEW)
    assert f"\n{NEW} " in table and f"--parallel.attention {NEW} " in table


@pytest.mark.parametrize(
    "command",
    [
        ("memory", "--model", "debug", "--tokens", "8Ki", "--attention", NEW),
        (
            "run",
            "--parallel.attention",
            NEW,
            "--parallel.ulysses",
            "1",
            "--data.sequence-length",
            "8Ki",
            "--model.vocab-size",
            "256",
        ),
    ],
    ids=lambda command: command[0],
)
def test_memory_of_its_step(command, capsys):
    actual = json.loads(printed(capsys, *command, "--cluster", "8xh100", "--json"))
    assert actual["memory"]["device"] > 0


# -- without a plan ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unplanned():
    """Registers a method without a plan, and one without memory formulas."""
    with patch.dict(SEQUENCE_METHODS, UNPLANNED_LINE | {COUNTED: SequenceEntry(GatheredQueries, CountedPlan)}):
        yield


def conform_without_plan() -> None:
    """Values and gradients need no plan."""
    with patch.dict(SEQUENCE_METHODS, UNPLANNED_LINE):
        (axes,) = named(f"ulysses+{UNPLANNED}").meshes(4)
        attend = named(f"ulysses+{UNPLANNED}").build(mesh(**axes))
        check(attend, cases(brief=0)[0])


def test_conformance_without_a_plan(worlds):
    worlds(4).run(conform_without_plan)


@pytest.mark.parametrize("name", [UNPLANNED, f"ulysses+{UNPLANNED}", f"upipe+{UNPLANNED}"])
def test_its_communication_plan_is_refused_by_name(unplanned, name):
    work = AttentionShape.of(
        SequenceLayout.zigzag(64, 4), AttentionMask(), heads=8, kv_heads=8, head_dim=8, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match=rf"{re.escape(repr(name))}.* comm_plan"):
        build_comm_plan(name, work, 4, 1 if name == UNPLANNED else 2)
    assert named_method(name).missing("comm_plan", "backward_memory") == ("comm_plan", "backward_memory")
    assert named_method(NEW).missing("comm_plan", "backward_memory") == ()


@pytest.mark.parametrize(
    ("name", "command", "function"),
    [
        (UNPLANNED, ("--cluster", "8xh100", "--tokens", "64Ki", "--attention"), "comm_plan"),
        (COUNTED, ("--cluster", "8xh100", "--tokens", "64Ki", "--attention"), "forward_memory"),
        (COUNTED, ("memory", "--model", "debug", "--tokens", "8Ki", "--attention"), "forward_memory"),
    ],
)
def test_commands_name_the_method_and_its_missing_function(unplanned, name, command, function):
    line = refusal(main, [*command, name])
    assert repr(name) in line and f" {function}" in line


def test_the_search_omits_it_with_a_note(unplanned):
    result = search(SearchOptions(cluster="8xh100", tokens="64Ki"))
    names_of_choices = {choice.candidate.attention.name for choice in result.choices}
    assert NEW in names_of_choices and not {UNPLANNED, COUNTED} & names_of_choices
    lines = {name: [line for line in heading(result) if f" {name} " in line] for name in (NEW, UNPLANNED, COUNTED)}
    assert not lines[NEW]
    assert all(part in lines[UNPLANNED][0] for part in ("comm_plan", "forward_memory", "backward_memory"))
    assert "comm_plan" not in lines[COUNTED][0] and "forward_memory" in lines[COUNTED][0]


# -- the tuner --------------------------------------------------------------------------------------------------------

SMALL = Config(
    model=ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(sequence_length=50),
    train=TrainConfig(device="cpu"),
)


def tuned(out: Path) -> list[Measurement]:
    """Runs the tuner's command on every rank."""
    with registered(), redirect_stdout(io.StringIO()):
        order = read_options(["--attention", NEW, "--iterations", "1", "--out", str(out)])
        return tune(replace(order, run=SMALL))


def test_the_tuner_measures_it_for_the_trainer(worlds, tmp_path):
    (measurement,) = worlds(2).run(tuned, tmp_path / "tuned.toml")[0]
    assert str(measurement.candidate) == f"{NEW} on ring 2"
    assert measurement.candidate in list(candidates(heads=4, ranks=2, rows=1))
    run = read_command(["--config", str(tmp_path / "tuned.toml")])[0].run
    assert (run.parallel.attention, run.parallel.ring) == (NEW, 2)
