"""Five results to repeat on a laptop in ten minutes (eleven on two slow cores), and the page of the docs about them.

    uv run python benchmarks/laptop.py                       # into outputs/results
    uv run python benchmarks/laptop.py --only recall bytes
    uv run python benchmarks/laptop.py --out docs/results    # the page of the docs

Each part is another benchmark with fewer cases; the page shows its command. Results are kept in the folder, so that
parts can be measured one by one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import report
from matplotlib.figure import Figure

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """One section of the page."""

    title: str
    command: str
    text: str
    report: str
    """Name of the command's report."""
    columns: tuple[str, ...]
    """Columns of the report that the page shows."""
    picture: str
    """A picture written by the command, or drawn here from `bars`: (name column, value column)."""
    bars: tuple[str, str] | None = None


PARTS = {
    "convergence": Part(
        "The same loss on every mesh",
        "benchmarks/equality.py --only curves --steps 25",
        "A small LLaMA trains on Python's own text on seven meshes of 4 ranks. At every step its loss equals that of "
        "one rank up to rounding: about 1e-6 in float32 and 1e-15 in float64. Wrong gradients would separate the "
        "curves within a few steps. A small error could pass for rounding in float32, but not in float64.",
        "equality",
        ("mesh", "last loss, float32", "furthest, float32", "furthest, float64"),
        "equality.png",
    ),
    "recall": Part(
        "Recall across ranks",
        "benchmarks/equality.py --only recall --meshes ring --steps 300",
        "Rows of 16 tokens are sharded over 4 ranks: pairs of a key and a value, then keys whose values are on other "
        "ranks. A model in which each rank attends only to its own shard cannot do better than chance.",
        "equality-recall",
        ("attention", "right answers", "last loss"),
        "recall.png",
        ("attention", "right answers"),
    ),
    "bytes": Part(
        "Bytes against the papers",
        "benchmarks/papers.py --only bytes",
        "Bytes that one rank sends: the papers' figures, beside those that a ledger counts on our methods. If they "
        "differ by more than 5%, the table has the reason.",
        "papers",
        ("paper's table", "what", "paper", "ours", "ratio", "why"),
        "",
    ),
    "network": Part(
        "WallFacer against Ring, on 4 nodes of 4",
        "benchmarks/cluster --clusters emulated-4x4-card-per-rank --methods wallfacer --repeats 1",
        "16 ranks in network namespaces of this machine emulate a cluster: each rank has a port of 8 MB/s within its "
        "node and a network card of 2 MB/s, in each direction. Results are compared with those of one rank before "
        "anything is timed. The planner's predictions use only the time of two kernel calls and the cluster's "
        "description. This part needs root, `ip` and `tc`, and is left out if they are missing.",
        "cluster-4x4-card-per-rank",
        ("shapes", "contender", "seconds", "over ring", "predicted over ring", "MB sent, mean"),
        "cluster.png",
    ),
    "context": Part(
        "The longest sequence on 8 H100",
        "benchmarks/memory.py --only node",
        "Simulates a training step of LLaMA-3-8B on tensors without storage and counts live bytes, for longer and "
        "longer sequences. FSDP2 shards parameters, gradients and AdamW's state; checkpoints and optimizer are on the "
        "host. No such step has run on a GPU yet; on the CPU, simulated bytes equal real ones.",
        "memory-node",
        ("attention", "tokens, M", "device GiB", "of", "host TB a node", "full"),
        "context.png",
        ("attention", "tokens, M"),
    ),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/results"), help="folder of the page and pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "results.json"
    measured: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for name in options.only:
        print(f"\n== {PARTS[name].title}: python {PARTS[name].command}", flush=True)
        if (result := measure(PARTS[name], options.out)) is not None:
            measured = {key: (measured | {name: result})[key] for key in PARTS if key in {*measured, name}}
            stored.write_text(json.dumps(measured, indent=1) + "\n")
    (options.out / "index.md").write_text(page(measured))
    print(f"\n{sum(result['seconds'] for result in measured.values()):.0f} s in all; read {options.out / 'index.md'}")


def measure(part: Part, out: Path) -> dict[str, Any] | None:
    """Runs a part's command and copies its pictures to `out`. Returns its report, or None on an unsupported machine."""
    start = time.monotonic()
    script, *words = part.command.split()
    with TemporaryDirectory() as name:
        command = [sys.executable, str(HERE.parent / script), *words, "--out", name]
        if code := subprocess.run(command).returncode:
            sys.exit(f"exit code {code}: {part.command}")
        file = Path(name) / f"{part.report}.json"
        if not file.exists():
            return None
        result = json.loads(file.read_text())
        for picture in Path(name).glob("*.png"):
            (out / picture.name).write_bytes(picture.read_bytes())
    rows = [{column: row[column] for column in part.columns} for row in result["rows"]]
    if part.bars is not None:
        draw_bars(rows, *part.bars, out / part.picture)
    seconds = time.monotonic() - start
    return {"machine": result["machine"], "seconds": seconds, "rows": rows, "notes": result["notes"]}


def draw_bars(rows: list[dict[str, Any]], name: str, value: str, path: Path) -> None:
    """Draws a labelled horizontal bar for each row, the first on top."""
    figure = Figure((7, 0.6 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row[name] for row in rows], [row[value] for row in rows], height=0.65)
    axes.bar_label(bars, fmt="{:.2f}", padding=3)
    axes.set_xlabel(value)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def page(measured: dict[str, Any]) -> str:
    """The Markdown page of all measured parts."""
    minutes = sum(result["seconds"] for result in measured.values()) / 60
    sections = [section(PARTS[name], result) for name, result in measured.items()]
    machine = next((result["machine"] for result in measured.values()), "")
    return f"""# Results to repeat on a laptop

```console
$ uv run python benchmarks/laptop.py
```

This command measures all results of this page again and writes them to `outputs/results`. It needs no GPU and
downloads nothing except the packages. With `--out docs/results` it wrote this page, in {minutes:.0f} minutes
({machine}).

{"".join(sections).rstrip()}
"""


def section(part: Part, result: dict[str, Any]) -> str:
    picture = f"![{part.title}]({part.picture})\n\n" if part.picture else ""
    notes = "".join(f"- {note}\n" for note in result["notes"])
    text = textwrap.fill(f"{part.text} Takes {result['seconds']:.0f} seconds.", 128, break_on_hyphens=False)
    return f"""## {part.title}

```console
$ uv run python {part.command}
```

{text}

{picture}{report.as_table(result["rows"])}

{notes}
"""


if __name__ == "__main__":
    main()
