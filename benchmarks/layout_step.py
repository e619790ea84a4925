"""Steps of the trainer on packed documents, on 4 ranks over a slow wire: zigzag and two balanced layouts.

  python benchmarks/layout_step.py --wire 100

Each rank is in its own network namespace behind a link of --wire Mbit/s (needs root, ip and tc). The layouts alternate
on the same rows, so that other load on the machine affects all of them; ratios are medians over these pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from report import median_ratio, write

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
from namespaces import Namespaces

from armillary.core import CommLedger, SequenceLayout
from armillary.data import PackedSequences, best_fit
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig, Run, TrainConfig, prepare, process_group
from armillary.train.internal import open_stores
from armillary.train.step import train_step

RANKS, PORT = 4, 29500
LAYOUTS = ("zigzag", "balanced, send_cost=0", "balanced")


def write_documents(folder: Path, documents: int, middle: int, sigma: float) -> None:
    """Writes text files with lengths drawn from a lognormal distribution."""
    sizes = np.random.default_rng(0).lognormal(np.log(middle), sigma, documents)
    for i, size in enumerate(sizes):
        (folder / f"{i:04}.txt").write_text("some text " * max(1, round(size / 10)))


def built(config: Config, kind: str) -> Run:
    """The trainer's run, with rows in one layout."""
    run = prepare(config, torch.device("cpu"))
    length, shard = config.data.sequence_length, dist.get_rank()
    zigzag = SequenceLayout.zigzag(length, RANKS)

    def balanced(documents: tuple[tuple[int, ...], ...]) -> SequenceLayout:
        send_cost = 0 if "send_cost=0" in kind else None
        return SequenceLayout.balanced(length, RANKS, documents=documents, send_cost=send_cost)

    run.training = PackedSequences(
        open_stores(config.data),
        layout=zigzag,
        shard=shard,
        rows_per_batch=config.rows_per_batch,
        packing=best_fit,
        layout_for=None if kind == "zigzag" else balanced,
    )
    return run


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """One rank: times steps of each layout in turns. Rank 0 writes times and bytes of all ranks to a file."""
    torch.set_num_threads(1)
    config = Config(
        model=ModelConfig(dim=64, layers=2, heads=4, kv_heads=4, head_dim=64, hidden_dim=128),
        data=DataConfig(path=(folder / "text",), sequence_length=arguments.length, global_batch_size=1, documents=True),
        parallel=ParallelConfig(ring=RANKS, ulysses=1, attention="ring"),
        train=TrainConfig(device="cpu", output=folder / "out"),
    )
    with process_group(config):
        runs = {kind: built(config, kind) for kind in LAYOUTS}
        seconds: dict[str, list[float]] = {kind: [] for kind in LAYOUTS}
        sent_bytes: dict[str, list[int]] = {kind: [] for kind in LAYOUTS}
        for step in range(1 + arguments.steps):
            for turn in range(len(LAYOUTS)):
                kind = LAYOUTS[(step + turn) % len(LAYOUTS)]  # no layout is always first
                batch = next(runs[kind].training)
                dist.barrier()
                start = perf_counter()
                with CommLedger() as ledger:
                    train_step(runs[kind], step + 1, [batch])
                times = torch.tensor([perf_counter() - start])
                dist.all_reduce(times, dist.ReduceOp.MAX)
                p2p = torch.tensor(ledger.bytes(kind="p2p"))
                dist.all_reduce(p2p)
                if step:  # the first step opens connections
                    seconds[kind].append(times.item())
                    sent_bytes[kind].append(int(p2p))
        if dist.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps({"seconds": seconds, "sent": sent_bytes}))


def run_ranks(arguments: argparse.Namespace, sigma: float) -> dict[str, Any]:
    """Runs `measure` on all ranks, each in its namespace, and returns its result."""
    with tempfile.TemporaryDirectory() as name, Namespaces(RANKS) as hosts:
        folder = Path(name)
        (folder / "text").mkdir()
        write_documents(folder / "text", arguments.documents, arguments.median, sigma)
        for i in range(RANKS):
            shaper = f"tc qdisc add dev {hosts.INTERFACE} root tbf rate {arguments.wire}mbit burst 256kb limit 64mb"
            if hosts.run(i, shaper.split()).wait():
                sys.exit(f"the link cannot be slowed down: {shaper}")
        address = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": str(RANKS)}
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        program = [sys.executable, *sys.argv, "--rank-folder", name]
        ranks = [
            hosts.run(i, program, env={**os.environ, **address, **quiet, "RANK": str(i), "LOCAL_RANK": "0"})
            for i in range(RANKS)
        ]
        if any(codes := [rank.wait() for rank in ranks]):
            sys.exit(f"exit codes of the ranks: {codes}")
        return json.loads((folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", type=float, default=100, help="Mbit/s of each rank's link, in each direction")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--median", type=int, default=300, help="median bytes of a document")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.8, 1.2])
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_folder is not None:
        measure(arguments, arguments.rank_folder)
        return
    rows = list[dict[str, Any]]()
    load = os.getloadavg()[0]
    for sigma in arguments.sigmas:
        result = run_ranks(arguments, sigma)
        seconds, sent_bytes = result["seconds"], result["sent"]
        rows += [
            {
                "sigma": sigma,
                "layout": kind,
                "sent (MiB, all ranks)": median(sent_bytes[kind]) / 2**20,
                "step (s)": median(seconds[kind]),
                "of zigzag": median_ratio(seconds[kind], seconds["zigzag"]),
                "of send_cost=0": median_ratio(seconds[kind], seconds["balanced, send_cost=0"]),
            }
            for kind in LAYOUTS
        ]
    notes = [
        f"{RANKS} ranks, links of {arguments.wire:g} Mbit/s, rows of {arguments.length} tokens, lognormal documents "
        f"(median {arguments.median} bytes), 2 layers, Ring in float32; medians of {arguments.steps} steps, ratios "
        "paired by step",
        "sent: keys, values and their gradients (p2p of the ledger), in a step",
        f"load average of the machine before the run: {load:.1f}, on {os.cpu_count()} cores",
    ]
    print(write("layout-step", "A step with packed documents over a slow wire", rows, notes))


if __name__ == "__main__":
    main()
