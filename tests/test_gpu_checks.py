"""benchmarks/gpu: its checks' rehearsal without a GPU, what it says of wrong results, and how it ends."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from gpu import command
from gpu.check import Check, Row, Setting, correct
from gpu.device import CpuDevice, CudaDevice, Peak

SLOW = ("compile", "length", "memory", "offload", "upipe-memory")
"""Checks whose rehearsal takes seconds: compilers, simulations and many steps."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in command.ORDER])
def test_every_check_can_be_rehearsed_without_a_gpu(name, tmp_path, capsys):
    assert command.main([name, "--fake", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"gpu-{name}.json").read_text())["rows"]
    assert rows and all(list(row) == ["what", "measured", "unit", "bar", "source", "passed"] for row in rows)
    assert "a rehearsal" in (tmp_path / f"gpu-{name}.md").read_text()
    assert "1 of 1 checks passed" in capsys.readouterr().out


def test_there_are_twelve_checks_of_different_names():
    assert len(command.ORDER) == 12 and list(command.checks()) == list(command.ORDER)


def wrong(_: Setting):
    yield Row("first", 1.0)
    yield correct("second", 0.2, 0.1, "somebody")
    yield correct("third", 0.1, 0.1, "somebody")


def crashing(_: Setting):
    yield correct("first", 0.0, 0.1, "somebody")
    raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")


def endless(_: Setting):
    while True:
        yield Row("again", 1.0)


@pytest.mark.parametrize(("run", "said"), [
    (wrong, "FAILED second: 0.2  (at most 0.1; somebody)"),
    (crashing, "FAILED made up ended early: needs the package pydantic, which is not installed here"),
    (endless, "TimeoutError: stopped after 0 s"),
], ids=["wrong", "crashing", "endless"])  # fmt: skip
def test_a_check_that_fails_or_does_not_end_is_a_failed_row(run, said, monkeypatch, capsys):
    monkeypatch.setattr(command, "checks", lambda: {"made up": Check("made up", "Something", run)})
    monkeypatch.setattr(command, "LIMIT", 600 if run is not endless else 0)
    assert command.main(["--fake"]) == 1
    assert said in capsys.readouterr().out


def test_speeds_are_judged_on_a_gpu_alone_and_errors_everywhere():
    rehearsal, real = Setting(CpuDevice(), fake=True), Setting(CpuDevice(), fake=False)
    assert rehearsal.at_least("x", 1.0, 2.0, "", "").passed is None
    assert [real.at_least("x", x, 2.0, "", "").passed for x in (1.0, 2.0)] == [False, True]
    assert [real.at_most("x", x, 2.0, "", "").passed for x in (2.0, 2.1)] == [True, False]
    assert not correct("x", float("nan"), 1.0, "").passed


def test_nothing_is_run_without_a_gpu_or_of_an_unknown_name(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2 and "no GPU is here; --fake" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command.main(["kernel"])
    assert ended.value.code == 2 and "no check kernel; known: kernels, step" in capsys.readouterr().err
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    assert command.main(["--fake"]) == 2 and "2.11 or newer" in capsys.readouterr().err


def test_the_stand_in_for_a_device_sees_reads_and_labels():
    device, x = CpuDevice(), torch.ones(4, requires_grad=True)
    assert device.syncs(lambda: (x * 2).sum().backward()) == []
    assert device.syncs(lambda: x.sum().item()) == ["aten::_local_scalar_dense"]

    def labelled() -> None:
        with torch.profiler.record_function("here"):
            torch.zeros(300, 300) @ torch.zeros(300, 300)

    assert 0 < device.labelled(labelled, "here") < 60
    assert device.labelled(labelled, "elsewhere") == 0


class Event:
    """Of a GPU on which everything takes 3 ms."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 3
        self.at = Event.now

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def cuda(monkeypatch):
    """What of torch.cuda a `CudaDevice` asks, answered without one: 5 bytes are held, 9 at most."""
    answers = {
        "get_device_name": "NVIDIA H100",
        "get_device_capability": (9, 0),
        "mem_get_info": (1, 80),
        "Event": Event,
    }
    answers |= {"memory_allocated": 5, "memory_reserved": 6, "max_memory_allocated": 9, "max_memory_reserved": 20}
    answers |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode"))
    asked = list[object]()
    for name, answer in answers.items():
        stub = answer if answer is Event else lambda *args, answer=answer: (asked.append(args), answer)[1]
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    return asked


def test_a_gpu_is_asked_for_time_memory_and_waits(cuda):
    device = CudaDevice()
    assert cuda[0] == "expandable_segments:True"
    assert (device.capability, device.memory, device.peak_flops) == ((9, 0), 80, 989e12)
    assert device.name.startswith("NVIDIA H100") and device.torch.type == "cuda"
    assert device.times(lambda: None, 2) == [0.003, 0.003] and device.seconds(lambda: None) == 0.003
    assert device.peak(lambda: None) == Peak(4, 14)

    def waits() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = device.syncs(waits)
    assert len(found) == 1 and "test_gpu_checks.py" in found[0]
    assert [args for args in cuda if args in [("warn",), ("default",)]] == [("warn",), ("default",)]
