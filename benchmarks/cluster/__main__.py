"""Attention methods on emulated networks, made of network namespaces on one machine. Needs root and iproute2.

    uv run python benchmarks/cluster                                        # all clusters
    uv run python benchmarks/cluster --clusters emulated-1x8-mesh --repeats 3

Each node has a torchrun, and each rank a namespace behind wires of the cluster's bandwidth. Contenders alternate within
each repeat; figures are medians of the ratios within a repeat. Results are checked first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from contenders import RACES, Race, Shapes, race
from network import leave_on_signals, obstacle, results_of
from picture import draw
from predict import Kernels, predicted
from verdict import verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from armillary.data.console.units import count_argument

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", choices=RACES, default=RACES)
    parser.add_argument("--tokens", type=count_argument(), default=32, help="tokens per rank")
    parser.add_argument("--repeats", type=count_argument(), default=3)
    parser.add_argument("--methods", nargs="+", default=[], help="methods besides the ring (default: all)")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the reports and the picture")
    options = parser.parse_args()
    if (reason := obstacle()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    leave_on_signals()
    for name in options.clusters:
        print(f"{name} ...", file=sys.stderr, flush=True)
        chosen = race(name, options.tokens, options.methods)
        print(write(name, chosen, run(chosen, name, options), options.out), end="\n\n", flush=True)
    print(f"picture of all stored results: {draw(options.out)}")


def run(chosen: Race, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs `measure.py` on the cluster and returns its results."""
    flags = ["--tokens", str(options.tokens), "--repeats", str(options.repeats), "--methods", *options.methods]
    return results_of(chosen.cluster, HERE / "measure.py", name, *flags)


def write(name: str, chosen: Race, result: dict[str, Any], folder: Path) -> str:
    """Writes the report of one cluster and returns its table."""
    tables = [rows_of(chosen, turns) for turns in result["turns"]]
    link = chosen.cluster.within if chosen.cluster.nodes == 1 else chosen.cluster.between
    shapes = chosen.shapes[0]
    notes = [
        f"{shapes.tokens} tokens a rank, {shapes.heads} heads of {shapes.head_dim}, batch 1, float32, forward and "
        f"backward; links{' between nodes' if chosen.cluster.nodes > 1 else ''} per {link.per}, "
        f"{link.bandwidth / 1e6:g} MB/s each way",
        "over ring: tokens a second, as a multiple of ring's; busy: processor seconds of all ranks together, gloo "
        "included; kernels: seconds of a rank's kernel calls in a ring, without sends",
        f"every contender's out, dq, dk and dv agree with attention on one rank, largest relative error "
        f"{max(error for turns in result['turns'] for error in turns['errors'].values()):.1e}",
        "seconds of sends, measured (predicted): "
        + "; ".join(f"{w['sends']} {w['seconds']:.4f} ({w['expected']:.4f})" for w in result["wires"]),
    ]
    notes += [verdict(rows) for rows in tables]
    rows, title = [row for rows in tables for row in rows], f"Attention on {chosen.cluster.name}"
    return report.write(f"cluster-{name.removeprefix('emulated-')}", title, rows, notes, folder)


def rows_of(chosen: Race, turns: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per contender, all with the same shapes."""
    shapes, seconds = Shapes(**turns["shapes"]), turns["seconds"]
    kernels = Kernels.of(shapes, turns["cells"])
    expected = {str(c): predicted(chosen.cluster, c, shapes, kernels) for c in chosen.contenders}
    return [
        {
            "shapes": str(shapes),
            "contender": name,
            "seconds": median(times),
            "over ring": report.median_ratio(seconds["ring"], times),
            "predicted": expected[name],
            "predicted over ring": expected["ring"] / expected[name],
            "MB sent, mean": turns["sent"][name]["mean"] / 1e6,
            "MB, most": turns["sent"][name]["most"] / 1e6,
            "busy": median(turns["busy"][name]),
            "kernels": kernels.of_all(shapes, chosen.cluster.ranks),
        }
        for name, times in seconds.items()
    ]


if __name__ == "__main__":
    main()
