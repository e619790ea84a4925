"""UPipe: memory of its stages, lengths and throughput."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import report

from armillary.models import Checkpointing
from armillary.plan.memory import AttentionChoice
from paper_tables.fpdt import Fpdt
from paper_tables.steps import predicted
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table


def paper() -> Paper:
    return Paper("UPipe", "2602.21196", [stages(), figure_1(), throughput_1(), figure_2(), figure_5()])


def stored(name: str) -> tuple[str, list[dict[str, Any]]]:
    """(command, rows) of a stored report."""
    data = json.loads((report.RESULTS / f"memory-{name}.json").read_text())
    return data["command"], data["rows"]


def stages() -> Table:
    """The fraction of attention's tensors that stages save."""
    command, rows = stored("stages")
    saved = {(row["H"], row["K"], row["S"]): 1 - row["UPipe"] / row["2H + 2K"] for row in rows}
    text = f"Share of q, k, v and out that a stage of 8 heads does not hold, on 8 ranks, counted by `{command}`."
    return Table(
        "87.5% less for 32B",
        text,
        [
            Row("64 query heads, 64 key heads", 0.875, saved[64, 64, 8]),
            Row(
                "64 query heads, 8 key heads",
                NOT_AVAILABLE,
                saved[64, 8, 8],
                "a stage holds all 8 key heads: 1 - (2 x 8 + 2 x 8) / (2 x 64 + 2 x 8) = 0.778",
            ),
        ],
    )


def figure_1() -> Table:
    """Longest sequences on 8 H100."""
    command, rows = stored("contexts")
    tokens = {(row["cluster"], row["attention"].split()[0]): row["tokens, M"] for row in rows}
    node = {name: length for (cluster, name), length in tokens.items() if cluster.startswith("8 ")}
    fpdt = fpdt_of(5 * M)
    inputs = fpdt.inputs_per_token / (fpdt.inputs_per_token + fpdt.host_per_token)
    reason = "the host's 2 TB hold 6.9M tokens' inputs of blocks; the paper's steps are whole millions"
    text = f"LLaMA-3-8B on 8 x H100, inputs of blocks and the optimizer on the host; simulated by `{command}`."
    return Table(
        "Figure 1, longest sequences",
        text,
        [
            Row("UPipe, million tokens", 5.0, node["upipe"], reason),
            Row(
                "UPipe over the best of the others",
                1.25,
                node["upipe"] / max(node["ulysses"], node["usp"], node["ring"]),
                "the paper says more than 25%: 5M over 4M",
            ),
            *(Row(f"{name}, million tokens", NOT_AVAILABLE, node[name]) for name in ("ulysses", "usp", "ring")),
            Row(
                "FPDT, million tokens, by formulas",
                NOT_AVAILABLE,
                inputs * node["upipe"],
                f"the host also has q, k, v, out and gradients of a block: {inputs:.2f} of UPipe's inputs of blocks",
            ),
        ],
    )


M = 10**6
OFFLOADED = Checkpointing("layer", offload=True, prefetch=False)
NODE = {"upipe": 8, "ulysses": 8, "usp": 4, "ring": 1}
"""Methods on 8 H100, and their ranks on the head axis."""


def throughput_1() -> Table:
    rows = list[Row]()
    for length, (name, ulysses) in product((1, 3, 5), NODE.items()):
        prediction = predicted(
            "llama3-8b", "8xh100", length * M, AttentionChoice(name), ulysses, OFFLOADED, on_host=True
        )
        tokens = length * M / prediction.time.seconds / 8
        shown = f"{tokens:.0f} tokens a second and GPU, MFU {prediction.mfu:.1%}"
        verdict = (
            "" if prediction.fits else f"does not fit: {prediction.gib:.1f} of {prediction.room.device / 2**30:.1f} GiB"
        )
        rows.append(Row(f"{name}, {length}M", NOT_AVAILABLE, shown, verdict))
    for length in (1, 3, 5):
        fpdt = fpdt_of(length * M)
        tokens = length * M / fpdt.seconds / 8
        mfu = fpdt.ulysses.mfu * fpdt.ulysses.time.seconds / fpdt.seconds
        shown = f"{tokens:.0f} tokens a second and GPU, MFU {mfu:.1%}"
        reason = f"{fpdt.copies:.0f} s of copies to and from the host in a step of {fpdt.seconds:.0f} s"
        rows.append(Row(f"FPDT, {length}M, by formulas", NOT_AVAILABLE, shown, reason))
    text = (
        "Predicted: each block's input on the host, no prefetch. The text says that UPipe matches the throughput of "
        "other methods; curves are not available. FPDT (arXiv 2408.16978) exchanges as many bytes as Ulysses, 64Ki "
        "tokens at a time, and keeps keys, values and queries of other chunks on the host. It is not run: no method "
        "here has query chunks around offloaded keys. Its copies are counted chunk by chunk under the causal mask."
    )
    return Table("Figure 1, throughput", text, rows)


def fpdt_of(length: int) -> Fpdt:
    """FPDT based on Ulysses on the same ranks."""
    step = predicted("llama3-8b", "8xh100", length, AttentionChoice("ulysses"), 8, OFFLOADED, on_host=True)
    return Fpdt(length, step)


def figure_2() -> Table:
    policies = {"AC": Checkpointing("layer"), "AO": OFFLOADED}
    rows = list[Row]()
    for (label, policy), (name, ulysses) in product(policies.items(), NODE.items()):
        prediction = predicted("llama3-8b", "8xh100", 3 * M, AttentionChoice(name), ulysses, policy, on_host=True)
        sizes = {part: size / 2**30 for part, size in list(prediction.memory.device_breakdown.items())[:4]}
        verdict = (
            ""
            if prediction.fits
            else f"out of memory: {prediction.gib:.1f} of {prediction.room.device / 2**30:.1f} GiB"
        )
        sizes_text = ", ".join(f"{part} {size:.1f}" for part, size in sizes.items())
        rows.append(Row(f"{label}, {name}", NOT_AVAILABLE, f"{prediction.gib:.1f} GiB: {sizes_text}", verdict))
    fpdt = fpdt_of(3 * M)
    attention = f"attention {fpdt.attention_memory / 2**30:.1f}"
    rows.append(
        Row(
            "AO, FPDT",
            NOT_AVAILABLE,
            f"{fpdt.device / 2**30:.1f} GiB, at the loss; {attention}",
            "chunks of 64Ki tokens at any length",
        )
    )
    text = (
        "LLaMA-3-8B, 3M tokens on 8 H100, by formulas, optimizer on the host. AC: each block's input is stored; AO: on "
        "the host. The text has no numbers of the figure."
    )
    return Table("Figure 2, memory at 3M tokens", text, rows)


def figure_5() -> Table:
    command, contexts = stored("contexts")
    tokens = {row["attention"].split()[0]: row["tokens, M"] for row in contexts if row["cluster"].startswith("16 ")}
    rows = [
        Row("UPipe hybrid, million tokens", 8.0, tokens["upipe+ring"], "2 x 1.9 TB of hosts hold 14.1M tokens' inputs"),
        Row(
            "USP hybrid, million tokens",
            6.0,
            tokens["usp"],
            "all inputs on the host: 10.5M; the paper's steps are 2M",
        ),
        Row("UPipe over USP", 8 / 6, tokens["upipe+ring"] / tokens["usp"]),
    ]
    for length in (2, 4, 6, 8):
        steps = [
            predicted("llama3-8b", "16xh100", length * M, AttentionChoice(name), 8, OFFLOADED, on_host=True)
            for name in ("upipe+ring", "usp")
        ]
        upipe, usp = steps
        reason = f"{upipe.gib:.1f} and {usp.gib:.1f} GiB: {upipe.gib / usp.gib:.2f} of the memory"
        rows.append(Row(f"{length}M: throughput over USP", 1.0, usp.time.seconds / upipe.time.seconds, reason))
    text = f"LLaMA-3-8B on 16 x H100: lengths simulated by `{command}`, throughput predicted, memory by formulas."
    return Table("Figure 5, lengths, memory and throughput on 16 H100", text, rows, ["curves are not available"])
