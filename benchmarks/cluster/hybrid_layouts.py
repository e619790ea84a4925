"""Layouts of a hybrid on an emulated network of 4 ranks: three layers of the delta rule, and causal Ring attention.

    uv run python benchmarks/cluster/hybrid_layouts.py              # a few minutes; needs root and iproute2

zigzag       all layers on zigzag shards
relaid       attention on zigzag shards, states on contiguous ones, with `relayout` before and after them
contiguous   all layers on contiguous shards

The layouts alternate; figures are medians of forward and backward. The prediction uses closed forms of the bytes, the
network's bandwidth, and the times of a layer's kernels alone, measured on all ranks at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from network import leave_on_signals, obstacle, results_of
from predict import BACKWARD, FORWARD
from torch import Tensor
from torch.nn.functional import normalize

from armillary.attention import AttentionMask, AttentionShape, CommPlan, Local, Ring
from armillary.core import Axis, CommLedger, SequenceLayout, build_mesh, relayout
from armillary.data.console.units import count_argument
from armillary.plan import Cluster
from armillary.plan.memory import AttentionChoice
from armillary.plan.time.clocks import plan_seconds
from armillary.states import gated_delta_rule, relayout_comm_plan, state_comm_plan

RANKS, HEADS, DIM, STATE_LAYERS = 4, 8, 64, 3
VARIANTS = ("zigzag", "relaid", "contiguous")
ELEMENT = 4  # bytes of a float32
MASK = AttentionMask(causal=True)


def network() -> Cluster:
    """One node of 4 ranks with a port each."""
    return replace(Cluster.named("emulated-4x4-card-per-rank"), nodes=1)


def layouts(variant: str, length: int) -> tuple[SequenceLayout, SequenceLayout]:
    """Returns the layouts of attention and of states."""
    zigzag, contiguous = SequenceLayout.zigzag(length, RANKS), SequenceLayout.contiguous(length, RANKS)
    return contiguous if variant == "contiguous" else zigzag, zigzag if variant == "zigzag" else contiguous


# -- one rank ---------------------------------------------------------------------------------------------------------


def state_layer(x: Tensor, **options: Any) -> Tensor:
    key = normalize(x, dim=-1)
    decay = torch.full(x.shape[:3], -0.1)
    return gated_delta_rule(key, key, x, decay, decay.exp(), **options)[0]


def hybrid(x: Tensor, variant: str, method: Ring | Local, axis: Axis | None) -> Tensor:
    """Applies the four layers to this rank's x [1, T, H, D]."""
    if axis is None:
        for _ in range(STATE_LAYERS):
            x = x + state_layer(x)
        return x + method(x, x, x, mask=MASK)
    attention, states = layouts(variant, x.shape[1] * RANKS)
    x = relayout(x, attention, states, axis) if states != attention else x
    for _ in range(STATE_LAYERS):
        x = x + state_layer(x, layout=states, axis=axis)
    x = relayout(x, states, attention, axis) if states != attention else x
    return x + method(x, x, x, mask=MASK, layout=attention)


def measure(tokens: int, turns: int) -> dict[str, Any]:
    """Returns seconds of each variant's turns, sent bytes, and seconds of the kernels alone, on this rank."""
    torch.manual_seed(0)
    full, dout = (torch.randn(1, tokens * RANKS, HEADS, DIM) for _ in range(2))
    ring = build_mesh("cpu", ring=RANKS)["ring"]
    axis, method, local = Axis.of(ring), Ring(ring), Local()
    leaf = full.clone().requires_grad_()
    expected = hybrid(leaf, "", local, None)
    (expected_grad,) = torch.autograd.grad(expected, leaf, dout)

    def turn_of(variant: str) -> Callable[[], tuple[Tensor, Tensor]]:
        layout = layouts(variant, tokens * RANKS)[0]
        x, own_dout = layout.take(full, axis.rank).clone().requires_grad_(), layout.take(dout, axis.rank)

        def turn() -> tuple[Tensor, Tensor]:
            out = hybrid(x, variant, method, axis)
            return out.detach(), torch.autograd.grad(out, x, own_dout)[0]

        return turn

    runs = {variant: turn_of(variant) for variant in VARIANTS}
    sent_bytes = dict[str, int]()
    for variant, turn in runs.items():
        layout = layouts(variant, tokens * RANKS)[0]
        with CommLedger() as ledger:
            results = turn()
        sent_bytes[variant] = ledger.bytes()
        for result, full_result in zip(results, (expected.detach(), expected_grad), strict=True):
            error = (result - layout.take(full_result, axis.rank)).norm() / full_result.norm()
            if not error < 1e-4:
                raise RuntimeError(f"{variant}: wrong results, relative error {error:.1e}")

    shard, shard_dout = (x[:, :tokens].clone() for x in (full, dout))
    shard.requires_grad_()
    kernels = {
        "state": lambda: torch.autograd.grad(state_layer(shard), shard, shard_dout),
        "attention": lambda: torch.autograd.grad(
            local(shard, shard, shard, mask=AttentionMask(causal=False)), shard, shard_dout
        ),
    }
    seconds = {name: list[float]() for name in (*runs, *kernels)}
    for _ in range(turns):
        for name, turn in {**runs, **kernels}.items():
            dist.barrier()
            start = time.perf_counter()
            turn()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "sent": sent_bytes}


# -- prediction -------------------------------------------------------------------------------------------------------


def predicted(variant: str, tokens: int, state_seconds: float, block_seconds: float) -> float:
    """Returns the seconds of a turn.

    Args:
        state_seconds: forward and backward of a state layer on T tokens.
        block_seconds: attention of T queries to T keys.
    """
    cluster, (attention, states) = network(), layouts(variant, tokens * RANKS)
    shape = AttentionShape.of(
        attention, MASK, heads=HEADS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, projected=False
    )
    plan = AttentionChoice("ring").method.comm_plan(shape, RANKS, 1)
    pair = block_seconds / (tokens**2 * HEADS)
    passes = ((plan.forward, FORWARD), (plan.backward, BACKWARD))
    seconds = sum(plan_seconds(steps, cluster, pair * n / (FORWARD + BACKWARD)).seconds for steps, n in passes)
    state_plan = state_comm_plan(
        "gated_delta_rule", states, heads=HEADS, key_dim=DIM, value_dim=DIM, element_size=ELEMENT
    )
    seconds += STATE_LAYERS * (state_seconds + communication_seconds(state_plan, cluster))
    if states != attention:
        seconds += 2 * communication_seconds(relayout_comm_plan(attention, states, ELEMENT * HEADS * DIM), cluster)
    return seconds


def communication_seconds(plan: CommPlan, cluster: Cluster) -> float:
    """Returns the seconds of forward and backward of a plan without attention's pairs."""
    return sum(plan_seconds(steps, cluster, 0.0).seconds for steps in (plan.forward, plan.backward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count_argument(), nargs="+", default=[64, 256, 1024], help="tokens per rank")
    parser.add_argument("--turns", type=count_argument(), default=5)
    parser.add_argument("--out", type=Path, help="run as one rank, and write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.out is not None:
        dist.init_process_group("gloo")
        results = {tokens: measure(tokens, options.turns) for tokens in options.tokens}
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(results))
        dist.barrier()
        dist.destroy_process_group()
        return
    if (reason := obstacle()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    leave_on_signals()
    flags = ["--tokens", *map(str, options.tokens), "--turns", str(options.turns)]
    results = results_of(network(), Path(__file__), *flags)
    print("| tokens a rank | layout | MB sent by rank 0 | measured | of zigzag | predicted | of zigzag |")
    print("|---|---|---|---|---|---|---|")
    for tokens in options.tokens:
        seconds, sent_bytes = results[str(tokens)]["seconds"], results[str(tokens)]["sent"]
        kernels = median(seconds["state"]), median(seconds["attention"])
        estimates = {variant: predicted(variant, tokens, *kernels) for variant in VARIANTS}
        for variant in VARIANTS:
            ratio = median(a / b for a, b in zip(seconds[variant], seconds["zigzag"], strict=True))
            columns = f"{median(seconds[variant]):.3f} s | {ratio:.2f} | {estimates[variant]:.3f} s"
            estimate_ratio = estimates[variant] / estimates["zigzag"]
            print(f"| {tokens} | {variant} | {sent_bytes[variant] / 1e6:.2f} | {columns} | {estimate_ratio:.2f} |")


if __name__ == "__main__":
    main()
