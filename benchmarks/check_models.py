"""Runs `armillary-check` on every text architecture of transformers: a right one must not be reported as wrong.

    python benchmarks/check_models.py                          # all: some 20 minutes on two cores
    python benchmarks/check_models.py --families mistral bert   # only these, without a report
    python benchmarks/check_models.py --families bert --update  # only these rows of the report

Each is a tiny random copy on 4 ranks (ring=2, ulysses=2), with packed documents and activation checkpointing.
`exercised` are the mechanisms that the copy needs, `without` those of which the result says nothing. `refused`: a
ValueError, because the library does not shard this architecture. `failed`: another error. `not built`: no tiny copy of
it can be made. These have their reason, and are counted by it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

import transformers
from report import RESULTS, write
from transformers_models import families

from armillary.check import Refused, check_architecture, error_line
from armillary.check.architecture import document_boundaries
from armillary.core.testing import RankFailed, Worlds

RING, ULYSSES, TOKENS = 2, 2, 64
VARIANTS = ("recompute",)
ALWAYS = ("other shards", "documents")
"""Mechanisms that every right copy exercises."""


def outcome(family: str, worlds: Worlds, ring: int = RING, ulysses: int = ULYSSES) -> dict[str, Any]:
    """Returns one row of the report."""
    started, report, worst = time.monotonic(), None, None
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
    except Refused as error:
        verdict, reason = "refused", str(error)
    except ValueError as error:
        verdict, reason = "not built", str(error)
    except RankFailed as failure:
        reason = error_line(failure)
        verdict = "refused" if reason.startswith("ValueError") else "failed"
    else:
        comparisons = report.evidence.comparisons.values()
        worst = f"{max(x.error for comparison in comparisons for x in comparison.tensors):.0e}"
        verdict = "right" if report.right else "wrong"
        reason = "; ".join([*map(str, report.diagnoses), *report.notes])
    return {
        "model type": family,
        "verdict": verdict,
        "largest error": worst,
        "exercised": listed(name for name in report.exercised if name not in ALWAYS) if report else None,
        "without": listed(report.unexercised) if report else None,
        "seconds": round(time.monotonic() - started, 1),
        "reason": short(reason),
    }


def listed(names: Iterable[str]) -> str | None:
    return ", ".join(names) or None


def short(reason: str) -> str:
    """Returns the beginning of a reason, without paths of this machine and names of errors."""
    words = " ".join(re.sub(r"/\S+/", "", reason).split())
    return re.sub(r"^ValueError: |^no tiny copy of (\w+) can be built: ", "", words)[:120]


CAUSES = {
    "takes no tokens": "token ids|another model|pixel_values|logits_or_share",
    "selects keys, or attends to compressed ones": "selects? keys|indexed|compressed|LSH|Sparse",
    "carries a state, or convolves, without a sharded form": "state along|layers of kind|without attention, within",
    "computes attention itself": "computes attention itself|attention interface",
    "takes no position ids": "position_ids",
    "embeds with other tokens of the sequence": "embeddings depend|gives each token|scales embeddings",
    "computes with the mask, or has masks of its own": "mask",
}
"""Cause -> a pattern of the reasons of refusals; the first that matches counts."""


def cause(row: dict[str, Any]) -> str:
    """Returns what the reason of a refusal is about."""
    if row["verdict"] == "refused":
        return next((name for name, pattern in CAUSES.items() if re.search(pattern, row["reason"])), "other")
    return "the copy cannot be built" if row["verdict"] == "not built" else "its forward raises"


def causes(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each verdict and cause: its number of model types, and their names."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] not in ("right", "wrong"):
            names.setdefault((row["verdict"], cause(row)), []).append(row["model type"])
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    return [f"{verdict}, {why}: {len(of_cause)} ({', '.join(of_cause)})" for (verdict, why), of_cause in ordered]


def updated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the report, in the order of `families`, with these in place of theirs."""
    old_rows = json.loads((RESULTS / "check.json").read_text())["rows"]
    by_family = {row["model type"]: row for row in (*old_rows, *rows)}
    return [by_family[family] for family in families() if family in by_family]


def write_report(rows: list[dict[str, Any]], counts: Counter[str]) -> None:
    seconds = [row["seconds"] for row in rows if row["verdict"] in ("right", "wrong")]
    notes = [
        f"{counts['right']} right, {counts['wrong']} wrong, {counts['refused']} refused, "
        f"{counts['not built'] + counts['failed']} without a tiny copy that runs, of {len(rows)}.",
        "Right says that shards give loss, logits and gradients of one rank, with and without packed documents, and "
        "with recomputation. Every right copy needs tokens of other shards and the boundaries of documents; "
        "`exercised` are its other mechanisms, `without` those of which the result says nothing, in "
        f"{sum(bool(row['without']) for row in rows)} rows.",
        f"Seconds of one check: {median(seconds):.0f} in the median, {max(seconds):.0f} at most, "
        "with other work on the machine.",
        *causes(rows),
    ]
    write("check", "Checks of Hugging Face architectures", rows, notes, command="python benchmarks/check_models.py")


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
        write_report(rows, counts)
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
