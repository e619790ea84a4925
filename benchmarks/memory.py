"""Simulated memory of training steps: savings of UPipe's stages, and the longest sequences that fit.

    python benchmarks/memory.py                         all parts except `node`, about 40 minutes on 2 cores
    python benchmarks/memory.py --only stages wallfacer

Needs no GPU. Figures are bytes of live tensors on rank 0 of a fake process group during a real training step, of
`stages` during a forward pass.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from attention_memory import attention_intermediates, memory_before_attention
from report import RESULTS, write
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method, Ring, Ulysses, UPipe, WallFacer
from armillary.models import Checkpointing, LlamaConfig
from armillary.plan.memory import simulate
from armillary.plan.memory.cli import MemoryOptions, plan_memory
from armillary.plan.search.cli import stored_text
from armillary.plan.search.search import SearchOptions, search

Row = dict[str, Any]

PLANS: dict[str, list[MemoryOptions]] = {
    "contexts": [
        MemoryOptions(cluster="8xh100", attention="upipe", tokens="7M"),
        MemoryOptions(cluster="8xh100", attention="upipe+ring", ulysses=4, tokens="6M"),
        MemoryOptions(cluster="8xh100", attention="ulysses", tokens="4M"),
        MemoryOptions(cluster="8xh100", attention="usp", ulysses=4, tokens="4M"),
        MemoryOptions(cluster="8xh100", attention="ring", tokens="4M"),
        MemoryOptions(cluster="8xh100", attention="wallfacer", tokens="3M"),
        MemoryOptions(cluster="16xh100", attention="upipe+ring", tokens="12M"),
        MemoryOptions(cluster="16xh100", attention="usp", tokens="8M"),
        MemoryOptions(cluster="16xh100", attention="ring", tokens="8M"),
        MemoryOptions(cluster="16xh100", attention="wallfacer", tokens="3M"),
    ],
    "models": [
        MemoryOptions(cluster="8xa100-40", tokens="2M"),
        MemoryOptions(cluster="8xa100-80", tokens="3M"),
        MemoryOptions(cluster="8xh200", tokens="7M"),
        MemoryOptions(cluster="8xh100", model="llama2-7b", tokens="5M"),
        MemoryOptions(cluster="8xh100", model="qwen3-32b", tokens="2M"),
        MemoryOptions(cluster="16xh100", model="llama3-70b", attention="upipe+ring", tokens="2M"),
        MemoryOptions(cluster="8xh100", model="gpt-3b", tokens="5M"),
        MemoryOptions(cluster="8xh100", model="gpt-7b", tokens="3M"),
    ],
}

NODE = [plan for plan in PLANS["contexts"] if plan.cluster == "8xh100" and plan.attention in ("upipe", "ring")]
"""A subset of "contexts" that takes a few minutes."""


def upipe(stage: int, prefetch: bool, mesh: DeviceMesh) -> Method:
    return UPipe(mesh["ulysses"], heads_per_stage=stage, prefetch=prefetch)


def teams(team: int, mesh: DeviceMesh) -> Method:
    return Ring(mesh["ring"]) if team == 1 else WallFacer(mesh["ring"], team=team)


def stages() -> list[Row]:
    """Peak of live q, k, v and out in a forward pass, in heads of a rank's tokens."""
    rows: list[Row] = []
    for heads, key_heads, stage in ((64, 64, 8), (64, 8, 8), (64, 8, 16), (32, 8, 8)):
        full, closed = 2 * heads + 2 * key_heads, 2 * stage + 2 * min(key_heads, stage)
        without_prefetch, with_prefetch = (
            attention_intermediates(partial(upipe, stage, prefetch), {"ulysses": 8}, heads, key_heads)
            for prefetch in (False, True)
        )
        ulysses = attention_intermediates(lambda mesh: Ulysses(mesh["ulysses"]), {"ulysses": 8}, heads, key_heads)
        rows.append(
            {
                "H": heads,
                "K": key_heads,
                "S": stage,
                "2H + 2K": full,
                "2S + 2min(K, S)": closed,
                "saved": f"{1 - closed / full:.1%}",
                "UPipe": without_prefetch,
                "saved, counted": f"{1 - without_prefetch / full:.1%}",
                "with prefetch": with_prefetch,
                "Ulysses, counted": ulysses,
            }
        )
    return rows


def wallfacer() -> list[Row]:
    """Memory of the WallFacer paper's model M before the last block's attention in backward, in units of one [T, E]."""
    model = LlamaConfig(vocab_size=32_000, dim=6656, layers=64, heads=52, kv_heads=52, hidden_dim=17_920)
    rows: list[Row] = []
    for name, team in (("Ring", 1), *((f"WallFacer, C = {n}", n) for n in (2, 4, 8))):
        memory = memory_before_attention(model, {"ring": 64}, partial(teams, team), 65_536)
        rows.append(
            {
                "method": name,
                "paper": 65 + 3 * team,
                "checkpoints": memory.checkpoints,
                "gradient": 1,
                "q, k, v": memory.qkv,
                "sum": memory.checkpoints + 1 + memory.qkv,
                "all activations": memory.activations + 1,
            }
        )
    return rows


def longest(plans: list[MemoryOptions], console: Console) -> list[Row]:
    """The longest sequence that fits, and the memory that limits it."""
    rows: list[Row] = []
    for plan in plans:
        with console.status(f"{plan.model} {plan.cluster} {plan.attention}"):
            result = plan_memory(replace(plan, max_context=True))
        assert result.fit is not None
        axes = " x ".join(f"{name} {size}" for name, size in result.job.axes.items() if size > 1)
        rows.append(
            {
                "model": plan.model,
                "cluster": result.cluster.name,
                "attention": f"{plan.attention} ({axes})",
                "tokens, M": result.job.length / 1e6,
                "device GiB": result.memory.device / 2**30,
                "of": result.room.device / 2**30,
                "host TB a node": result.memory.host * result.cluster.ranks_per_node / 1e12,
                "full": result.room.limit(result.fit.longer),
                "+1M: device GiB": result.fit.longer.device / 2**30,
                "+1M: host TB": result.fit.longer.host * result.cluster.ranks_per_node / 1e12,
                "s": round(result.memory.seconds),
            }
        )
        console.print(rows[-1])
    return rows


def planned(console: Console) -> list[Row]:
    """Simulations of the planner's choices for a million tokens, and for lengths at which host memory cannot hold an
    input of every block."""
    rows: list[Row] = []
    for cluster, tokens in (("8xh100", "1M"), ("8xh100", "8M"), ("8xh100", "12M"), ("16xh100", "16M")):
        search_result = search(
            SearchOptions(cluster=cluster, tokens=tokens, attention=() if tokens == "1M" else ("upipe+ring",))
        )
        best = search_result.fitting[0]
        with console.status(f"{cluster} {tokens}"):
            memory = simulate(best.job)
        rows.append(
            {
                "cluster": search_result.cluster.name,
                "tokens, M": search_result.length / 1e6,
                "attention": str(best.candidate),
                "keeps": stored_text(best),
                "step, s": round(best.time.seconds, 1),
                "MFU, %": round(100 * best.mfu, 1),
                "device GiB": memory.device / 2**30,
                "of": search_result.room.device / 2**30,
                "planned": best.memory.device / 2**30,
                "host GiB a rank": memory.host / 2**30,
                "of it": search_result.room.host / 2**30,
                "planned host": best.memory.host / 2**30,
                "s": round(memory.seconds),
            }
        )
        console.print(rows[-1], memory.device_breakdown, memory.host_breakdown)
    return rows


def policies() -> list[Row]:
    """Memory of checkpoint policies with UPipe and with USP; LLaMA-3-8B, 1M tokens, 8 ranks."""
    rows: list[Row] = []
    options = {
        "layer": Checkpointing("layer"),
        "layer, offloaded": Checkpointing("layer", offload=True, prefetch=False),
        "layer, offloaded, ahead": Checkpointing("layer", offload=True),
        "attention_output": Checkpointing("attention_output"),
        "attention_output, offloaded": Checkpointing("attention_output", offload=True, prefetch=False),
    }
    for attention, ulysses in (("upipe", 8), ("usp", 4)):
        for name, checkpointing in options.items():
            plan = MemoryOptions(attention=attention, ulysses=ulysses, tokens="1M", checkpointing=checkpointing)
            result = plan_memory(plan).memory
            rows.append(
                {
                    "attention": attention,
                    "policy": name,
                    "device GiB": result.device / 2**30,
                    "host GiB a rank": result.host / 2**30,
                }
            )
    return rows


def main() -> None:
    console = Console(stderr=True)
    all_parts: dict[str, tuple[str, Callable[[], list[Row]], list[str]]] = {
        "stages": (
            "Attention intermediates of UPipe",
            stages,
            ["8 ranks, forward, one row of 1,024 tokens a rank; the full out, lse, x and weights not counted"],
        ),
        "wallfacer": (
            "The WallFacer paper's peak (arXiv 2407.00611, section 4.2)",
            wallfacer,
            ["paper: L + 1 activations as checkpoints and 3 C for q, k, v; counted: L inputs and the gradient"],
        ),
        "policies": ("Checkpoint policies, LLaMA-3-8B, 1M tokens on 8 H100", policies, []),
        "planned": (
            "The planner's choices for LLaMA-3-8B, simulated",
            lambda: planned(console),
            ["step and MFU are predicted, with cuDNN's published speed; nothing has been run on a GPU"],
        ),
        "contexts": ("Longest sequences, LLaMA-3-8B", lambda: longest(PLANS["contexts"], console), []),
        "node": ("Longest sequences, LLaMA-3-8B on 8 H100", lambda: longest(NODE, console), []),
        "models": ("Longest sequences, other models and machines", lambda: longest(PLANS["models"], console), []),
    }
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(all_parts), default=[name for name in all_parts if name != "node"]
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the reports")
    options = parser.parse_args()
    for name in options.only:
        title, measure, notes = all_parts[name]
        print(write(f"memory-{name}", title, measure(), notes, options.out), flush=True)


if __name__ == "__main__":
    main()
