"""Time and bytes of hybrids: the planner's closed form, compared with the ledger, and the choice of a layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_plan_memory_command import by_formulas

from armillary.attention.internal import over_all_ranks
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh
from armillary.models import Checkpointing, Llama, LlamaConfig, StateConfig
from armillary.plan import Cluster
from armillary.plan.memory import AttentionChoice, Job, StepMemory
from armillary.plan.memory import cli as command_module
from armillary.plan.memory.cli import MemoryOptions, plan_memory
from armillary.plan.memory.recurrent_memory import gathered_bytes
from armillary.plan.search.candidates import Layout, Mesh
from armillary.plan.search.cli import show
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.search.trainer_config import trainer_config
from armillary.plan.time.passes import passes_of
from armillary.plan.time.step_time import step_bytes
from armillary.states import gathered_elements
from armillary.train.config import model_config

LENGTH, ROWS = 48, 2
MODEL = LlamaConfig(
    vocab_size=32,
    dim=16,
    layers=5,
    heads=4,
    kv_heads=2,
    hidden_dim=16,
    mixers=("delta_rule", "mamba2", "attention"),
    states=StateConfig(heads=4, key_heads=2, key_dim=4, value_dim=6),
)


CASES = [
    # method, mesh, policy, layout, whether states get contiguous shards
    ("ring", {"ring": 4}, "none", "zigzag", False),
    ("ring", {"ring": 4}, "none", "contiguous", False),
    ("ring", {"ring": 4}, "layer", "zigzag", True),
    ("ring", {"ring": 4}, "attention_output", "zigzag", True),
    ("usp", {"ring": 2, "ulysses": 2}, "none", "zigzag", True),
    ("usp", {"ring": 2, "ulysses": 2}, "layer", "contiguous", False),
    ("ulysses", {"ulysses": 4}, "attention_output", "zigzag", False),
    ("upipe", {"ulysses": 4}, "layer", "zigzag", True),
]


def jobs() -> list[tuple[Job, Layout]]:
    common = {"model": MODEL, "length": LENGTH, "rows": ROWS, "precision": torch.float32}
    results = list[tuple[Job, Layout]]()
    for name, axes, policy, layout, relaid in CASES:
        options = {"checkpointing": Checkpointing(policy), "contiguous_states": relaid}
        results.append((Job(axes=axes, attention=AttentionChoice(name), **options, **common), layout))
    return results


def sent_in_steps() -> list[int]:
    """Returns the bytes that this rank sends in forward and backward of each case."""
    sent_bytes = list[int]()
    for job, layout_kind in jobs():
        method = job.attention(mesh(**job.axes))
        model = Llama(MODEL, method)
        model.model.contiguous_states = job.contiguous_states
        job.checkpointing.apply(model)
        layout = method.layout(LENGTH, layout_kind)
        positions = over_all_ranks(layout, method).positions(method.shard)
        ids = torch.zeros(ROWS, len(positions), dtype=torch.long)
        with CommLedger() as ledger:
            model(ids, positions=positions, layout=layout).sum().backward()
        sent_bytes.append(ledger.bytes())
    return sent_bytes


def test_predicted_bytes_of_a_step_equal_the_ledger(worlds):
    cluster = replace(Cluster.named("emulated-4x4-card-per-rank"), nodes=1)
    sent_by_case = zip(*worlds(4).run(sent_in_steps), strict=True)
    for case, (job, layout), sent_by_rank in zip(CASES, jobs(), sent_by_case, strict=True):
        assert list(sent_by_rank) == step_bytes(job, passes_of(job, cluster, layout)), case


RELAID = "zigzag, relaid for states"
PLAN = SearchOptions(model="hybrid-8b", cluster="8xh100", tokens="16Ki", attention=("ring",))


def test_layouts_of_a_hybrid_are_weighed_by_bytes_and_time(capsys):
    result = search(PLAN)
    show(result)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("the best with each layout")
    assert {line.split("  ")[0] for line in lines[start + 4 : start + 7]} == {"zigzag", "contiguous", RELAID}
    ring = {x.candidate.layout_name: x for x in result.choices if x.candidate.mesh == Mesh(1, 8, 1)}
    assert result.fitting and set(ring) == {"zigzag", "contiguous", RELAID}
    # States on contiguous shards, attention on zigzag ones.
    assert ring[RELAID].time.attention == pytest.approx(ring["zigzag"].time.attention)
    assert trainer_config(result, ring[RELAID]).parallel.contiguous_states
    assert not any(x.candidate.contiguous_states for x in result.choices if x.candidate.mesh.tp > 1)
    assert ring["contiguous"].sent_bytes < 0.9 * ring["zigzag"].sent_bytes
    assert ring["contiguous"].time.attention > ring["zigzag"].time.attention  # the last rank has most of the work
    config = trainer_config(result, ring["contiguous"])
    model = model_config(config.model, result.model.vocab_size, result.length)
    assert config.data.layout == "contiguous"
    assert isinstance(model, LlamaConfig) and isinstance(result.model, LlamaConfig)
    assert (model.mixers, model.states) == (result.model.mixers, result.model.states)


def test_gathered_states_grow_linearly_with_ranks():
    for mixer, layer in (("delta_rule", "gated_delta_rule"), ("mamba2", "ssd")):
        for zigzag, ranks in product((True, False), (1, 2, 3, 5, 16)):
            layout = (SequenceLayout.zigzag if zigzag else SequenceLayout.contiguous)(64 * ranks, ranks)
            elements = gathered_elements(layer, layout, heads=4, key_dim=4, value_dim=6)
            assert gathered_bytes(mixer, MODEL.states, ranks, zigzag) == 4 * sum(elements)


def test_longest_sequence_of_a_hybrid_is_searched_by_estimates(monkeypatch):
    lengths = list[int]()

    def simulated(job: Job, progress: object) -> StepMemory:
        lengths.append(job.length)
        return by_formulas(job, progress)

    monkeypatch.setattr(command_module, "simulate", simulated)
    plan = MemoryOptions(model="hybrid-8b", tokens="64Ki", max_context=True, attention="ring", on_host=False)
    result = plan_memory(plan)
    assert lengths == [result.job.length] and result.fits
    assert result.fit is not None and result.room.share(result.fit.longer) > 1
