"""Checks that the tuner picks the fastest candidate on an emulated cluster, by measuring all candidates again.

    uv run python benchmarks/cluster/tuner.py

Needs root and iproute2. The block is small, so that communication dominates; its parameters are sharded too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from network import QUIET, EmulatedCluster, leave_on_signals, obstacle, wait

from armillary.data.console.units import count_argument
from armillary.plan import Cluster

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

MODEL = ["--model.dim", "32", "--model.layers", "1", "--model.heads", "16", "--model.kv-heads", "4"]
MODEL += ["--model.head-dim", "64", "--model.hidden-dim", "32"]
DATA = ["--data.sequence-length", "512", "--data.global-batch-size", "1", "--train.device", "cpu"]
DATA += ["--save.every", "1000"]
METHODS = ("ring", "token_ring", "all_gather", "ulysses", "usp", "wallfacer")
CLUSTER = "emulated-2x4-card-per-node"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=count_argument(), default=2)
    options = parser.parse_args()
    if (reason := obstacle()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    leave_on_signals()
    print(write([tuned(options.iterations) for _ in range(2)]))


def tuned(iterations: int) -> dict[str, Any]:
    """Runs the tuner and returns the contents of its file."""
    with TemporaryDirectory() as folder, EmulatedCluster(Cluster.named(CLUSTER)) as emulated:
        out = Path(folder) / "tuned.toml"
        flags = [*MODEL, *DATA, "--iterations", str(iterations), "--out", str(out), "--attention", *METHODS]
        program = [sys.executable, "-m", "armillary.plan.tune", *flags]
        wait(emulated.torchrun(program, env={**os.environ, **QUIET}, start_new_session=True))
        return json.loads(out.with_suffix(".json").read_text())


def write(runs: list[dict[str, Any]]) -> str:
    """Writes the report of both runs, with the time of the first run's choice in the second."""
    first, second = ({name(each["candidate"]): each["seconds"] for each in run["measurements"]} for run in runs)
    chosen, best = name(runs[0]["choice"]), min(second, key=lambda each: second[each] or float("inf"))
    rows = [{"candidate": each, "tuner's seconds": first[each], "seconds again": second[each]} for each in first]
    notes = [
        "forward and backward of one block, " + " ".join([*MODEL, *DATA]),
        f"chosen: {chosen}; fastest when all were measured again: {best}, the choice {loss(second, chosen, best):.1%} "
        "slower than that",
    ]
    return report.write("cluster-tuner", f"The tuner on {Cluster.named(CLUSTER).name}", rows, notes)


def loss(seconds: dict[str, float], chosen: str, best: str) -> float:
    return seconds[chosen] / seconds[best] - 1


def name(candidate: dict[str, Any]) -> str:
    """A readable name of a candidate."""
    axes = " x ".join(f"{axis} {size}" for axis, size in candidate["mesh"].items() if size > 1)
    attention = candidate["attention"]
    team = f" C={attention['team']} {attention['placement']}" if attention["team"] else ""
    return f"{attention['name']}{team} on {axes}"


if __name__ == "__main__":
    main()
