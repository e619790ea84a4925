"""Behaviour shared by the commands of all packages: numbers, tables and help."""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from armillary.check import cli as check
from armillary.data import cli as data
from armillary.data.console import parse
from armillary.data.loader.batches import check_minimum
from armillary.plan import cli as plan
from armillary.plan.arguments import amount
from armillary.plan.memory import Job, StepMemory, estimate
from armillary.plan.memory.cli import MemoryOptions
from armillary.plan.memory.simulate import Progress
from armillary.plan.search.search import SearchOptions
from armillary.plan.trainer_run import RunOptions
from armillary.plan.tune import main as tune
from armillary.plan.tune import read_options as read_tune_options
from armillary.train import cli as train
from armillary.train import generate
from armillary.train.checkpoint import export
from armillary.train.checkpoint.export import Export
from armillary.train.cli import read_command
from armillary.train.config import check_limits, read_run
from armillary.train.generate import read_generate
from conformance import command as conformance
from conformance.report import Report, ReportRow

NUMBERS = {"131_072": 131_072, "1e6": 10**6, "64k": 64_000, "1.5Mi": 3 << 19}
NO_NUMBERS = ["64q", "-1", "1.5", "nan"]


def plan_numbers(kind: type, *flags: str) -> Callable[[str], list[int]]:
    def read(text: str) -> list[int]:
        plan = parse([word for flag in flags for word in (f"--{flag}", text)], kind, "armillary-plan")
        return [amount(plan, flag.replace("-", "_")) for flag in flags]

    return read


def train_numbers(text: str) -> list[int]:
    words = ["--data.sequence-length", text, "--train.steps", text, "--log.profile", text]
    config = read_command(words)[0].run
    check_limits(config)
    return [config.data.sequence_length, config.train.steps, *config.log.profile]


def train_file_numbers(text: str) -> list[int]:
    Path("run.toml").write_text(f'[data]\nsequence-length = "{text}"\n[log]\nprofile = ["{text}"]')
    config = read_command(["--config", "run.toml"])[0].run
    check_limits(config)
    return [config.data.sequence_length, *config.log.profile]


def info_numbers(text: str) -> list[int]:
    words = ["info", "store", "--length", text, "--rows", text]
    command = parse(words, data.DataCommand, "armillary-data").command
    assert isinstance(command, data.Info) and command.length is not None
    check_minimum(1, length=command.length)  # the first step of its table of layouts
    return [command.length, command.rows]


READERS: dict[str, Callable[[str], list[int]]] = {
    "armillary-train": train_numbers,
    "armillary-train --config": train_file_numbers,
    "armillary-plan": plan_numbers(SearchOptions, "tokens", "reserve", "host-reserve"),
    "armillary-plan memory": plan_numbers(MemoryOptions, "tokens", "host-memory"),
    "armillary-tune": lambda text: [read_tune_options(["--iterations", text]).iterations],
    "armillary-generate": lambda text: [read_generate(["s", "--prompt", "x", "--tokens", text]).tokens],
    "armillary-data info": info_numbers,
    "conformance": lambda text: [conformance.parse_arguments(["--random", text, "--ranks", text]).random],
}


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_all_commands_parse_numbers_equally(read, capsys):
    for text, number in NUMBERS.items():
        assert set(read(text)) == {number}
    for text in NO_NUMBERS:
        with pytest.raises((ValueError, SystemExit)) as error:
            read(text)
        output = f"{error.value} {capsys.readouterr().err}"
        assert "such as 131072, 1_000_000, 1e6, 64k (64,000), 64Ki" in output or (text == "-1" and "1" in output)


TABLES = {
    "plan --tokens 128Ki --attention ulysses+token_ring ulysses+all_gather": ["ulysses+token_ring", "step (s)"],
    "plan memory --model debug --tokens 64k --cluster 8xl20 --attention ulysses": ["checkpoints", "device (GiB)"],
    "plan run --model.vocab-size 257 --model.layers 1": ["model.layers.*.self_attn.q_proj.weight", "device (GiB)"],
    "train --dry-run --model.vocab-size 257": ["model.layers.*.self_attn.q_proj.weight", "whole (numbers)"],
    "data info store": ["64 to 127", "share of tokens (%)"],
    "data info store --length 64 --shards 2": ["uncut documents", "sent (MiB)"],
    "conformance": ["ulysses+token_ring", "worst error (share of its limit)"],
}


def conformance_report(_: list[str]) -> None:
    report = Report(1, drawn=True)
    report.rows["ulysses+token_ring", "float32"] = ReportRow("ulysses+token_ring", "float32", 9, 1, 2.5, "dq", "a case")
    report.show(["ulysses+token_ring"])


MAINS = {"plan": plan.main, "train": train.main, "data": data.main, "conformance": conformance_report}


def by_formulas(job: Job, _: Progress) -> StepMemory:
    prediction = estimate(job)
    return StepMemory(
        prediction.device, prediction.device_breakdown, prediction.host, prediction.host_breakdown, "mlp", 0.0, 0
    )


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    name, *words = command.split()
    MAINS[name](words)
    return capsys.readouterr().out


@pytest.mark.parametrize(("command", "cells"), TABLES.items())
def test_tables_are_complete_on_a_pipe_and_in_80_columns(command, cells, capsys, monkeypatch):
    monkeypatch.setattr("armillary.plan.memory.cli.simulate", by_formulas)  # a thousand times faster
    Path("a.txt").write_text("x" * 100)
    if "store" in command:
        data.main(["prepare", "a.txt", "-o", "store", "--workers", "1"])
        capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    piped = run_command(command, capsys)
    assert all(cell in piped for cell in cells) and not set("\x1b…┃") & set(piped)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = run_command(command, capsys)
    words = {word for cell in cells for word in cell.split()}
    assert words <= set(shown.split()) and not set("\x1b…┃") & set(shown)
    tables = [part for part in shown.split("\n\n") if "\n---" in part]
    assert tables and all(len(line) <= 80 for lines in tables for line in lines.splitlines())


def planning(words: list[str]) -> object:
    kinds = {"search": SearchOptions, "memory": MemoryOptions}
    command, flags = (words[0], words[1:]) if words and not words[0].startswith("-") else ("search", words)
    return read_run(flags, RunOptions, command)[0] if command == "run" else parse(flags, kinds[command], command)


DATA_COMMANDS = ("prepare", "info")
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "armillary-train": read_command,
    "armillary-tune": read_tune_options,
    "armillary-generate": read_generate,
    "armillary-plan": planning,
    "armillary-data": lambda words: parse(words, data.DataCommand, "armillary-data"),
    "armillary-export": lambda words: parse(words, Export, "armillary-export"),
    "armillary-check": check.parse,
    "conformance": conformance.parse_arguments,
}
MODULES = {
    "armillary.train": "armillary-train",
    "armillary.plan.tune": "armillary-tune",
    "armillary.train.generate": "armillary-generate",
}
HELPS = {
    "train": train.main,
    "generate": generate.main,
    "export": export.main,
    "tune": tune,
    "check": check.main,
    **{f"plan {command}".strip(): plan.main for command in ("", *plan.COMMANDS)},
    **{f"data {command}".strip(): data.main for command in ("", *DATA_COMMANDS)},
    "conformance": conformance.main,
}


def examples(shown: str) -> list[list[str]]:
    """Returns the commands in a help text: the lines between comments, up to the next heading."""
    before = shown.replace("\\\n", " ").partition("\noptions")[0].partition("╭")[0]
    return [shlex.split(line) for line in before.splitlines() if re.match(r"  (armillary-|torchrun |python )", line)]


@pytest.mark.parametrize("command", HELPS)
def test_help_begins_with_examples_that_parse(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("planned.toml", "tuned.toml"):
        Path(name).write_text('recipe = "llama3_8b_128k"')
    with suppress(SystemExit):
        HELPS[command]([*command.split()[1:], "--help"])
    actual = examples(capsys.readouterr().out)
    assert actual
    for program, *words in actual:
        if "-m" in (program, *words):
            module, *words = words[words.index("-m") + 1 :]
            program = MODULES.get(module, module)
        PARSERS[program](words)
