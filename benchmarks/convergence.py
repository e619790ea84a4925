"""USP and data parallelism over 10,000 steps with two seeds, like figure 6 of USP (arXiv 2405.07719).

    nice python benchmarks/convergence.py             # 2 ranks on a CPU; half an hour on two cores
    python benchmarks/convergence.py --steps 100 --out outputs/convergence

A small LLaMA trains in a plain PyTorch loop: data parallelism gives each rank half of the rows, USP half of every row
(zigzag, so RoPE's positions and the balanced ring are in use). Both see the same rows and start from the same weights
of a seed; gradients are summed over ranks in float32. Bfloat16 has float32 master weights. The curves of USP and of
data parallelism must differ by less than those of two seeds.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from armillary.attention import build_attention
from armillary.core import SequenceLayout, build_mesh
from armillary.core.testing import World
from armillary.data import python_corpus
from armillary.data.console.units import count_argument
from armillary.models import Llama, LlamaConfig, initialize

sys.path.insert(0, str(Path(__file__).parent))
import report

RANKS, LENGTH, ROWS = 2, 64, 4
MODEL = LlamaConfig(
    vocab_size=256,
    dim=32,
    layers=1,
    heads=4,
    kv_heads=2,
    hidden_dim=64,
    head_dim=8,
    qk_norm=False,
    tied_embeddings=False,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_positions=LENGTH,
)
Key = tuple[str, str, int]
"""Parallelism, precision and seed of a run."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS = (0, 1)
SMOOTHED = 100
"""Steps whose losses are averaged before curves are compared: a step's loss depends mostly on its rows."""


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count_argument(), default=10_000)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the report and the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    curves = dict[Key, list[float]]()
    with World(RANKS) as world:
        for precision in PRECISIONS:
            for seed in SEEDS:
                for parallelism in ("DP", "USP"):
                    losses = world.run(train, parallelism, precision, seed, options.steps, timeout=7200)[0]
                    curve = [fmean(losses[i : i + SMOOTHED]) for i in range(0, len(losses), SMOOTHED)]
                    curves[parallelism, precision, seed] = curve
                    print(parallelism, precision, seed, f"{curve[-1]:.4f}", flush=True)
                    stored = {", ".join(map(str, key)): [round(x, 5) for x in values] for key, values in curves.items()}
                    (options.out / "convergence-curves.json").write_text(json.dumps(stored) + "\n")
    good = write(curves, options.steps, options.out)
    draw(curves, options.out / "convergence.png")
    sys.exit(0 if good else 1)


# -- training, on one rank ---------------------------------------------------------------------------------------------


def train(parallelism: str, precision: str, seed: int, steps: int) -> list[float]:
    """Trains on this rank; returns the loss of every step."""
    torch.set_num_threads(1)
    rank, sequence = dist.get_rank(), parallelism == "USP"
    mesh = build_mesh("cpu", shard=1 if sequence else RANKS, ring=RANKS if sequence else 1, ulysses=1)
    model = Llama(MODEL, build_attention("usp" if sequence else "local", mesh))
    initialize(model, seed)
    flat = FlatModel(model, PRECISIONS[precision])
    optimizer = torch.optim.AdamW([flat.master], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    layout = SequenceLayout.zigzag(LENGTH, RANKS) if sequence else SequenceLayout.contiguous(LENGTH, 1)
    positions = layout.positions(rank if sequence else 0)
    local_rows = ROWS // RANKS
    rows = slice(None) if sequence else slice(rank * local_rows, (rank + 1) * local_rows)
    text = b"\n".join(document.text for document in python_corpus())
    corpus, window = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.arange(LENGTH + 1)
    generator = torch.Generator().manual_seed(0)  # the same rows in all runs: seeds change only weights
    losses = list[float]()
    for _ in range(steps):
        starts = torch.randint(len(corpus) - LENGTH, (ROWS, 1), generator=generator)
        tokens = corpus[starts + window].long()[rows]
        logits = model(tokens[:, positions], positions=positions, layout=layout)
        labels = tokens[:, positions + 1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (ROWS * LENGTH)
        loss.backward()
        losses.append(flat.reduce(loss.detach()))
        optimizer.step()
        schedule.step()
        flat.update()
    return losses


class FlatModel:
    """A model's weights and gradients as views into one tensor each, so that a step has one all-reduce and one update.

    `master` has the weights in float32, with the gradients that `reduce` sums over ranks.
    """

    def __init__(self, model: Llama, dtype: torch.dtype) -> None:
        parameters = list(model.parameters())
        self.master = torch.cat([p.detach().flatten() for p in parameters]).float().requires_grad_()
        self.weights = self.master.detach() if dtype == torch.float32 else self.master.detach().to(dtype)
        self.gradients = torch.zeros_like(self.weights)
        self.reduced = torch.zeros(len(self.master) + 1)  # one more element for the loss
        self.master.grad = self.reduced[:-1]
        sizes = [p.numel() for p in parameters]
        for p, weight, gradient in zip(parameters, self.weights.split(sizes), self.gradients.split(sizes), strict=True):
            shape = p.shape
            p.data = weight.view(shape)
            p.grad = gradient.view(shape)

    def reduce(self, loss: Tensor) -> float:
        """Sums gradients and loss over ranks; returns the loss."""
        self.reduced[:-1] = self.gradients
        self.reduced[-1] = loss
        dist.all_reduce(self.reduced)
        self.gradients.zero_()
        return self.reduced[-1].item()

    def update(self) -> None:
        """Rounds the master weights to the dtype of the model."""
        if self.weights.dtype != torch.float32:
            self.weights.copy_(self.master.detach())


# -- report ------------------------------------------------------------------------------------------------------------


def write(curves: dict[Key, list[float]], steps: int, out: Path) -> bool:
    """Writes the report. Returns True if USP is closer to data parallelism than a seed is to the other."""

    def mean_difference(a: Key, b: Key) -> float:
        return fmean(abs(x - y) for x, y in zip(curves[a], curves[b], strict=True))

    rows, good = list[dict[str, Any]](), True
    for precision in PRECISIONS:
        meshes = max(mean_difference(("USP", precision, seed), ("DP", precision, seed)) for seed in SEEDS)
        seeds = min(mean_difference((p, precision, SEEDS[0]), (p, precision, SEEDS[1])) for p in ("DP", "USP"))
        last = {f"{p}, seed {seed}": curves[p, precision, seed][-1] for seed in SEEDS for p in ("DP", "USP")}
        rows.append(
            {
                "precision": precision,
                **{name: f"{value:.4f}" for name, value in last.items()},
                "USP and DP apart": f"{meshes:.5f}",
                "seeds apart": f"{seeds:.5f}",
            }
        )
        good &= meshes < seeds
    notes = [
        f"loss in nats a byte: the mean of the last {SMOOTHED} of {steps:,} steps",
        f"apart: mean absolute difference of two curves of {SMOOTHED}-step means; of USP and DP the larger of both "
        "seeds, of seeds the smaller of both parallelisms",
        f"LLaMA of dim {MODEL.dim}, {MODEL.layers} layer, {ROWS} rows of {LENGTH} bytes of Python's own text a step, "
        f"{RANKS} ranks: data parallelism has {ROWS // RANKS} rows a rank, USP half of each row (zigzag ring)",
        "seeds differ in the first weights; all runs see the same rows",
    ]
    print(report.write("convergence", "Loss of USP and of data parallelism", rows, notes, out))
    return good


def draw(curves: dict[Key, list[float]], path: Path) -> None:
    """One panel for each precision; USP dashed over data parallelism."""
    figure = Figure((9, 4), layout="constrained")
    panels = figure.subplots(1, len(PRECISIONS), sharey=True)
    for axes, precision in zip(panels, PRECISIONS, strict=True):
        for (parallelism, kind, seed), curve in curves.items():
            if kind == precision:
                width, style = (3.5, "-") if parallelism == "DP" else (1.2, "--")
                color = f"C{seed}" if parallelism == "DP" else "black"
                steps = [SMOOTHED * (i + 1) for i in range(len(curve))]
                axes.plot(steps, curve, style, color=color, linewidth=width, label=f"{parallelism}, seed {seed}")
        axes.set_title(precision)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    panels[0].set_ylabel(f"loss (nats a byte), mean of {SMOOTHED} steps")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
