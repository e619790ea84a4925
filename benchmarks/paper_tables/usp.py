"""USP: bytes of methods, and of parallelisms around them."""

from __future__ import annotations

import json

import report
import torch
from sent_bytes import CallSizes, sent_bytes

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.plans import RingPlan, Step, UlyssesPlan
from armillary.core import SequenceLayout
from armillary.models.parallel import ZeroStage
from armillary.plan import Cluster
from armillary.plan.memory import AttentionChoice
from armillary.plan.search.search import SearchOptions, search
from armillary.plan.time.clocks import PassTime, plan_seconds
from armillary.plan.time.passes import FORWARD_FLOPS
from paper_tables import usp_training
from paper_tables.block_costs import BlockCosts, block_costs, plain_tensor_parallel
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table

HIDDEN = 65_536 * 64 * 128 * 2
"""Bytes of one [N, E] in bfloat16: 65,536 tokens, 64 heads of 128."""
GROUPS = 8
STAYS = "1 part in 8 of each all-to-all stays where it is: 7 / 8 = 0.875"


def paper() -> Paper:
    tables = [
        attention_bytes(),
        table_2(),
        throughput("Table 3, 8 x L20 on PCIe", "8xl20", TABLE_3),
        throughput("Table 4, 8 x A100 with NVLink", "8xa100-80", TABLE_4),
        figure_5(),
        usp_training.table_5(),
        usp_training.table_6(),
        usp_training.table_7(),
        usp_training.fits(),
        figure_6(),
    ]
    return Paper("USP", "2405.07719", tables)


def sent() -> Paper:
    """Only the tables of bytes."""
    return Paper("USP", "2405.07719", [attention_bytes()])


def attention_bytes() -> Table:
    """Bytes of attention alone, with as many key heads as query heads and with fewer."""

    def units(method: str, kv_heads: int = 64) -> tuple[float, float]:
        sent = sent_bytes(AttentionChoice(method), CallSizes(heads=64, kv_heads=kv_heads, ranks=8))
        forward, backward = (phase.total / HIDDEN for phase in sent.values())
        return forward, forward + backward

    ulysses, ring = units("ulysses"), units("ring")
    grouped_ulysses, grouped_ring = units("ulysses", 64 // GROUPS), units("ring", 64 // GROUPS)
    rows = [
        Row("Ulysses, forward (DeepSpeed-Ulysses)", 4 / 8, ulysses[0], STAYS),
        Row("Ulysses, forward and backward", 8 / 8, ulysses[1], STAYS),
        Row(
            "Ring, forward and backward",
            4.0,
            ring[1],
            "backward sends q, out, dout (3 units), lse, and dq in float32 (2 units), fewer bytes than k, v, dK and dV "
            "(2 + 4): 7 / 8 of 2 + 5.02 units",
        ),
        Row(f"Ulysses, GQA of {GROUPS}, forward and backward", 4 / 8 + 4 / 8 / GROUPS, grouped_ulysses[1], STAYS),
        Row(
            f"Ring, GQA of {GROUPS}, forward and backward",
            4 / GROUPS,
            grouped_ring[1],
            "dK and dV travel too, summed in float32: (2 + 2 + 4) / 8 units, of which 7 / 8 are sent",
        ),
    ]
    text = (
        "In units of O(bs L d), one tensor of all hidden states in bfloat16: 65,536 tokens, 64 heads of 128, 8 ranks, "
        "full mask. Paper inconsistent: Ring's 4 counts K and V forward and again backward, 2 + 2, without dK and dV, "
        "which every ring of keys sends: 2 + 2 + 2 = 6 in 16 bits."
    )
    return Table("Table 2, columns of activations: attention alone", text, rows)


TABLE_2: dict[str, tuple[dict[str, int], str, ZeroStage, float, str, float]] = {
    # row: axes, attention, ZeRO stage, parameters in d^2, activations in bs L d, their number
    "SP-Ulysses": ({"ulysses": 8}, "ulysses", 2, 12, "8 / N", 8 / 8),
    "SP-Ring": ({"ring": 8}, "ring", 2, 12, "4", 4),
    "DP": ({"replicate": 8, "shard": 1}, "local", 2, 12, "0", 0),
    "ZeRO-1": ({"shard": 8}, "local", 1, 12, "0", 0),
    "USP + ZeRO-1": ({"ring": 2, "ulysses": 4}, "usp", 1, 12, "<= 4", 4),
    "USP + ZeRO-2": ({"ring": 2, "ulysses": 4}, "usp", 2, 12, "<= 4", 4),
    "USP + ZeRO-3": ({"ring": 2, "ulysses": 4}, "usp", 3, 18, "<= 4", 4),
    "TP-sp": ({"shard": 1, "tp": 8}, "local", 2, 0, "10", 10),
}
TWICE = "paper inconsistent: an all-reduce of parameters counts once (12), one of TP twice (4 x 2); by its own factors"


def table_2() -> Table:
    """Table 2, on the real FSDP2, attention methods and tensor parallelism."""
    costs_by_name = {
        name: block_costs(axes, attention, stage) for name, (axes, attention, stage, *_) in TABLE_2.items()
    }
    rows = [row for name, costs in costs_by_name.items() for row in block_rows(name, costs)]
    activations, stored = plain_tensor_parallel()
    rows += [
        Row("TP: parameters, d^2", 0, 0),
        Row("TP: activations (8), bs L d", 8, activations),
        Row("TP: stored activations, bs L d bytes", NOT_AVAILABLE, stored),
        Row("split dimensions", "hc/L, L/L, bs/bs, hc/d", "heads or tokens, tokens, rows, heads"),
    ]
    text = (
        "One block of a GPT with 12 d^2 parameters (d 512, 16 heads, 8,192 tokens) on 8 ranks, without recomputation: "
        "a step of two blocks less one of one block, counted on rank 0. Parameters are elements in d^2, times the "
        "paper's factors of algorithms (all-reduce 2, all-gather and reduce-scatter 1); activations are in bs L d. "
        "Memory is in bytes a parameter; N = 8. FSDP2 shards the optimizer in every row but DP, and gradients in every "
        "row but DP and those of ZeRO-1; the paper keeps both whole in the rows of plain SP. ZeRO-1 is "
        "`--parallel.zero-stage 1` with two micro-batches: parameters stay gathered and gradients unsharded until the "
        "last one. TP, whose tokens are not sharded, is torch's tensor parallelism on a block of its own: the trainer "
        "has TP-sp alone."
    )
    return Table("Table 2, one block under each parallelism", text, rows)


def block_rows(name: str, costs: BlockCosts) -> list[Row]:
    """Communication and memory of a row of table 2."""
    parameters, formula, activations = TABLE_2[name][3:]
    reason = {
        "SP-Ulysses": STAYS,
        "SP-Ring": "dK and dV travel too: 2 + 2 + 2 in 16 bits; visible halves under a causal mask and 7 / 8 sent",
        "TP-sp": "8 transfers of 7 / 8 in place of 10: gathered inputs are stored, not gathered again",
    }.get(name, STAYS + "; a causal mask sends half of the ring's keys" if activations else "")
    sharing = 1 if name == "DP" else 8
    whole_gradients = name in ("SP-Ulysses", "SP-Ring", "DP") or "ZeRO-1" in name
    sharded_gradients = "not sharded" if name == "DP" or "ZeRO-1" in name else "sharded over 8 ranks"
    return [
        Row(
            f"{name}: parameters, d^2", parameters, costs.parameters, f"{TWICE} {2 * parameters}" if parameters else ""
        ),
        Row(f"{name}: activations ({formula}), bs L d", activations, costs.activations, reason),
        Row(
            f"{name}: optimizer, bytes a parameter",
            12 if name.startswith("SP-") or name == "DP" else 12 / sharing,
            costs.optimizer,
            "the paper's 12 bytes are whole; FSDP2 shards them over 8 ranks" if name.startswith("SP-") else "",
        ),
        Row(
            f"{name}: gradients, bytes a parameter",
            2 if whole_gradients else 2 / sharing,
            costs.gradients,
            f"float32 in place of 16 bits, 4 / 2, {sharded_gradients}",
        ),
        Row(f"{name}: stored activations, bs L d bytes", NOT_AVAILABLE, costs.stored),
    ]


# -- tables 3 and 4: attention alone ---------------------------------------------------------------------------------

Throughput = dict[int, dict[int, tuple[float, float]]]
"""Passes a second by Ki tokens and Ulysses degree: (basic ring, balanced ring)."""

TABLE_3: Throughput = {
    8: {8: (57.346, 57.098), 4: (153.134, 152.189), 2: (415.5, 454.93), 1: (358.595, 361.969)},
    32: {8: (15.229, 14.262), 4: (28.584, 32.818), 2: (44.348, 62.754), 1: (40.478, 58.377)},
    128: {8: (2.563, 2.586), 4: (3.217, 4.235), 2: (3.399, 5.476), 1: (3.131, 5.186)},
}
TABLE_4: Throughput = {
    32: {8: (135.569, 136.375), 4: (103.525, 132.979), 2: (91.365, 132.979), 1: (81.985, 113.79)},
    128: {8: (2.782, 2.785), 4: (2.024, 2.771), 2: (1.73, 2.89), 1: (1.628, 2.91)},
}


def throughput(title: str, cluster: str, published: Throughput) -> Table:
    """Forward passes a second of 32 heads, 8 of keys, with the basic and the balanced ring."""
    machines, rows = Cluster.named(cluster), list[Row]()
    for length, by_split in published.items():
        predictions = {split: [forward(machines, length * 1024, split, kind) for kind in KINDS] for split in by_split}
        for split, figures in by_split.items():
            for kind, paper_figure, span in zip(KINDS, figures, predictions[split], strict=True):
                rows.append(
                    pass_row(
                        f"{length}K, U {split} x R {8 // split}, {KINDS[kind]}", paper_figure, span, length, machines
                    )
                )
        best = (
            max(by_split, key=lambda split: by_split[split][1]),
            min(predictions, key=lambda split: predictions[split][1].seconds),
        )
        rows.append(Row(f"{length}K, best U", best[0], best[1], spread(predictions)))
    notes = [
        "paper inconsistent: table 3's best at 32K and 128K is U 2 where its text says U 4",
        "paper inconsistent: table 4 attains 150 TFLOPS a GPU at 32K and 49 at 128K, on an A100; table 3 has 96 at "
        "128K "
        "on an L20",
        "the network of 8 x L20 is fitted to table 3's balanced ring (`HOST_BRIDGES`); A100's is not fitted",
    ]
    text = (
        "Forward passes of attention a second: 32 query heads, 8 key heads of 128, causal. The basic ring is our "
        "contiguous layout, the balanced one zigzag; both pass every shard all the way round, as the paper's do."
    )
    return Table(title, text, rows, notes)


KINDS = {"contiguous": "basic ring", "zigzag": "balanced ring"}


def spread(predictions: dict[int, list[PassTime]]) -> str:
    """The range of the predictions."""
    times = [spans[1].seconds for spans in predictions.values()]
    return f"predictions differ by {max(times) / min(times) - 1:.1%}"


def forward(cluster: Cluster, length: int, split: int, kind: str) -> PassTime:
    """Time of USP's forward on 8 ranks. The paper's ring sends every shard to all ranks, visible or not."""

    def steps(causal: bool) -> tuple[Step, ...]:
        layout = (
            SequenceLayout.zigzag(length, 8 // split)
            if kind == "zigzag"
            else SequenceLayout.contiguous(length, 8 // split)
        )
        work = AttentionShape.of(
            layout, AttentionMask(causal), heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16
        )
        return UlyssesPlan().comm_plan(work, split, RingPlan().comm_plan).forward

    full_steps, causal_steps, device = steps(causal=False), steps(causal=True), cluster.accelerator
    # Our causal plan is shorter for ranks without pairs, so take its pairs and the moves of the full mask.
    pairs = [step.pairs for step in causal_steps] + [()] * (len(full_steps) - len(causal_steps))
    combined = [
        Step(step.moves, count or (step.pairs and (0,) * 8)) for step, count in zip(full_steps, pairs, strict=True)
    ]
    return plan_seconds(combined, cluster, FORWARD_FLOPS * 128 / (device.flops * device.attention_shares(length)[0]))


def pass_row(title: str, paper: float, span: PassTime, length: int, cluster: Cluster) -> Row:
    """A row, with attained FLOPs as its reason."""
    flops = FORWARD_FLOPS * 128 * 32 * (length * 1024) ** 2 / 2 / 8
    reason = (
        f"the paper attains {flops * paper / 1e12:.0f} TFLOPS a GPU, ours {flops / span.seconds / 1e12:.0f}: a kernel "
        f"of {cluster.accelerator.flops * cluster.accelerator.attention_shares(length * 1024)[0] / 1e12:.0f}, and "
        f"{span.exposed / span.seconds:.0%} of the time waiting"
    )
    ratio = 1 / span.seconds / paper
    return Row(title, paper, 1 / span.seconds, reason if abs(ratio - 1) > 0.05 else "")


# -- data parallelism, convergence ------------------------------------------------------------------------------------


def figure_5() -> Table:
    """Data parallelism compared with sequence parallelism, both chosen by the planner."""
    rows = list[Row]()
    for tokens in ("4Ki", "8Ki", "16Ki"):
        plan = SearchOptions(
            model="llama2-7b", cluster="8xa800", tokens=tokens, rows=8, attention=("local", "ulysses", "ring")
        )
        result = search(plan)
        best = result.fitting[0]
        other = next(
            each for each in result.fitting if each.candidate.mesh.replicas == 1 and each.candidate.mesh.tp == 1
        )
        rows.append(
            Row(f"{tokens}, fastest", "DP", str(best.candidate.mesh), f"{other.candidate.mesh}: {result.reason(other)}")
        )
    text = "LLaMA2-7B on 8 x A800, a global batch of 8 (tip 2): the search chooses among all meshes, and says why."
    return Table("Figure 5, data parallelism before sequence parallelism", text, rows, ["the curves are not available"])


def figure_6() -> Table:
    """Distance between the curves of USP and data parallelism, and between those of two seeds, from stored runs."""
    stored = json.loads((report.RESULTS / "convergence.json").read_text())
    rows = list[Row]()
    for row in stored["rows"]:
        meshes, seeds = float(row["USP and DP apart"]), float(row["seeds apart"])
        reason = f"two seeds are {seeds:.5f} apart, {seeds / max(meshes, 1e-5):.1f} times as much"
        rows.append(Row(f"{row['precision']}: USP and DP apart, nats", "coincide", f"{meshes:.5f}", reason))
    rows.append(Row("Section 6, MoE with expert parallelism", "mentioned", None, "out of scope"))
    text = (
        f"Loss over 10,000 steps of a small LLaMA on 2 ranks, stored by `{stored['command']}`: mean absolute "
        "difference of curves of 100-step means, the larger of two seeds ([report](convergence.md)). "
        "[Losses of 200 steps on 7 meshes](equality.md) compare five methods.\n\n"
        "![Loss of USP and of data parallelism, two seeds](convergence.png)"
    )
    return Table("Figure 6, convergence, and section 6", text, rows)
