"""The tuner's command. The test has no process group, because each candidate makes one."""

import json
from dataclasses import replace

from launches import Launch, agent

import armillary.plan.tune
from armillary.train.command import read_command

SMALL = ["--model.dim", "32", "--model.layers", "1", "--data.sequence-length", "64"]
TUNER = armillary.plan.tune.__file__.replace("__init__", "__main__")


def test_a_mesh_is_tuned_for_the_trainer(tmp_path):
    flags = [*SMALL, "--attention", "ring", "ulysses", "--iterations", "1"]
    with Launch(agent("--nproc-per-node", "2", flags=flags, script=TUNER), tmp_path) as launch:
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    lines = output[output.index("2 candidates") :].splitlines()
    assert lines[1].startswith("1/2 ring on ring 2: ") and lines[2].startswith("2/2 ulysses on ulysses 2: ")
    (chosen,) = (line for line in lines if line.startswith("chosen: "))
    assert chosen.endswith("; train with --config tuned.toml")
    choice = json.loads((tmp_path / "tuned.json").read_text())["choice"]["mesh"]
    command, _ = read_command(["--config", str(tmp_path / "tuned.toml")])
    assert {name: getattr(command.run.parallel, name) for name in choice} == choice
    assert command.run == replace(read_command(SMALL)[0].run, parallel=command.run.parallel)
