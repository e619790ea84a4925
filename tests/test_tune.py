"""Tuning as a user types it, without a process group of the test's own: each candidate has one."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from launches import environment, torchrun

from armillary.train.command import read_command
from armillary.train.tune.choice import with_choice

SMALL = ["--model.dim", "32", "--model.layers", "1", "--data.sequence-length", "64"]


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)


def test_a_mesh_is_tuned_for_the_trainer(tmp_path):
    tuning = [word.replace("armillary.train", "armillary.train.tune") for word in torchrun(2, *SMALL)]
    tuned = start([*tuning, "--attention", "ring", "ulysses", "--iterations", "1"], tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    lines = tuned.stdout.splitlines()
    assert (
        lines[0] == "2 candidates"
        and lines[1].startswith("1/2 ring on ring 2: ")
        and lines[2].startswith("2/2 ulysses on ulysses 2: ")
    )
    assert lines[-1].startswith("chosen: ") and lines[-1].endswith("; train with --parallel.tuned tuned.json")
    choice = json.loads((tmp_path / "tuned.json").read_text())["choice"]["mesh"]
    command, _ = read_command([*SMALL, "--parallel.tuned", str(tmp_path / "tuned.json")])
    assert {name: getattr(command.run.parallel, name) for name in choice} == choice
    resolved = with_choice(command.run, 2, "float32")
    assert resolved.parallel == replace(command.run.parallel, tuned=None)
