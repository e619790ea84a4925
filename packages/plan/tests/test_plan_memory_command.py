"""Planning: numbers, presets, the search for the longest sequence, and the command."""

import json

import pytest

from armillary.core.quantity import short
from armillary.models import Checkpointing
from armillary.plan.cli import main
from armillary.plan.memory import Job, StepMemory, report
from armillary.plan.memory.estimate import estimate
from armillary.plan.memory.plan import MemoryPlan, axes_of, plan_memory
from armillary.plan.memory.room import Room, longest
from armillary.plan.presets import MODELS, cluster_of, model_of


def test_numbers_are_shown_short():
    assert [short(n) for n in (999, 128_000, 6_144_000)] == ["999", "128k", "6.144M"]


def linear(length: int, device: float = 8000, host: float = 30_000, at_least: int = 4 << 30) -> StepMemory:
    """So many bytes a token, and some that are always there."""
    sizes = int(at_least + device * length), int(host * length)
    return StepMemory(sizes[0], {}, sizes[1], {}, None, 0.0, 0)


@pytest.mark.parametrize(("device", "host", "limit"), [(8000, 1000, "device"), (100, 30_000, "host")])
@pytest.mark.parametrize("start", [1000, 1_000_000, 100_000_000])
def test_the_longest_that_fits_is_found_where_the_fuller_of_the_two_is_full(device, host, limit, start):
    room = Room(device=74 << 30, host=232 << 30)
    measured = []

    def measure(length: int) -> StepMemory:
        measured.append(length)
        return linear(length, device * 1.02, host * 1.02)  # a little more than by the outlook

    fit = longest(measure, lambda n: linear(n, device, host), room, step=1024, start=start)
    exact = ((74 << 30) - (4 << 30)) / device if limit == "device" else (232 << 30) / host
    assert exact / 1.02 * 0.99 - 1024 <= fit.length <= exact / 1.02 and fit.length % 1024 == 0
    assert len(measured) <= 2
    assert room.share(fit.memory) <= 1 and room.limit(fit.longer) == limit
    assert fit.longer == linear(fit.length + 1_000_000, device, host)


def test_where_nothing_fits_the_numbers_are_given():
    full = linear(0, at_least=90 << 30)
    with pytest.raises(ValueError, match=r"not even 1,024 tokens fit: 90.0 of 74.0 GiB on the device"):
        longest(lambda _: full, lambda _: full, Room(74 << 30, 1 << 40), step=1024, start=5000)


def test_presets():
    sizes = {name: model_of(name, 1024).parameters() for name in MODELS}
    assert sizes["llama3-8b"] == 8_030_261_248 and sizes["qwen3-32b"] == 32_762_123_264
    clusters = {"8xh100": 8, "64xh100": 64, "8xa100-40": 8, "16xa100-80": 16, "8xh200": 8}
    assert {name: cluster_of(name).ranks for name in clusters} == clusters
    assert (cluster_of("64xh100").nodes, cluster_of("64xh100").name) == (8, "64 x H100 80 GB")
    assert cluster_of("16xh100").host_memory_per_rank == 250 * 10**9


def test_open_axes_are_filled_in():
    def axes(cluster: str, **options) -> dict[str, int]:
        plan = MemoryPlan(cluster=cluster, **options)
        return axes_of(plan, model_of(plan.model, 1024), cluster_of(cluster))

    assert axes("8xh100") == {"shard": 1, "ring": 1, "ulysses": 8}
    assert axes("16xh100", attention="upipe+ring") == {"shard": 1, "ring": 2, "ulysses": 8}
    assert axes("16xh100", attention="ring") == {"shard": 1, "ring": 16, "ulysses": 1}
    assert axes("16xh100", attention="usp", ulysses=4, shard=2) == {"shard": 2, "ring": 2, "ulysses": 4}
    with pytest.raises(ValueError, match="ring 3 x ulysses 2 = 6 ranks, but 8 x H100 80 GB are 8"):
        axes("8xh100", ring=3, ulysses=2, attention="usp")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("memory --model gpt-9", "--model gpt-9: known are debug, llama3-8b"),
        ("memory --cluster tpu", "--cluster tpu: no cluster 'tpu'; known: 8xh100"),
        ("memory --cluster 12xh100", "--cluster 12xh100: no cluster '12xh100'; known: 8xh100"),
        ("memory --cluster nowhere.toml", "--cluster nowhere.toml: No such file"),
        ("memory --tokens lots", "'lots' is no whole number"),
        ("memory --attention ring --ulysses 8", "ulysses"),
        ("memory --trian 3", "Unrecognized options: --trian"),
        ("memory --reserve 100GiB", "leave nothing of 8 x H100 80 GB"),
        ("memory --rows 0", "--rows 0: must be at least 1"),
        ("memory --ulysses 0", "--ulysses 0: must be at least 1"),
        ("mermory", "no command 'mermory'; known: search, memory, run"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(capsys, argv, said):
    with pytest.raises(SystemExit) as stop:
        main(argv.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and error.count("\n") == 1


def test_a_plan_is_shown_as_a_table_or_json(capsys):
    options = {"cluster": "8xh100", "ulysses": 4, "ring": 2, "attention": "upipe+ring"}
    planned = plan_memory(MemoryPlan(model="debug", tokens="64k", **options))
    report.show(planned)
    shown = capsys.readouterr().out
    assert "a sequence of 64,000 tokens, 8k on a rank" in shown and "fits" in shown and "attention" in shown
    found = json.loads(report.as_json(planned))
    assert found["fits"] and found["axes"] == {"shard": 1, "ring": 2, "ulysses": 4}
    assert found["memory"]["device"] == sum(found["memory"]["device_breakdown"].values()) > 0
    assert found["plan"]["checkpointing"] == {**vars(Checkpointing("layer", offload=True, prefetch=False))}


def test_the_command_finds_the_longest_sequence(capsys, monkeypatch):
    """By formulas, which are held to the simulation elsewhere, and take a thousandth of the time."""

    def by_formulas(job: Job, _progress: object) -> StepMemory:
        said = estimate(job)
        return StepMemory(said.device, said.device_breakdown, said.host, said.host_breakdown, "mlp", 0.0, 0)

    monkeypatch.setattr("armillary.plan.memory.plan.simulate", by_formulas)
    main(["memory", "--model", "debug", "--tokens", "64k", "--max-context", "--host-memory", "120GB"])
    assert "the longest that fits; full is the host's memory" in capsys.readouterr().out
