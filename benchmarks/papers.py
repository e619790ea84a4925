"""Tables and figures of four papers, with the bytes of our methods and the planner's predictions.

    uv run python benchmarks/papers.py                # docs/benchmarks/papers.md, in less than two minutes
    uv run python benchmarks/papers.py --only bytes   # bytes sent by methods of two papers, in seconds

Nothing is timed and no GPU is needed: methods run on fake tensors as one rank of a fake process group, under a ledger
and a count of live tensors; times are the planner's. Longer simulations are read from the reports of
`benchmarks/memory.py`, which contain their commands.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

import report
from paper_tables import token_ring, upipe, usp, wallfacer
from paper_tables.table import Paper, flat_rows

PARTS: dict[str, Callable[[], list[Paper]]] = {
    "bytes": lambda: [wallfacer.sent(), usp.sent()],
    "all": lambda: [wallfacer.paper(), usp.paper(), token_ring.paper(), upipe.paper()],
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), default="all", help="bytes: only bytes that methods send")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the report")
    options = parser.parse_args()
    papers = PARTS[options.only]()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = flat_rows(papers)
    command = shlex.join(["python", "benchmarks/papers.py", *sys.argv[1:]])
    data = {"title": "Against the papers", "command": command, "machine": "any", "rows": rows, "notes": NOTES}
    (options.out / "papers.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "papers.md").write_text(page(papers))
    print(page(papers))


NOTES = [
    "ratio: ours over the paper's; every ratio further than 5% from 1 has a reason with a number",
    "not available: a curve of a figure that the paper's text does not state",
    "sent: by one rank, in one call of attention, bfloat16",
]


def page(papers: list[Paper]) -> str:
    """The Markdown page."""
    notes = "".join(f"- {note}\n" for note in NOTES)
    intro = (
        "# Against the papers\n\n    python benchmarks/papers.py\n\n"
        "Tables and figures of four papers, beside our own figures. Bytes and memory are counted on the real methods,\n"
        "run on tensors without numbers; times are the planner's predictions. No GPU has run any of it, and no figure\n"
        "of a cluster is fitted to the paper that it is compared with, except the PCIe network of 8 x L20 (USP's\n"
        "table 3) and the last six rows of WallFacer's figure 7.\n\n"
    )
    return intro + notes + "\n" + "\n\n".join(paper.markdown() for paper in papers) + "\n"


if __name__ == "__main__":
    main()
