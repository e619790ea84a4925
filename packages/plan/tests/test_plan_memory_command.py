"""`armillary-plan memory`: the search for the longest sequence, the command's output, and advice if nothing fits."""

import json
import re
from dataclasses import replace

import pytest

from armillary.models import Checkpointing
from armillary.plan.arguments import MODELS, cluster_of, model_of
from armillary.plan.cli import main
from armillary.plan.memory import AttentionChoice, Job, StepMemory, estimate
from armillary.plan.memory.cli import MemoryOptions, as_dict, mesh_axes, plan_memory, show
from armillary.plan.memory.room import (
    DoesNotFitError,
    Room,
    fewer_tokens,
    fitting_method,
    fitting_policy,
    longest_fit,
    more_devices,
)

GB = 1 << 30


def linear(length: int, device: float = 8000, host: float = 30_000, minimum: int = 4 * GB) -> StepMemory:
    """Memory of a constant and a number of bytes per token."""
    sizes = int(minimum + device * length), int(host * length)
    return StepMemory(sizes[0], {}, sizes[1], {}, None, 0.0, 0)


@pytest.mark.parametrize(("device", "host", "limit"), [(8000, 1000, "device"), (100, 30_000, "host")])
@pytest.mark.parametrize("start", [1000, 1_000_000, 100_000_000])
def test_the_longest_fit_fills_device_or_host(device, host, limit, start):
    room = Room(device=74 * GB, host=232 * GB)
    lengths = []

    def measure(length: int) -> StepMemory:
        lengths.append(length)
        return linear(length, device * 1.02, host * 1.02)  # 2% more than predicted

    fit = longest_fit(measure, lambda n: linear(n, device, host), room, multiple=1024, start=start)
    exact = 70 * GB / device if limit == "device" else 232 * GB / host
    assert exact / 1.02 * 0.99 - 1024 <= fit.length <= exact / 1.02 and fit.length % 1024 == 0
    assert len(lengths) <= 2
    assert room.share(fit.memory) <= 1 and room.limit(fit.longer) == limit
    assert fit.longer == linear(fit.length + 1_000_000, device, host)


def test_an_error_compares_needed_and_available_memory():
    full = linear(0, minimum=90 * GB)
    with pytest.raises(DoesNotFitError, match=r"1,024 .*90\.0 of 74\.0 GiB"):
        longest_fit(lambda _: full, lambda _: full, Room(74 * GB, 1 << 40), multiple=1024, start=5000)


def test_presets_and_defaults_of_mesh_axes():
    sizes = {name: model_of(name, 1024).parameters() for name in MODELS}
    assert sizes["llama3-8b"] == 8_030_261_248 and sizes["qwen3-32b"] == 32_762_123_264

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


def test_the_result_as_a_table_or_json(capsys, monkeypatch):
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)
    options = {"cluster": "8xh100", "ulysses": 4, "ring": 2, "attention": "upipe+ring"}
    planned = plan_memory(MemoryOptions(model="debug", tokens="8k", **options))
    show(planned)
    shown = capsys.readouterr().out
    assert "a sequence of 8,000 tokens, 1k on a rank" in shown and "fits" in shown and "attention" in shown
    output = json.loads(json.dumps(as_dict(planned)))
    assert output["fits"] and output["axes"] == {"shard": 1, "ring": 2, "ulysses": 4}
    assert output["memory"]["device"] == sum(output["memory"]["device_breakdown"].values()) > 0
    assert output["plan"]["checkpointing"] == {**vars(Checkpointing("layer", offload=True, prefetch=False))}


def test_the_command_finds_the_longest_sequence(capsys, monkeypatch):
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)
    main(["memory", "--model", "debug", "--tokens", "64k", "--max-context", "--host-memory", "120GB"])
    assert "the host's memory" in capsys.readouterr().out


# -- steps that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ("memory --tokens 64M", ["tokens"]),
        ("memory --model llama3-70b --tokens 8k --no-on-host --max-context", []),
        ("search --model llama3-70b --tokens 4M --attention ring --out a.toml --plot a.png", ["tokens"]),
        ("search --tokens 6M --attention ring", ["upipe", "tokens"]),
        ("search --tokens 1000G --attention ring --json", []),
        ("run --recipe llama3_8b_128k --data.sequence-length 64M", ["tokens"]),
    ],
)
def test_commands_without_a_fit_exit_with_1_and_name_what_fits(argv, changes, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)
    with pytest.raises(SystemExit) as stop:
        main([*argv.split(), "--cluster", "8xh100"])
    output = "".join(capsys.readouterr())
    assert stop.value.code == 1 and "GiB" in output and not list(tmp_path.iterdir())
    (count,) = re.findall(r"([\d,]+) accelerators .*suffice", output)
    assert int(count.replace(",", "")) > 8
    advice = re.findall(r"it fits with (.*); by formulas", output)
    assert [word for word in changes if word not in advice[0]] == []
    figures = re.findall(r"(?<=[:\[ ])-?\d[\d.e+]*(?=[,\n\]])", output)
    assert not [figure for figure in figures if figure.startswith("-")], "figures must not overflow"


CLUSTER = cluster_of("8xh100")
ROOM = Room.of(CLUSTER)
JOB = Job(
    model=model_of("llama3-8b", 1 << 20),
    axes={"shard": 1, "ring": 8, "ulysses": 1},
    attention=AttentionChoice("ring"),
    length=1 << 20,
)
OFFLOADED = Checkpointing("layer", offload=True, prefetch=False)


def share(job: Job) -> float:
    return ROOM.share(estimate(job))


def test_the_nearest_policy_is_the_fastest_that_fits():
    assert share(JOB) > 1
    changed = fitting_policy(JOB, ROOM)
    assert changed is not None and share(changed) <= 1
    assert replace(changed, checkpointing=JOB.checkpointing) == JOB
    # Policies that need more memory do not fit.
    assert changed.checkpointing.policy == "attention_output" and share(replace(JOB, on_host=True)) > 1
    # The optimizer moves to the host only if no policy suffices where it is.
    large = replace(JOB, model=model_of("llama3-70b", 1 << 15), length=1 << 15)
    moved = fitting_policy(large, ROOM)
    assert moved is not None and moved.on_host and share(moved) <= 1


def test_the_nearest_method_keeps_ranks_and_policy():
    job = replace(JOB, length=6 << 20, checkpointing=OFFLOADED, on_host=True)
    assert share(job) > 1
    changed = fitting_method(job, ROOM)
    assert changed is not None and share(changed) <= 1
    assert changed.attention != job.attention and changed.checkpointing == job.checkpointing
    assert changed.axes["ring"] * changed.axes["ulysses"] == 8


def test_fewer_tokens_are_the_most_that_fit():
    length = fewer_tokens(JOB, CLUSTER, ROOM)
    assert length is not None and share(replace(JOB, length=length)) <= 1 < share(replace(JOB, length=length + 8192))
    assert fewer_tokens(JOB, CLUSTER, Room(1, 1)) is None


def test_more_devices_is_the_smallest_power_of_two_that_fits():
    """Checks the formulas on the number of devices and on half of it."""
    axes = {"shard": 1, "ring": 1, "ulysses": 8}
    attention = AttentionChoice("upipe")
    job = replace(JOB, axes=axes, attention=attention, length=64_000_000, checkpointing=OFFLOADED, on_host=True)
    (count,) = re.findall(r"([\d,]+) accelerators .*would suffice", more_devices(job, CLUSTER, ROOM))
    ring = int(count.replace(",", "")) // 8
    half, all_of_them = (
        share(replace(job, attention=AttentionChoice("upipe+ring"), axes={**axes, "ring": n}))
        for n in (ring // 2, ring)
    )
    assert all_of_them <= 1 < half
