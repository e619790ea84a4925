"""Runs `armillary-check` on every text architecture of transformers: a right one must not be reported as wrong.

    python benchmarks/check_models.py                          # all: some 20 minutes on two cores
    python benchmarks/check_models.py --families mistral bert   # only these, without a report
    python benchmarks/check_models.py --families bert --update  # only these rows of the report

Each is a tiny random copy on 4 ranks (ring=2, ulysses=2), with packed documents and activation checkpointing.
`refused`: a ValueError, because the library does not shard this architecture. `not judged`: right, but the copy does
not exercise a mechanism of the architecture, such as a selection of keys. `failed`: another error. `not built`: no tiny
copy of it can be made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from statistics import median
from typing import Any

import transformers
from report import RESULTS, write
from transformers_models import families

from armillary.check import NotJudged, check_architecture, error_line
from armillary.check.architecture import document_boundaries
from armillary.core.testing import RankFailed, Worlds

RING, ULYSSES, TOKENS = 2, 2, 64
VARIANTS = ("recompute",)


def outcome(family: str, worlds: Worlds, ring: int = RING, ulysses: int = ULYSSES) -> dict[str, Any]:
    """Returns one row of the report."""
    started = time.monotonic()
    try:
        report = check_architecture(
            family,
            ring=ring,
            ulysses=ulysses,
            tokens=TOKENS,
            documents=document_boundaries(TOKENS),
            variants=VARIANTS,
            worlds=worlds,
        )
    except NotJudged as error:
        verdict, reason, worst = "not judged", str(error), None
    except ValueError as error:
        verdict, reason, worst = "not built", str(error), None
    except RankFailed as failure:
        line = error_line(failure)
        verdict, reason, worst = "refused" if line.startswith("ValueError") else "failed", line, None
    else:
        comparisons = report.evidence.comparisons.values()
        worst = f"{max(x.error for comparison in comparisons for x in comparison.tensors):.0e}"
        verdict = "right" if report.right else "wrong"
        reason = "; ".join([*map(str, report.diagnoses), *report.notes])
    seconds = round(time.monotonic() - started, 1)
    return {
        "model type": family,
        "verdict": verdict,
        "largest error": worst,
        "seconds": seconds,
        "reason": reason[:150],
    }


def updated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the report, in the order of `families`, with these in place of theirs."""
    old_rows = json.loads((RESULTS / "check.json").read_text())["rows"]
    by_family = {row["model type"]: row for row in (*old_rows, *rows)}
    return [by_family[family] for family in families() if family in by_family]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="default: all")
    parser.add_argument("--update", action="store_true", help="write these families' rows into the report")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    worlds, rows = Worlds(), list[dict[str, Any]]()
    for family in options.families or families():
        rows.append(outcome(family, worlds))
        print(*rows[-1].values(), flush=True)
    worlds.close()
    if options.update:
        rows = updated(rows)
    counts = Counter(row["verdict"] for row in rows)
    print(dict(counts))
    if options.update or not options.families:
        seconds = [row["seconds"] for row in rows if row["verdict"] in ("right", "wrong")]
        notes = [
            f"{counts['right']} right, {counts['wrong']} wrong, {counts['not judged']} not judged, {counts['refused']} "
            f"refused, {counts['not built'] + counts['failed']} without a tiny copy that runs, of {len(rows)}.",
            f"Seconds of one check: {median(seconds):.0f} in the median, {max(seconds):.0f} at most, "
            "with other work on the machine.",
        ]
        rows = [{name: value for name, value in row.items() if name != "reason"} for row in rows]
        write("check", "Checks of Hugging Face architectures", rows, notes, command="python benchmarks/check_models.py")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
