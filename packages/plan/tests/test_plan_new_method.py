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
from test_plan_estimate import EQUAL, GROUPED, check_formulas, measured, sizes

from armillary.attention import AttentionMask, AttentionShape, build_comm_plan
from armillary.attention.internal import SEQUENCE_METHODS, named_method, names
from armillary.attention.method_registry import SequenceEntry
from armillary.attention.plans import SequencePlan
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh, refusal
from armillary.models import Llama, LlamaConfig
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice
from armillary.plan.search.candidates import candidates
from armillary.plan.search.cli import heading
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.search.trainer_config import command_line
from armillary.plan.tune import Measurement, read_options, tune
from armillary.train import Config, DataConfig, ModelConfig, TrainConfig
from armillary.train.cli import read_command
from conformance import cases, check
from conformance.compositions import named

CAUSAL = AttentionMask(causal=True)
NEW, UNPLANNED, COUNTED = "gather_q", "gather_q_unplanned", "gather_q_counted"


class CountedPlan(SequencePlan):
    """A communication plan without memory formulas."""

    comm_plan = GatheredQueriesPlan.comm_plan


LINES = {
    NEW: SequenceEntry(GatheredQueries, GatheredQueriesPlan),
    UNPLANNED: SequenceEntry(GatheredQueries),
    COUNTED: SequenceEntry(GatheredQueries, CountedPlan),
}


@contextmanager
def registered() -> Iterator[None]:
    """Context manager that adds the methods to the registry."""
    with patch.dict(SEQUENCE_METHODS, LINES):
        yield


@pytest.fixture(autouse=True)
def added():
    with registered():
        yield


# -- attention --------------------------------------------------------------------------------------------------------


def conform() -> None:
    """Runs the conformance suite on the meshes that it chooses for the registered names. It needs no plan."""
    with registered():
        for i, name in enumerate((NEW, f"ulysses+{UNPLANNED}", f"upipe+{NEW}")):
            assert name in names()
            (axes,) = named(name).meshes(4)
            attend = named(name).build(mesh(**axes))
            for case in cases(brief=i)[i::6]:
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


@pytest.mark.parametrize(("ranks", "heads"), [(2, GROUPED), (8, EQUAL)])
def test_formula_of_its_memory(ranks, heads):
    choice = AttentionChoice(NEW)
    check_formulas(choice, ranks, sizes(*heads), (0.96, 1.04), measured(choice, ranks, *heads))


def test_the_search_includes_it_and_omits_methods_without_a_plan_with_a_note():
    result = search(SearchOptions(cluster="8xh100", tokens="64Ki"))
    choices = [choice for choice in result.choices if choice.candidate.mesh.tp == 1]
    new = [choice for choice in choices if choice.candidate.attention.name.endswith(NEW)]
    meshes = [choice.candidate.mesh for choice in new]
    assert {(each.ring, each.ulysses) for each in meshes} == {(8, 1), (4, 2), (2, 4)}
    assert all(f"--parallel.attention {each.candidate.attention.name}" in command_line(result, each) for each in new)
    alone, ring = (
        next(choice for choice in choices if choice.candidate.attention.name == name) for name in (NEW, "ring")
    )
    assert alone.time.dense == ring.time.dense and alone.time.exchange > ring.time.exchange
    assert not {UNPLANNED, COUNTED} & {choice.candidate.attention.name for choice in result.choices}
    lines = {name: [line for line in heading(result) if f" {name} " in line] for name in (NEW, UNPLANNED, COUNTED)}
    assert not lines[NEW]
    assert all(part in lines[UNPLANNED][0] for part in ("comm_plan", "forward_memory", "backward_memory"))
    assert "comm_plan" not in lines[COUNTED][0] and "forward_memory" in lines[COUNTED][0]


def test_memory_of_its_step(tmp_path, capsys):
    Llama(LlamaConfig(vocab_size=64, dim=64, layers=1, heads=8, kv_heads=4, hidden_dim=48)).save_pretrained(tmp_path)
    main(["memory", "--model", str(tmp_path), "--tokens", "1Ki", "--attention", NEW, "--cluster", "8xh100", "--json"])
    assert json.loads(capsys.readouterr().out)["memory"]["device"] > 0


@pytest.mark.parametrize("name", [UNPLANNED, f"ulysses+{UNPLANNED}", f"upipe+{UNPLANNED}"])
def test_a_communication_plan_that_it_lacks_is_refused_by_name(name):
    work = AttentionShape.of(
        SequenceLayout.zigzag(64, 4), AttentionMask(), heads=8, kv_heads=8, head_dim=8, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match=rf"{re.escape(repr(name))}.* comm_plan"):
        build_comm_plan(name, work, 4, 1 if name == UNPLANNED else 2)
    assert named_method(name).missing("comm_plan", "backward_memory") == ("comm_plan", "backward_memory")
    assert named_method(NEW).missing("comm_plan", "backward_memory") == ()


@pytest.mark.parametrize(
    ("command", "name", "function"),
    [
        ("search --tokens 64Ki", UNPLANNED, "comm_plan"),
        ("search --tokens 64Ki", COUNTED, "forward_memory"),
        ("memory --model debug --tokens 8Ki", COUNTED, "forward_memory"),
    ],
)
def test_commands_name_the_method_and_its_missing_function(command, name, function):
    line = refusal(main, [*command.split(), "--cluster", "8xh100", "--attention", name])
    assert repr(name) in line and f" {function}" in line


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
