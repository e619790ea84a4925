"""The tuner's command. The test has no process group, because each candidate makes one."""

from dataclasses import replace

from launches import Launch, agent

from armillary.train.cli import read_command

SMALL = ["--model.dim", "32", "--model.layers", "1", "--data.sequence-length", "64", "--train.device", "cpu"]
FAILING = """
import sys
import torch
import torch.distributed as dist
from armillary.plan import tune

def initialize(model, seed, initialize=tune.initialize):
    if dist.get_rank() == 1 and failures:
        raise torch.OutOfMemoryError(failures.pop())
    initialize(model, seed)

failures = ["no memory is left"]
tune.initialize = initialize
tune.main()
"""
"""The first candidate cannot be built on one rank alone."""


def test_a_mesh_is_tuned_for_the_trainer(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    flags = [*SMALL, "--attention", "ring", "ulysses", "--iterations", "1"]
    launch = agent("--nproc-per-node", "2", flags=flags, script=str(script))
    with Launch(launch, tmp_path) as launched:
        assert launched.wait() == 0, launched.printed
        output = launched.printed
    assert "no memory is left" in output
    command, _ = read_command(["--config", str(tmp_path / "tuned.toml")])
    parallel = command.run.parallel
    assert (parallel.attention, parallel.ring, parallel.ulysses) == ("ulysses", 1, 2)
    assert "chosen: ulysses on " in output
    assert command.run == replace(read_command(SMALL)[0].run, parallel=parallel)
