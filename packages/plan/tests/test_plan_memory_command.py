"""`armillary-plan memory`: presets, the search for the longest sequence, and the command's output."""

import contextlib
import json
import re
from dataclasses import replace

import pytest

from armillary.data.console import short
from armillary.models import Checkpointing
from armillary.plan.arguments import MODELS, cluster_of, model_of
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice, Job, StepMemory, estimate
from armillary.plan.memory.cli import MemoryOptions, as_dict, mesh_axes, plan_memory, show
from armillary.plan.memory.room import DoesNotFitError, Room, longest_fit, more_devices


def test_short_numbers():
    assert [short(n) for n in (999, 128_000, 6_144_000, 2 * 10**10)] == ["999", "128k", "6.144M", "20G"]


def linear(length: int, device: float = 8000, host: float = 30_000, minimum: int = 4 << 30) -> StepMemory:
    """Memory of a constant and a number of bytes per token."""
    sizes = int(minimum + device * length), int(host * length)
    return StepMemory(sizes[0], {}, sizes[1], {}, None, 0.0, 0)


@pytest.mark.parametrize(("device", "host", "limit"), [(8000, 1000, "device"), (100, 30_000, "host")])
@pytest.mark.parametrize("start", [1000, 1_000_000, 100_000_000])
def test_the_longest_fit_fills_device_or_host(device, host, limit, start):
    room = Room(device=74 << 30, host=232 << 30)
    lengths = []

    def measure(length: int) -> StepMemory:
        lengths.append(length)
        return linear(length, device * 1.02, host * 1.02)  # 2% more than predicted

    fit = longest_fit(measure, lambda n: linear(n, device, host), room, multiple=1024, start=start)
    exact = ((74 << 30) - (4 << 30)) / device if limit == "device" else (232 << 30) / host
    assert exact / 1.02 * 0.99 - 1024 <= fit.length <= exact / 1.02 and fit.length % 1024 == 0
    assert len(lengths) <= 2
    assert room.share(fit.memory) <= 1 and room.limit(fit.longer) == limit
    assert fit.longer == linear(fit.length + 1_000_000, device, host)


def test_an_error_compares_needed_and_available_memory():
    full = linear(0, minimum=90 << 30)
    with pytest.raises(DoesNotFitError, match=r"1,024 .*90\.0 of 74\.0 GiB"):
        longest_fit(lambda _: full, lambda _: full, Room(74 << 30, 1 << 40), multiple=1024, start=5000)


def test_presets():
    sizes = {name: model_of(name, 1024).parameters() for name in MODELS}
    assert sizes["llama3-8b"] == 8_030_261_248 and sizes["qwen3-32b"] == 32_762_123_264
    clusters = {"8xh100": 8, "64xh100": 64, "8xa100-40": 8, "16xa100-80": 16, "8xh200": 8}
    assert {name: cluster_of(name).ranks for name in clusters} == clusters
    assert (cluster_of("64xh100").nodes, cluster_of("64xh100").name) == (8, "64 x H100 80 GB")
    assert cluster_of("16xh100").host_memory == 2 * 10**12


def test_defaults_of_mesh_axes():
    def axes(cluster: str, **options) -> dict[str, int]:
        plan = MemoryOptions(cluster=cluster, **options)
        return mesh_axes(plan, model_of(plan.model, 1024), cluster_of(cluster))

    assert axes("8xh100") == {"shard": 1, "ring": 1, "ulysses": 8}
    assert axes("16xh100", attention="upipe+ring") == {"shard": 1, "ring": 2, "ulysses": 8}
    assert axes("16xh100", attention="ring") == {"shard": 1, "ring": 16, "ulysses": 1}
    assert axes("16xh100", attention="usp", ulysses=4, shard=2) == {"shard": 2, "ring": 2, "ulysses": 4}


def by_formulas(job: Job, _progress: object) -> StepMemory:
    """Replaces the simulation, which takes minutes and which other tests compare with the formulas."""
    usage = estimate(job)
    return StepMemory(usage.device, usage.device_breakdown, usage.host, usage.host_breakdown, "mlp", 0.0, 0)


def test_figures_of_a_sequence_that_fits_nowhere_do_not_overflow(capsys):
    with contextlib.suppress(SystemExit):
        main(["search", "--tokens", "1000G", "--attention", "ring", "usp", "--json"])
    numbers = re.findall(r"(?<=[:\[ ])-?\d[\d.e+]*(?=[,\n\]])", capsys.readouterr().out)
    assert len(numbers) > 20 and not [each for each in numbers if each.startswith("-")]


@pytest.mark.parametrize(
    "argv",
    [
        "memory --tokens 1000G",
        "memory --model llama3-70b --tokens 2M --json",
        "memory --model llama3-70b --tokens 8k --no-on-host --max-context",
        "search --tokens 1000G --attention usp upipe",
        "run --recipe llama3_8b_1m --data.sequence-length 1000G",
        "search --model llama3-70b --tokens 4M --attention ring --json",
        "search --tokens 64M --attention ulysses",
    ],
)
def test_commands_without_a_fit_exit_with_1_and_name_enough_accelerators(capsys, monkeypatch, argv):
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)
    with pytest.raises(SystemExit) as stop:
        main([*argv.split(), "--cluster", "8xh100"])
    output = "".join(capsys.readouterr())
    assert stop.value.code == 1 and "GiB" in output
    (count,) = re.findall(r"([\d,]+) accelerators .*would suffice", output)
    assert int(count.replace(",", "")) > 8


def test_more_devices_is_the_smallest_power_of_two_that_fits():
    """Checks the formulas on the number of devices and on half of it."""
    cluster, length = cluster_of("8xh100"), 64_000_000
    room, attention = Room.of(cluster), AttentionChoice("upipe")
    job = Job(
        model=model_of("llama3-8b", length),
        axes={"shard": 1, "ring": 1, "ulysses": 8},
        attention=attention,
        length=length,
        checkpointing=Checkpointing("layer", offload=True, prefetch=False),
        on_host=True,
    )
    (count,) = re.findall(r"([\d,]+) accelerators .*would suffice", more_devices(job, cluster, room))
    ring = int(count.replace(",", "")) // 8
    on_rings = [
        room.share(estimate(replace(job, attention=AttentionChoice("upipe+ring"), axes={**job.axes, "ring": n})))
        for n in (ring // 2, ring)
    ]
    assert on_rings[1] <= 1 < on_rings[0]


def test_the_result_as_a_table_or_json(capsys):
    options = {"cluster": "8xh100", "ulysses": 4, "ring": 2, "attention": "upipe+ring"}
    planned = plan_memory(MemoryOptions(model="debug", tokens="64k", **options))
    show(planned)
    shown = capsys.readouterr().out
    assert "a sequence of 64,000 tokens, 8k on a rank" in shown and "fits" in shown and "attention" in shown
    output = json.loads(json.dumps(as_dict(planned)))
    assert output["fits"] and output["axes"] == {"shard": 1, "ring": 2, "ulysses": 4}
    assert output["memory"]["device"] == sum(output["memory"]["device_breakdown"].values()) > 0
    assert output["plan"]["checkpointing"] == {**vars(Checkpointing("layer", offload=True, prefetch=False))}


def test_the_command_finds_the_longest_sequence(capsys, monkeypatch):
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)
    main(["memory", "--model", "debug", "--tokens", "64k", "--max-context", "--host-memory", "120GB"])
    assert "the host's memory" in capsys.readouterr().out
