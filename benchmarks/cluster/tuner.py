"""Checks that the tuner picks the fastest candidate on an emulated cluster, by measuring all candidates again.

    uv run python benchmarks/cluster/tuner.py

Needs root and iproute2. The block is small, so that communication dominates; its parameters are sharded too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from network import QUIET, EmulatedCluster, leave_on_signals, obstacle, wait

from armillary.data.console.units import count_argument
from armillary.plan import Cluster
from armillary.plan.tune import read_options, tune

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

MODEL = ["--model.dim", "32", "--model.layers", "1", "--model.heads", "16", "--model.kv-heads", "4"]
MODEL += ["--model.head-dim", "64", "--model.hidden-dim", "32"]
DATA = ["--data.sequence-length", "512", "--data.global-batch-size", "1", "--train.device", "cpu"]
DATA += ["--save.every", "1000"]
METHODS = ("ring", "token_ring", "all_gather", "ulysses", "usp", "wallfacer")
CLUSTER = "emulated-2x4-card-per-node"
RANK = "rank"
"""First argument of this script on a rank of the cluster."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=count_argument(), default=2)
    options = parser.parse_args()
    if (reason := obstacle()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    leave_on_signals()
    print(write([tuned(options.iterations) for _ in range(2)]))


def tuned(iterations: int) -> dict[str, float | None]:
    """Runs the tuner. Returns the seconds of each candidate, the fastest first."""
    with TemporaryDirectory() as folder, EmulatedCluster(Cluster.named(CLUSTER)) as emulated:
        flags = [*MODEL, *DATA, "--iterations", str(iterations), "--attention", *METHODS]
        program = [sys.executable, str(Path(__file__).resolve()), RANK, folder, *flags]
        wait(emulated.torchrun(program, env={**os.environ, **QUIET}, start_new_session=True))
        return json.loads((Path(folder) / "seconds.json").read_text())


def tune_on_rank(folder: str, *flags: str) -> None:
    """Runs the tuner on one rank and writes the seconds, which are the same on all ranks."""
    measurements = tune(read_options([*flags, "--out", f"{folder}/tuned.toml"]))
    (Path(folder) / "seconds.json").write_text(json.dumps({str(each.candidate): each.seconds for each in measurements}))


def write(runs: list[dict[str, float | None]]) -> str:
    """Writes the report of both runs, with the time of the first run's choice in the second."""
    first, second = runs
    chosen, best = next(iter(first)), next(iter(second))
    rows = [{"candidate": each, "tuner's seconds": first[each], "seconds again": second[each]} for each in first]
    loss = (second[chosen] or inf) / (second[best] or inf) - 1
    notes = [
        "forward and backward of one block, " + " ".join([*MODEL, *DATA]),
        f"chosen: {chosen}; fastest when all were measured again: {best}, the choice {loss:.1%} slower than that",
    ]
    return report.write("cluster-tuner", f"The tuner on {Cluster.named(CLUSTER).name}", rows, notes)


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        tune_on_rank(*sys.argv[2:])
    else:
        main()
