"""Equal training on every mesh: loss curves compared with one rank's, and recall of values on other ranks.

    uv run python benchmarks/equality.py                          # all parts, 200 to 500 steps; about half an hour
    uv run python benchmarks/equality.py --only curves --steps 20
    uv run python benchmarks/equality.py --only recall --meshes ring upipe --out outputs/recall

`curves` trains on Python's own text on seven meshes of 4 ranks, in float32 and float64. All curves must lie within 1e-3
and 1e-8 of one rank's. `hybrid` does so for a model of Gated DeltaNet, Mamba-2 and attention. `recall` trains on
questions whose answers other ranks hold: every method must learn them, and attention that ends with its own shard must
not. `hybrid-recall` trains a model of Gated DeltaNet, Mamba-2 and attention on them.
"""

from __future__ import annotations

import io
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from armillary.attention import AttentionMask, Local
from armillary.core import SequenceLayout
from armillary.core.testing import World
from armillary.data.console.units import count_argument
from armillary.models.block import Block
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Run,
    Summary,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)

sys.path.insert(0, str(Path(__file__).parent))
import recall as recall_rows
import report

SMALL = Config(
    model=ModelConfig(dim=64, layers=2, heads=8, kv_heads=4, hidden_dim=96),
    data=DataConfig(sequence_length=250, global_batch_size=4),
    validation=ValidationConfig(every=10**6, batches=2),
    log=LogConfig(every=10**6, plot=False),
    train=TrainConfig(device="cpu"),
)
LIMITS = {"float32": 1e-3, "float64": 1e-8}
"""Largest allowed difference of a step's loss to one rank's."""


@dataclass(frozen=True)
class Mesh:
    """A mesh of 4 ranks, or of one, and its attention method."""

    name: str
    attention: str = "usp"
    axes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def ranks(self) -> int:
        return 4 if self.axes else 1

    def config(self, config: Config, **train_options: Any) -> Config:
        parallel = ParallelConfig(**{"ring": 1, "ulysses": 1} | self.axes, attention=self.attention)
        return replace(config, parallel=parallel, train=replace(config.train, **train_options))


ONE = Mesh("one rank")
MESHES = [
    ONE,
    Mesh("Ring", "ring", {"ring": 4}),
    Mesh("USP, zigzag", "usp", {"ring": 2, "ulysses": 2}),
    Mesh("WallFacer", "wallfacer", {"ring": 4}),
    Mesh("TokenRing", "token_ring", {"ring": 4}),
    Mesh("UPipe", "upipe", {"ulysses": 4}),
    Mesh("tp 2 x Ring 2", "ring", {"tp": 2, "ring": 2}),
    Mesh("FSDP, shard 4", "local", {"shard": 4}),
]
HYBRID_MESHES = [
    mesh for mesh in MESHES if mesh.name in (ONE.name, "Ring", "USP, zigzag", "UPipe", "tp 2 x Ring 2", "FSDP, shard 4")
]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--steps", type=count_argument(), default=None, help="number of steps in place of each part's default"
    )
    parser.add_argument("--meshes", nargs="+", help="names of meshes in the tables (default: all)")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the reports and pictures")
    options = parser.parse_args()
    good = [PARTS[name](options) for name in options.only]
    sys.exit(0 if all(good) else 1)


def selected_meshes(meshes: Sequence[Mesh], options: Namespace) -> list[Mesh]:
    """The selected meshes, with those that are always measured: one rank, and ranks that see only their own shard."""
    return [mesh for mesh in meshes if options.meshes is None or mesh.name in options.meshes or mesh in (ONE, BROKEN)]


def train_on_rank(config: Config) -> Summary:
    """Trains on one rank of a world."""
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        return train_loop(prepare(config, device))


def run_on(world: World, config: Config) -> Summary:
    with TemporaryDirectory() as folder:
        config = replace(config, train=replace(config.train, output=Path(folder)))
        return world.run(train_on_rank, config, timeout=3600)[0]


# -- curves -----------------------------------------------------------------------------------------------------------


def curves(options: Namespace) -> bool:
    model = "LLaMA of dim 64, 2 layers, 8 and 4 heads"
    return compare_curves(options, "equality", SMALL, MESHES, f"{model}, {options.steps or 200} steps of AdamW")


def hybrid(options: Namespace) -> bool:
    mixers = ("delta_rule", "mamba2", "attention")
    config = replace(SMALL, model=replace(SMALL.model, layers=3, mixers=mixers))
    model = "LLaMA of dim 64, a layer each of Gated DeltaNet, Mamba-2 and attention, 8 and 4 heads"
    return compare_curves(
        options, "equality-hybrid", config, HYBRID_MESHES, f"{model}, {options.steps or 200} steps of AdamW"
    )


def compare_curves(options: Namespace, name: str, base: Config, all_meshes: Sequence[Mesh], note: str) -> bool:
    """Trains on every mesh and writes report and picture. Returns False if a curve exceeds its limit."""
    losses: dict[str, dict[str, list[float]]] = {}
    meshes, steps = selected_meshes(all_meshes, options), options.steps or 200
    for ranks in (1, 4):
        with World(ranks) as world:
            for mesh in (mesh for mesh in meshes if mesh.ranks == ranks):
                for precision in LIMITS:
                    config = mesh.config(base, steps=steps, precision=precision)
                    losses.setdefault(precision, {})[mesh.name] = run_on(world, config).losses
                    print(f"{mesh.name}, {precision}: {losses[precision][mesh.name][-1]:.6f}", flush=True)
    furthest = {
        precision: {name: max(loss_differences(result, name)) for name in result}
        for precision, result in losses.items()
    }
    rows = [
        {
            "mesh": mesh.name,
            "last loss, float32": f"{losses['float32'][mesh.name][-1]:.6f}",
            **{f"furthest, {p}": f"{furthest[p][mesh.name]:.1e}" if mesh.axes else None for p in LIMITS},
        }
        for mesh in meshes
    ]
    notes = [
        f"{note}, {base.data.global_batch_size} rows of {base.data.sequence_length} bytes of Python's own text a step",
        "furthest: the largest difference of any step's loss from one rank's, in nats",
        *[f"limit in {precision}: {limit:g}" for precision, limit in LIMITS.items()],
    ]
    title = "Loss curves on 4 ranks and on one"
    print(report.write(name, f"{title}: a hybrid" if base is not SMALL else title, rows, notes, options.out))
    draw(losses, options.out / f"{name}.png")
    return all(value <= LIMITS[precision] for precision, result in furthest.items() for value in result.values())


def loss_differences(losses: dict[str, list[float]], name: str) -> list[float]:
    """Absolute differences of each step's loss to one rank's."""
    return [abs(a - b) for a, b in zip(losses[name], losses[ONE.name], strict=True)]


def draw(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draws curves as figure 6 of USP (arXiv 2405.07719), and below their largest differences so far to one rank's."""
    figure = Figure((9, 7.5), layout="constrained")
    loss_axes, difference_axes = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for i, (name, result) in enumerate(losses["float32"].items()):
        steps = range(1, len(result) + 1)
        # Each curve is thinner than those below it, which stay visible.
        loss_axes.plot(steps, result, color=f"C{i}", linewidth=11 - 1.4 * i, label=name)
        for precision, style in {"float32": "-", "float64": ":"}.items() if i else ():
            furthest = [x or math.nan for x in accumulate(loss_differences(losses[precision], name), max)]
            difference_axes.plot(steps, furthest, style, color=f"C{i}", linewidth=1.5)
    for precision, limit in LIMITS.items():
        difference_axes.axhline(limit, color="0.4", linewidth=0.8, linestyle="--")
        difference_axes.annotate(
            f"limit, {precision}", (1, limit), xytext=(0, 2), textcoords="offset points", fontsize=8
        )
    loss_axes.set_ylabel("loss (nats a token), float32")
    loss_axes.legend(frameon=False)
    difference_axes.set_yscale("log")
    difference_axes.set_ylabel("furthest from one rank's so far\n(solid float32, dotted float64)")
    difference_axes.set_xlabel("step")
    for axes in (loss_axes, difference_axes):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


# -- recall -----------------------------------------------------------------------------------------------------------

RECALL = replace(
    SMALL,
    # Few, high RoPE frequencies, so that a head soon learns to attend to the previous token.
    model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=4, hidden_dim=256, rope_theta=10.0),
    data=DataConfig(sequence_length=16, global_batch_size=64),
    optimizer=OptimizerConfig(lr=2e-3, min_lr=0.0, schedule="linear", warmup_steps=20, weight_decay=0.3),
    validation=ValidationConfig(every=10**6, batches=8),
)
PAIRS, HYBRID_PAIRS, SYMBOLS = 4, 2, 8
"""Pairs of a row of recall, of the hybrid's rows, and symbols of each kind."""
HYBRID_RECALL = replace(
    RECALL,
    model=ModelConfig(
        dim=64,
        layers=3,
        heads=4,
        kv_heads=4,
        hidden_dim=128,
        rope_theta=10.0,
        mixers=("delta_rule", "mamba2", "attention"),
    ),
    optimizer=OptimizerConfig(lr=5e-3, min_lr=0.0, schedule="linear", warmup_steps=20),
)
METHODS = [
    *(Mesh(name, name, {"ring": 4}) for name in ("ring", "token_ring", "wallfacer", "all_gather")),
    *(Mesh(name, name, {"ulysses": 4}) for name in ("ulysses", "upipe")),
    Mesh("usp", "usp", {"ring": 2, "ulysses": 2}),
    Mesh("tp 2 x ring 2", "ring", {"tp": 2, "ring": 2}),
]
BROKEN = Mesh("own shard alone", "ring", {"ring": 4})


class OwnShard:
    """Causal attention among local tokens, without the keys of other ranks."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        return Local()(q, k, v, mask=AttentionMask())


def end_with_shard(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, Block):
            module.attention = OwnShard()


def learn_recall(config: Config, pairs: int, broken: bool) -> tuple[float, float]:
    """Trains on one rank of a world. Returns (share of right answers, last loss)."""
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        run = recall_rows.prepare_recall(config, pairs, SYMBOLS, device)
        if broken:
            end_with_shard(run)
        losses = train_loop(run).losses
        return recall_rows.right_answers(run), losses[-1]


def recall(options: Namespace) -> bool:
    return compare_recall(options, "equality-recall", "Recall across ranks", RECALL, PAIRS, [*METHODS, BROKEN], 500)


def hybrid_recall(options: Namespace) -> bool:
    meshes = [mesh for mesh in METHODS if mesh.name in ("ring", "ulysses", "usp", "tp 2 x ring 2")]
    title = "Recall of a hybrid across ranks"
    return compare_recall(options, "equality-hybrid-recall", title, HYBRID_RECALL, HYBRID_PAIRS, meshes, 300)


def compare_recall(
    options: Namespace, name: str, title: str, base: Config, pairs: int, meshes: Sequence[Mesh], default_steps: int
) -> bool:
    """Trains on every mesh and writes the report. Returns False if a mesh does not learn or the broken one does."""
    rows: list[dict[str, Any]] = []
    steps = options.steps or default_steps
    with World(4) as world:
        for mesh in selected_meshes(meshes, options):
            with TemporaryDirectory() as folder:
                config = mesh.config(base, steps=steps, output=Path(folder, "outputs"))
                config = recall_rows.recall_config(config, SYMBOLS, Path(folder, "store"))
                answers, loss = world.run(learn_recall, config, pairs, mesh is BROKEN, timeout=3600)[0]
            rows.append({"attention": mesh.name, "right answers": answers, "last loss": loss})
            print(rows[-1], flush=True)
    data = base.data
    chance = 1 / SYMBOLS
    notes = [
        f"rows of {data.sequence_length} tokens on 4 ranks with {pairs} (key, value) pairs, each asked for on a "
        f"rank that holds none of it; {SYMBOLS} values, so chance is {chance:.3f}; held-out rows",
        f"{steps} steps of {data.global_batch_size} rows",
    ]
    if BROKEN in meshes:
        notes[-1] += f"; {BROKEN.name}: Ring whose ranks see their own keys alone"
    print(report.write(name, title, rows, notes, options.out))
    shares = {row["attention"]: row["right answers"] for row in rows}
    broken = shares.pop(BROKEN.name, 0.0)
    return min(shares.values()) > 0.95 and broken < 2 * chance


PARTS = {"curves": curves, "hybrid": hybrid, "recall": recall, "hybrid-recall": hybrid_recall}

if __name__ == "__main__":
    main()
