"""Latents against expanded keys on an emulated network of 4 nodes of 4 ranks: Ring and USP with 128 heads.

    uv run python benchmarks/cluster/latents.py              # a few minutes; needs root and iproute2

Head dims, latents and rotary keys are a sixteenth of DeepSeek-V3's, so that two cores can compute 16 ranks: 12 (q, k),
8 (v), 32 and 4. The numbers of a token keep their ratio, 2560 of expanded keys to 36. All results are compared with one
rank's before anything is timed. The forms alternate; a figure is the median over turns of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from network import leave_on_signals, obstacle, results_of
from torch import Tensor

from armillary.attention import AttentionMask, Local, Method, build_attention
from armillary.core import CommLedger, build_mesh
from armillary.data.console.units import count_argument
from armillary.plan import Cluster

RANKS, HEADS, HEAD_DIM, VALUE_DIM, ROTARY, LATENT = 16, 128, 12, 8, 4, 32
MASK = AttentionMask()
METHODS = {"ring": {"ring": 16}, "usp": {"ring": 4, "ulysses": 4}}
FORMS = {"expanded": False, "latents": True}
CLUSTERS = ("emulated-4x4-card-per-node", "emulated-4x4-card-per-rank")


def inputs(tokens: int) -> list[Tensor]:
    """Returns q, rotary keys, latents, dout of the full sequence and the expansion, equal on every rank."""
    generator, length = torch.Generator().manual_seed(0), tokens * RANKS
    shapes = (length, HEADS, HEAD_DIM), (length, 1, ROTARY), (length, 1, LATENT), (length, HEADS, VALUE_DIM)
    tensors = [torch.randn(1, *shape, generator=generator) for shape in shapes]
    expansion = torch.randn(HEADS, HEAD_DIM - ROTARY + VALUE_DIM, LATENT, generator=generator)
    return [*tensors, expansion * LATENT**-0.5]


def turn_of(method: Method, tokens: int, sends_latents: bool) -> Callable[[], list[Tensor]]:
    """Returns forward and backward of this rank's tokens: out and the gradients of q, rotary keys and latents."""
    layout, (*sharded, expansion) = method.layout(tokens * RANKS), inputs(tokens)
    q, k, v, dout = (layout.take(x, method.shard).clone() for x in sharded)
    leaves = [x.requires_grad_() for x in (q, k, v, expansion)]

    def turn() -> list[Tensor]:
        method.send_latents = sends_latents
        out = method(q, k, v, mask=MASK, layout=layout, expansion=expansion)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)[:3]]

    return turn


def measure(tokens: int, turns: int) -> dict[str, dict[str, Any]]:
    """Returns by method and form the seconds of each turn and the bytes that rank 0 sent."""
    *sharded, expansion = inputs(tokens)
    q, k, v, dout = sharded
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = Local()(q, k, v, mask=MASK, expansion=expansion)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    runs, sent_bytes = dict[str, Callable[[], list[Tensor]]](), dict[str, int]()
    for name, axes in METHODS.items():
        method = build_attention(name, build_mesh("cpu", ring=axes["ring"], ulysses=axes.get("ulysses", 1)))
        layout = method.layout(tokens * RANKS)
        for form, sends_latents in FORMS.items():
            turn = runs[f"{name} {form}"] = turn_of(method, tokens, sends_latents)
            with CommLedger() as ledger:
                results = turn()
            sent_bytes[f"{name} {form}"] = ledger.bytes()
            for result, full_result in zip(results, expected, strict=True):
                right = layout.take(full_result, method.shard)
                if not (error := (result - right).norm() / full_result.norm()) < 1e-4:
                    raise RuntimeError(f"{name} {form}: wrong results, relative error {error:.1e}")
    seconds = {name: list[float]() for name in runs}
    for _ in range(turns):
        for name, turn in runs.items():
            dist.barrier()
            start = time.perf_counter()
            turn()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: {"seconds": seconds[name], "sent": sent_bytes[name]} for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count_argument(), nargs="+", default=[64, 128], help="tokens per rank")
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
    print("| network | tokens a rank | method | MB sent by rank 0: expanded, latents | tokens/s | times as many |")
    print("|---|---|---|---|---|---|")
    for cluster in CLUSTERS:
        flags = ["--tokens", *map(str, options.tokens), "--turns", str(options.turns)]
        results = results_of(Cluster.named(cluster), Path(__file__), *flags)
        for tokens in options.tokens:
            for name in METHODS:
                expanded, latents = (results[str(tokens)][f"{name} {form}"] for form in FORMS)
                ratio = median(a / b for a, b in zip(expanded["seconds"], latents["seconds"], strict=True))
                speeds = ", ".join(f"{tokens * RANKS / median(form['seconds']):.0f}" for form in (expanded, latents))
                sent = f"{expanded['sent'] / 1e6:.1f}, {latents['sent'] / 1e6:.2f}"
                print(f"| {cluster} | {tokens} | {name} | {sent} | {speeds} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
