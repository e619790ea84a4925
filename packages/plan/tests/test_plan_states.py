"""Time and bytes of hybrids: the planner's closed form, compared with the ledger, and the choice of a layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from armillary.attention.parts import over_all_ranks
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh
from armillary.models import Checkpointing, Llama, LlamaConfig, StateConfig
from armillary.plan import Cluster
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice, Job, StepMemory, estimate
from armillary.plan.memory import cli as command_module
from armillary.plan.memory.cli import MemoryOptions, plan_memory
from armillary.plan.memory.recurrent_memory import gathered_bytes
from armillary.plan.search.candidates import Layout, Mesh
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


def sent_in_step(job: Job, layout_kind: Layout) -> int:
    """Returns the bytes that this rank sends in forward and backward."""
    assert isinstance(job.attention, AttentionChoice)
    world = mesh(**job.axes)
    method = job.attention(world)
    model = Llama(MODEL, method)
    model.model.contiguous_states = job.contiguous_states
    job.checkpointing.apply(model)
    layout = method.layout(LENGTH, layout_kind)
    positions = over_all_ranks(layout, method).positions(method.shard)
    ids = torch.zeros(ROWS, len(positions), dtype=torch.long)
    with CommLedger() as ledger:
        model(ids, positions=positions, layout=layout).sum().backward()
    return ledger.bytes()


@pytest.mark.parametrize(("layout", "relaid"), [("zigzag", False), ("zigzag", True), ("contiguous", False)])
@pytest.mark.parametrize(
    ("name", "ring", "ulysses", "policy"),
    [
        ("ring", 4, 1, "none"),
        ("ring", 4, 1, "layer"),
        ("ring", 4, 1, "attention_output"),
        ("usp", 2, 2, "none"),
        ("usp", 2, 2, "layer"),
        ("ulysses", 1, 4, "attention_output"),
        ("upipe", 1, 4, "layer"),
    ],
)
def test_predicted_bytes_of_a_step_equal_the_ledger(worlds, name, ring, ulysses, policy, layout, relaid):
    job = Job(
        model=MODEL,
        axes={"ring": ring, "ulysses": ulysses},
        attention=AttentionChoice(name),
        length=LENGTH,
        rows=ROWS,
        checkpointing=Checkpointing(policy),
        precision=torch.float32,
        contiguous_states=relaid,
    )
    cluster = replace(Cluster.named("emulated-4x4-card-per-rank"), nodes=1)
    assert worlds(4).run(sent_in_step, job, layout) == step_bytes(job, passes_of(job, cluster, layout))


RELAID = "zigzag, relaid for states"
PLAN = SearchOptions(model="hybrid-8b", cluster="8xh100", tokens="16Ki", attention=("ring", "ulysses"))


def test_layouts_of_a_hybrid_are_weighed_by_bytes_and_time():
    result = search(PLAN)
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


def test_the_search_shows_the_best_with_each_layout(capsys):
    main(["search", "--model", "hybrid-8b", "--tokens", "16Ki", "--attention", "ring"])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("the best with each layout")
    assert {line.split("  ")[0] for line in lines[start + 4 : start + 7]} == {"zigzag", "contiguous", RELAID}
    main(["search", "--model", "hybrid-8b", "--tokens", "16Ki", "--attention", "ring", "--json"])
    assert all(choice["sent_bytes"] >= 0 for choice in json.loads(capsys.readouterr().out)["choices"])


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("mixer", ["delta_rule", "mamba2"])
def test_gathered_states_grow_linearly_with_ranks(mixer, zigzag):
    layer, layout_of = ("ssd" if mixer == "mamba2" else "gated_delta_rule"), SequenceLayout.contiguous
    layout_of = SequenceLayout.zigzag if zigzag else layout_of
    for ranks in (1, 2, 3, 5, 16):
        elements = gathered_elements(layer, layout_of(64 * ranks, ranks), heads=4, key_dim=4, value_dim=6)
        assert gathered_bytes(mixer, MODEL.states, ranks, zigzag) == 4 * sum(elements)


def test_longest_sequence_of_a_hybrid_is_searched_by_estimates(monkeypatch):
    lengths = list[int]()

    def simulated(job: Job, progress: object) -> StepMemory:
        lengths.append(job.length)
        usage = estimate(job)
        return StepMemory(usage.device, {}, usage.host, {}, None, 0.0, 0)

    monkeypatch.setattr(command_module, "simulate", simulated)
    plan = MemoryOptions(model="hybrid-8b", tokens="64Ki", max_context=True, attention="ring", on_host=False)
    result = plan_memory(plan)
    assert lengths == [result.job.length] and result.fits
    assert result.fit is not None and result.room.share(result.fit.longer) > 1
