"""WallFacer: bytes and memory by team size C."""

from __future__ import annotations

import json
from math import isqrt
from typing import get_args

import report
import torch
from sent_bytes import CallSizes, sent_bytes

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import Placement
from armillary.attention.plans import Sizes
from armillary.core import SequenceLayout
from armillary.models import Checkpointing
from armillary.plan import Cluster
from armillary.plan.arguments import model_of
from armillary.plan.memory import AttentionChoice, Job, estimate
from armillary.plan.memory.room import Room
from paper_tables.steps import Step, predicted
from paper_tables.table import NOT_AVAILABLE, Paper, Row, Table

GIB = 2**30
LLAMA_7B = CallSizes(heads=32, kv_heads=32, rows=4)
"""Sizes of figure 1. We chose the length; ratios do not depend on it."""
TEAMS = (2, 4, 8)


def paper() -> Paper:
    return Paper(
        "WallFacer",
        "2407.00611",
        [
            example(),
            figure_1(),
            limits(),
            peak_memory(),
            figure_7(),
            figure_8(),
            scaling("Figure 9, strong scaling at 128K", STRONG),
            scaling("Figure 10, weak scaling", WEAK),
            longest(),
        ],
    )


def sent() -> Paper:
    """Only the tables of bytes."""
    return Paper("WallFacer", "2407.00611", [example()])


def example() -> Table:
    """Section 4.2.2: one block's forward of model M."""
    ring = sent_bytes(AttentionChoice("ring"), CallSizes(), rank=1)["forward"]
    team = sent_bytes(AttentionChoice("wallfacer", team=4), CallSizes(), rank=1)["forward"]
    assert ring.paper is not None and team.paper is not None
    p2p, collective = team.paper
    rows = [
        Row(
            "Ring, GiB",
            sum(ring.paper) / GIB,
            ring.total / GIB,
            "the paper counts 64 sends; the first shard is at home: 63 / 64 = 0.984",
        ),
        Row(
            "WallFacer C = 4, GiB",
            sum(team.paper) / GIB,
            team.total / GIB,
            "the log-sum-exp travels with partial outputs: 0.0006 GiB",
        ),
        Row("of which collective, GiB", collective / GIB, team.collective / GIB),
        Row("of which p2p, GiB", p2p / GIB, team.p2p / GIB),
    ]
    text = "Bytes of a block's forward: 65,536 tokens, 52 heads of 128, 64 ranks, full mask, on a rank that sends most."
    return Table("Section 4.2.2, model M", text, rows)


def figure_1() -> Table:
    """Peer-to-peer bytes of LLaMA-7B for every C."""
    choices = {1: AttentionChoice("ring")} | {team: AttentionChoice("wallfacer", team=team) for team in TEAMS}
    p2p = {
        (team, phase): sent.p2p
        for team, attention in choices.items()
        for phase, sent in sent_bytes(attention, LLAMA_7B, rank=1).items()
    }
    base = p2p[1, "forward"]
    rows = [Row("bars of the figure, GB", NOT_AVAILABLE, f"Ring {base / 1e9:.2f} forward at 64Ki tokens")]
    for team in TEAMS:
        # Ring makes P - 1 sends; a team makes P / C^2 exchanges, the first included.
        reason = (
            f"Ring makes 63 sends of 64: {1 / team:.4g} x 64 / 63"
            if abs(team * p2p[team, "forward"] / base - 1)
            else ""
        )
        rows.append(Row(f"forward, C = {team}, share of Ring's", 1 / team, p2p[team, "forward"] / base, reason))
    for team in TEAMS:
        ratio = p2p[team, "backward"] / p2p[1, "backward"]
        rows.append(Row(f"backward, C = {team}, share of Ring's", NOT_AVAILABLE, ratio))
    text = (
        "Peer-to-peer bytes of one block, LLaMA-7B, 64 ranks, batch 4. The text has no bars, but its equation 7: "
        "forward sends 2 B N H / C numbers."
    )
    return Table("Figure 1, bytes for every C", text, rows)


def limits() -> Table:
    """Sections 3.1, 3.2 and 4.2.1: all pairs in P / C^2 steps."""
    ranks = LLAMA_7B.ranks
    shape = AttentionShape.of(
        SequenceLayout.zigzag(2**16, ranks),
        AttentionMask(causal=False),
        heads=LLAMA_7B.heads,
        kv_heads=LLAMA_7B.heads,
        head_dim=LLAMA_7B.head_dim,
        dtype=torch.bfloat16,
    )
    rows = list[Row]()
    for team in (1, *TEAMS):
        choice = AttentionChoice("ring") if team == 1 else AttentionChoice("wallfacer", team=team)
        steps = sum(any(step.pairs) for step in choice.method.comm_plan(shape, ranks, 1).forward)
        rows.append(Row(f"C = {team}: steps in which all pairs meet", ranks // team**2, steps))
    text = (
        "Attention as an n-body problem with direct interactions: P processors hold C copies of N / P bodies each, and "
        "meet all pairs in P / C^2 steps. With `A = B N E e / P` bytes in one tensor of a rank's tokens, forward "
        "sends\n\n"
        "    collective(C) = (C - 1) (4 A + lse)      q, k, v in; out and its log-sum-exp back\n"
        "    p2p(C)        = 2 A C (P / C^2) = 2 A P / C\n\n"
        f"At C = 1 it is Ring: 0 + 2 A P. At C = sqrt(P) = {isqrt(ranks)} there is no ring, only the first exchange: "
        "4 A (sqrt(P) - 1) + 2 A sqrt(P). So C lies in 1..sqrt(P) and C^2 divides P. The sum has its minimum over "
        "real C at C = sqrt(P / 2), where both derivatives, 4 A and 2 A P / C^2, are equal."
    )
    return Table("Sections 3.1, 3.2 and 4.2.1, limits of C", text, rows)


def peak_memory() -> Table:
    """Equation 10, from the stored simulation."""
    stored = json.loads((report.RESULTS / "memory-wallfacer.json").read_text())
    rows = [Row(f"{row['method']}: activations of [T, E]", row["paper"], row["sum"]) for row in stored["rows"]]
    text = (
        "Before the last block's attention in backward: L + 1 checkpoints and 3 C tensors for q, k and v, beside the "
        f"memory of model and optimizer. Simulated by `{stored['command']}`, which takes minutes."
    )
    return Table("Equation 10, peak memory of model M", text, rows)


# -- figures 7 to 10: predicted throughput and memory ------------------------------------------------------------------

SETTINGS = {
    "A100_8": ("gpt-3b", "32xa100-40-ethernet"),
    "A100_16": ("gpt-3b", "32xa100-40x16-ethernet"),
    "H100_8": ("gpt-7b", "32xh100"),
}
"""Model and cluster of figure 7's three environments."""
LENGTHS = (2**16, 2**17)
"""The first is in the paper; we chose the second."""
GAINS = (77.12, 62.87, 42.45, 35.98, 34.62, 19.9)
BEST_TEAMS = {"A100_8": 4, "A100_16": 2}
CROSSING = {"A100_8": 8.5e9, "A100_16": 8.5e9, "H100_8": 69e9}
"""Assumed bytes a second of the single connection over which Ring leaves a node: of 11 on Ethernet, 1.5 cards of 46."""
STRONG = {8: 2**17, 16: 2**17, 32: 2**17, 64: 2**17}
WEAK = {8: 2**16, 16: 2**17, 32: 2**18, 64: 2**19}
"""Length by number of H100."""


def step(model: str, cluster: str, length: int, choice: AttentionChoice, crossing: float | None = None) -> Step:
    """A step with FlashAttention-2, as in the paper's implementation, and checkpoints at attention's output."""
    return predicted(model, cluster, length, choice, kernel="cuda_flash", crossing=crossing)


def gain(model: str, cluster: str, length: int, crossing: float | None = None) -> float:
    """Percent by which the best WallFacer is faster than Ring, which sends `crossing` bytes a second between nodes."""
    by_size = by_team(model, cluster, length)
    ring = step(model, cluster, length, AttentionChoice("ring"), crossing).time.seconds
    return 100 * (ring / by_size[best_team(by_size)][1].time.seconds - 1)


def by_team(model: str, cluster: str, length: int) -> dict[int, tuple[AttentionChoice, Step]]:
    """The faster placement of each team size that the ranks allow; 1 is Ring."""
    ranks = Cluster.named(cluster).ranks
    choices = {1: [AttentionChoice("ring")]}
    for team in (2, 4):
        if ranks % team**2 == 0:
            choices[team] = [AttentionChoice("wallfacer", team=team, placement=p) for p in get_args(Placement)]
    steps = {
        team: [(choice, step(model, cluster, length, choice)) for choice in options]
        for team, options in choices.items()
    }
    return {team: min(options, key=lambda each: each[1].time.seconds) for team, options in steps.items()}


def best_team(by_size: dict[int, tuple[AttentionChoice, Step]]) -> int:
    """The fastest of WallFacer's team sizes."""
    return min((team for team in by_size if team > 1), key=lambda team: by_size[team][1].time.seconds)


def waiting(by_size: dict[int, tuple[AttentionChoice, Step]]) -> str:
    """The difference between the times of Ring and of the best team."""
    ring, best = by_size[1][1].time, by_size[best_team(by_size)][1].time
    return (
        f"of {ring.seconds:.2f} s Ring waits {ring.exchange:.2f} s for exchanges, WallFacer {best.exchange:.2f} of "
        f"{best.seconds:.2f}"
    )


def figure_7() -> Table:
    gains, rows, assumed = list[tuple[float, str, str]](), list[Row](), list[tuple[float, str]]()
    for name, (model, cluster) in SETTINGS.items():
        for length in LENGTHS:
            by_size = by_team(model, cluster, length)
            best = best_team(by_size)
            title = f"{name}, {length // 1024}K, C = {best}"
            gains.append((gain(model, cluster, length), title, waiting(by_size)))
            assumed.append((gain(model, cluster, length, CROSSING[name]), title))
            if name in BEST_TEAMS:
                rows.append(Row(f"best C, {name}, {length // 1024}K", BEST_TEAMS[name], best, "C = 2 or 4"))
    ordered = sorted(gains, reverse=True)
    for paper_gain, (our_gain, title, reason) in zip(GAINS, ordered, strict=True):
        rows.append(Row(f"gain over Ring, % ({title})", paper_gain, round(our_gain, 2), reason))
    for paper_gain, (our_gain, title) in zip(GAINS, sorted(assumed, reverse=True), strict=True):
        crossing = CROSSING[title.split(",")[0]] / 1e9
        reason = f"Ring's connection between nodes at {crossing:g} GB/s"
        rows.append(Row(f"gain, % ({title}), Ring's crossing assumed", paper_gain, round(our_gain, 2), reason))
    text = (
        "32 GPUs of three clusters, GPT 3B and 7B, two lengths each. The text gives six gains without their settings, "
        "so both sets are sorted; its second lengths are not available, ours are 128K. Predicted with the published "
        "speed "
        "of FlashAttention-2. Presets: Ethernet of 11 GB/s for a node; H100 nodes with eight cards of 46 GB/s."
    )
    notes = [
        "curves and their tokens a second are not available",
        "Ring's crossing assumed: a ring leaves a node over one connection, WallFacer's teams over as many as a node "
        "has ranks. So the bandwidth of a single connection decides the gain, and the paper does not state it. The "
        "presets give it all of a node's Ethernet (11 GB/s), where a TCP connection may attain less, and one of eight "
        "cards (46 GB/s), where NCCL may spread a send over several. 8.5 and 69 GB/s, the same for all settings of a "
        "network, are chosen so that the set of gains is near the paper's: these six rows are fitted, those above are "
        "not",
    ]
    return Table("Figure 7, throughput on 32 GPUs", text, rows, notes)


def figure_8() -> Table:
    rows = list[Row]()
    for name, (model, cluster) in SETTINGS.items():
        for length in LENGTHS:
            by_size = by_team(model, cluster, length)
            best = best_team(by_size)
            ring, team = by_size[1][1], by_size[best][1]
            a = length // 32 * 4096 * 2 / 2**30
            reason = f"{team.gib - ring.gib:.2f} GiB more; equation 10 has 3 (C - 1) A = {3 * (best - 1) * a:.2f}"
            rows.append(
                Row(
                    f"{name}, {length // 1024}K, C = {best}: WallFacer over Ring",
                    "1.086 to 1.445",
                    team.gib / ring.gib,
                    reason,
                )
            )
    text = (
        "Ring uses 7.9 to 30.79% less than WallFacer at the best throughput's C, so WallFacer 8.6 to 44.5% more. The "
        "ratio falls as the model grows: model and optimizer take more, as in the paper."
    )
    return Table("Figure 8, memory", text, rows, ["which bar has which ratio is not available"])


def scaling(heading: str, lengths: dict[int, int]) -> Table:
    rows = list[Row]()
    for ranks, length in lengths.items():
        by_size = by_team("gpt-7b", f"{ranks}xh100", length)
        best = best_team(by_size)
        our_gain = gain("gpt-7b", f"{ranks}xh100", length)
        title, reason = f"{ranks} H100, {length // 1024}K, C = {best}: gain, %", waiting(by_size)
        if ranks > 8:
            two_cards = gain("gpt-7b", f"{ranks}xh100", length, crossing=2 * 46e9)
            reason += f"; {two_cards:.1f}% if Ring's sends between nodes use two cards"
        paper_gain = 60.71 if lengths is STRONG and ranks == 64 else NOT_AVAILABLE
        rows.append(Row(title, paper_gain, round(our_gain, 2), reason))
    grows = "the gain grows with the ranks" if lengths is STRONG else "the gain grows less than in strong scaling"
    return Table(heading, f"GPT 7B; the text says that {grows}. Curves are not available.", rows)


def longest_million(choice: AttentionChoice) -> float:
    """Longest sequence in million tokens of LLaMA-3-8B on 8 H100 by formulas, inputs of blocks on the host."""
    room, offloaded = Room.of(Cluster.named("8xh100")), Checkpointing("layer", offload=True, prefetch=False)
    low, high = 0, 2**18
    while high - low > 1:
        middle = (low + high) // 2
        length = 64 * middle
        axes = {"ring": 8, "ulysses": 1}
        job = Job(
            model=model_of("llama3-8b", length),
            axes=axes,
            attention=choice,
            length=length,
            checkpointing=offloaded,
            on_host=True,
        )
        low, high = (middle, high) if room.share(estimate(job)) <= 1 else (low, middle)
    return 64 * low / 1e6


def longest() -> Table:
    """Longest sequences, and the reason why WallFacer's is shorter than Ring's."""
    head = 128 * 2
    call = Sizes(32 * head, 8 * head, 32 * 4, 2, 4)  # LLaMA-3-8B, bytes of a token
    rows = list[Row]()
    for name, choice in (("Ring", AttentionChoice("ring")), ("WallFacer, C = 2", AttentionChoice("wallfacer", team=2))):
        plan = choice.method.sequence_plan(8)
        forward, backward = plan.forward_memory(call, 8) / call.q, plan.backward_memory(call, 8) / call.q
        rows.append(Row(f"{name}: attention's forward, in [T, E]", NOT_AVAILABLE, forward))
        rows.append(Row(f"{name}: attention's backward, in [T, E]", NOT_AVAILABLE, backward))
    stored = json.loads((report.RESULTS / "memory-contexts.json").read_text())
    for row in stored["rows"]:
        if row["cluster"].startswith("8 ") and row["attention"].split()[0] in ("ring", "wallfacer"):
            per_million = row["+1M: device GiB"] - row["device GiB"]
            title, reason = f"{row['attention']}: longest, million tokens", f"{per_million:.1f} GiB a million"
            rows.append(Row(title, NOT_AVAILABLE, row["tokens, M"], reason))
    for heads in (8, 4):
        choice = AttentionChoice("upipe+wallfacer", heads_per_stage=heads, team=2)
        title = f"upipe+wallfacer, C = 2, stages of {heads} heads: longest, million tokens, by formulas"
        rows.append(Row(title, NOT_AVAILABLE, longest_million(choice)))
    text = (
        "The paper's maximum lengths were not significantly impacted: its checkpoints, L + 1 of [T, E], outweigh 3 C "
        f"for q, k and v. With checkpoints on the host (`{stored['command']}`) only attention's own tensors limit the "
        "length, and a team's are C times a rank's: in backward also out, dout and the gradients in float32. Equation "
        "10 counts none of these. In stages of heads (`--parallel.attention upipe+wallfacer --parallel.heads-per-stage "
        "8`, with `ulysses` 1) all of them shrink with the number of stages, and WallFacer's sequences are "
        "longer than Ring's; with 4 heads a stage the host's memory is the limit. Keys then travel once a stage: 2.5 "
        "times the bytes, which attention's computation hides at these lengths."
    )
    return Table("Longest sequences, LLaMA-3-8B on 8 H100", text, rows)
