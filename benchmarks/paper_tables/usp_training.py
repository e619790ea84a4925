"""USP's tables 5 to 7: training throughput of tensor and sequence parallelism on A800 nodes, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from armillary.models import Checkpointing, GPTConfig, LlamaConfig
from armillary.plan import Cluster
from armillary.plan.arguments import model_of
from armillary.plan.memory import AttentionChoice, Estimate, Job, estimate
from armillary.plan.memory.room import Room
from armillary.plan.memory.tensor_sizes import FLOAT32_BYTES, StepSizes
from armillary.plan.search.candidates import Mesh
from armillary.plan.time.passes import passes_of
from armillary.plan.time.step_time import (
    StepTime,
    parameter_transfers,
    step_time,
)
from paper_tables.table import Row, Table


class Published(NamedTuple):
    """A row of the paper: length in Ki tokens, global batch, degrees, TFLOPS a GPU."""

    length: int
    batch: int
    tp: int
    ulysses: int
    ring: int
    tflops: float

    def __str__(self) -> str:
        return f"tp {self.tp} x U {self.ulysses} x R {self.ring}"


TABLE_5 = (
    Published(64, 1, 4, 2, 1, 154.49),
    Published(64, 1, 4, 1, 2, 151.40),
    Published(64, 1, 8, 1, 1, 141.85),
    Published(30, 16, 2, 4, 1, 155.98),
    Published(30, 16, 2, 1, 4, 147.77),
    Published(30, 16, 4, 1, 1, 150.05),
    Published(30, 16, 1, 8, 1, 163.42),
    Published(30, 16, 1, 1, 8, 142.16),
    Published(30, 16, 8, 1, 1, 129.12),
)
TABLE_6 = (
    Published(64, 1, 1, 8, 2, 136.31),
    Published(64, 1, 1, 4, 4, 137.48),
    Published(64, 1, 1, 2, 8, 129.44),
    Published(64, 1, 1, 1, 16, 121.83),
    Published(64, 1, 8, 1, 2, 129.75),
    Published(64, 1, 4, 2, 2, 122.45),
    Published(64, 1, 2, 4, 2, 87.67),
    Published(64, 1, 2, 2, 4, 89.35),
    Published(64, 1, 4, 1, 4, 122.57),
    Published(64, 1, 2, 1, 8, 101.35),
    Published(64, 2, 8, 1, 1, 141.20),
    Published(80, 1, 1, 8, 2, 147.46),
    Published(80, 1, 1, 4, 4, 148.90),
    Published(80, 1, 1, 2, 8, 140.13),
    Published(80, 1, 1, 1, 16, 132.86),
    Published(80, 1, 8, 1, 2, 136.16),
    Published(80, 1, 4, 2, 2, 137.49),
    Published(80, 1, 2, 4, 2, 111.05),
    Published(80, 1, 2, 2, 4, 110.81),
    Published(80, 1, 4, 1, 4, 130.27),
    Published(80, 1, 2, 1, 8, 121.14),
    Published(80, 2, 8, 1, 1, 144.40),
    Published(120, 1, 4, 2, 2, 152.51),
    Published(120, 1, 2, 4, 2, 136.63),
    Published(120, 1, 8, 1, 2, 145.92),
    Published(120, 1, 4, 1, 4, 150.96),
)
TABLE_7 = (
    Published(160, 1, 4, 2, 2, 158.64),
    Published(160, 1, 8, 1, 2, 156.63),
    Published(208, 1, 8, 1, 2, 147.26),
    Published(160, 1, 4, 1, 4, 159.37),
    Published(190, 1, 4, 1, 4, 157.08),
)
ONE_CARD = ", one card a group"
TEXT = (
    "MFU, for visible pairs under the causal mask, as the paper counts it. No recomputation; ZeRO-2, which sends as "
    "much as the paper's ZeRO-1. Ours is the planner's prediction for the preset A800 (an A100 with 400 GB/s of "
    "NVLink; 200 Gb/s of network for each rank), with FlashAttention-2's published speed. On Megatron-LM's terms, "
    "all-gathers of parameters and reduce-scatters of float32 gradients are exposed, as by default in the paper's "
    "version, and passes bound by memory are added, each at the memory's bandwidth: norms, residuals, RoPE and SwiGLU "
    "(`MemoryBound`), and the float32 gradients, which are zeroed, accumulated and scaled. Outside of the model: "
    "launches, the host, and products and networks that attain less than their presets."
)


@dataclass(frozen=True)
class MemoryBound:
    """Seconds of a rank's passes over memory that the planner leaves out.

    Args:
        activations: passes of one micro-batch. A norm reads x and writes y (2 dim numbers), its backward reads x and dy
            and writes dx (3); a residual sum takes 3, and so does its gradient; RoPE reads and writes queries and keys;
            SwiGLU takes 3 inner numbers, and 5 in backward. The loss makes 12 passes over logits in float32.
        gradients: passes of one micro-batch, which reads and writes the float32 gradients.
        once: passes of a step, which zeroes the gradients, and reads and writes them for scaling.
    """

    activations: float
    gradients: float
    once: float

    @classmethod
    def of(cls, model: LlamaConfig | GPTConfig, tokens: float, parameters: float, bandwidth: float) -> MemoryBound:
        assert isinstance(model, LlamaConfig)
        rotated = (model.heads + model.kv_heads) * model.head_dim
        numbers = (2 * (2 + 3) + 2 * (3 + 3)) * model.dim + 4 * rotated + (3 + 5) * model.hidden_dim
        logits = 12 * FLOAT32_BYTES * model.vocab_size
        seconds = tokens * (2 * model.layers * numbers + logits) / bandwidth
        return cls(seconds, 2 * FLOAT32_BYTES * parameters / bandwidth, 3 * FLOAT32_BYTES * parameters / bandwidth)


@dataclass(frozen=True)
class Predicted:
    """The prediction for a row, with Megatron-LM's costs."""

    row: Published
    model: str
    cluster: Cluster

    @cached_property
    def job(self) -> Job:
        row = self.row
        names = {(True, True): "usp", (True, False): "ulysses", (False, True): "ring", (False, False): "local"}
        return Job(
            model=model_of(self.model, row.length * 1024),
            axes=self.mesh.axes,
            attention=AttentionChoice(names[row.ulysses > 1, row.ring > 1]),
            length=row.length * 1024,
            checkpointing=Checkpointing("none"),
            zero_stage=2,
        )

    @property
    def mesh(self) -> Mesh:
        row = self.row
        return Mesh(self.cluster.ranks // (row.tp * row.ulysses * row.ring), row.ring, row.ulysses, tp=row.tp)

    @cached_property
    def time(self) -> StepTime:
        """Time of a micro-batch of one sequence per data-parallel rank, with all overlap of our trainer."""
        job = self.job
        return step_time(job, passes_of(job, self.cluster), self.cluster)

    @cached_property
    def transfers(self) -> float:
        """Seconds of all-gathers and reduce-scatters of a step, if nothing hides them."""
        step = StepSizes.of(self.job)
        block, root = (
            sum(parameter_transfers(step, self.cluster, n)) for n in (step.model.block, step.model.outside_blocks)
        )
        return step.model.layers * block + root

    @property
    def micro_batches(self) -> int:
        return max(1, self.row.batch // self.mesh.shard)

    @cached_property
    def memory_bound(self) -> float:
        """Seconds of a step's passes over memory."""
        tokens = self.job.length * self.mesh.shard / self.cluster.ranks
        parameters, bandwidth = StepSizes.of(self.job).all_parameters, self.cluster.accelerator.memory_bandwidth
        passes = MemoryBound.of(self.job.model, tokens, parameters, bandwidth)
        return self.micro_batches * (passes.activations + passes.gradients) + passes.once

    @property
    def seconds(self) -> float:
        """Seconds of a step: parameters and gradients are sent once, everything else per micro-batch."""
        once_seconds = self.time.parameters + self.time.optimizer
        computed = self.micro_batches * (self.time.seconds - once_seconds) + self.memory_bound
        return computed + self.transfers + self.time.optimizer

    @property
    def paper_seconds(self) -> float:
        """Seconds of the paper's step."""
        return self.flops / (self.row.tflops * 1e12)

    @property
    def through_one_card(self) -> float:
        """Seconds of the transfers of parameters, if each group with several ranks on each of several nodes uses one
        card of a node."""
        step = StepSizes.of(self.job)
        nodes = self.cluster.nodes
        if nodes == 1 or self.row.tp in (1, self.cluster.ranks_per_node):
            return self.transfers
        size = (step.e + FLOAT32_BYTES) * step.all_parameters * (1 - 1 / step.sharing)
        return size / self.cluster.between.bandwidth

    @property
    def flops(self) -> float:
        """FLOPs of a step on one GPU."""
        tokens = self.job.length * self.mesh.shard * self.micro_batches
        return tokens * self.job.model.flops_per_token(self.job.length) / self.cluster.ranks

    @property
    def mfu(self) -> float:
        return self.throughput() / self.cluster.accelerator.flops

    @cached_property
    def memory(self) -> Estimate:
        return estimate(self.job)

    @cached_property
    def differences(self) -> dict[str, float]:
        """Additional bytes of Megatron-LM compared with our step, by cause."""
        step = StepSizes.of(self.job)
        inner = step.tensor(step.model.inner)
        gathered = 2 * (step.gathered - step.x) if step.tp > 1 else 0
        return {
            "whole float32 gradients": FLOAT32_BYTES * step.all_parameters * (1 - 1 / step.sharing),
            "fused SwiGLU, which stores 3 tensors and not 4": -step.model.layers * inner,
            "inputs gathered again in backward": -step.model.layers * gathered,
        }

    @property
    def device(self) -> float:
        """GiB of a device under Megatron-LM."""
        return (self.memory.device + sum(self.differences.values())) / 2**30

    def throughput(self, one_card: bool = False) -> float:
        """FLOPs a second of a GPU; with parameters and gradients `through_one_card` if `one_card`."""
        return self.flops / (self.seconds + (self.through_one_card - self.transfers if one_card else 0))

    def efficiency(self) -> str:
        """The computation speed, and the transfers through one card, that would explain the paper's time."""
        computed = self.micro_batches * (self.time.dense + self.time.attention + self.time.head)
        speed_fraction = computed / (computed + self.paper_seconds - self.seconds)
        text = f", as if products and attention attained {speed_fraction:.0%} of the preset's speed"
        if self.through_one_card > self.transfers:
            text += f"; parameters and gradients through one card a node: {self.through_one_card:.2f} s"
        return text

    def compared(self) -> Row:
        """A row with the paper's MFU and ours."""
        published = self.row.tflops * 1e12 / self.cluster.accelerator.flops
        reason = ""
        if abs(self.mfu / published - 1) > 0.05:
            tensor = self.micro_batches * self.time.tensor
            reason = (
                f"the paper's step takes {self.paper_seconds:.2f} s, ours {self.seconds:.2f} s: tensor parallelism "
                f"{tensor:.2f}, parameters and gradients {self.transfers:.2f}, memory passes {self.memory_bound:.2f}. "
                f"{self.paper_seconds - self.seconds:.2f} s are outside of the model{self.efficiency()}"
            )
        title = f"{self.row.length}K, batch {self.row.batch}, {self.row}"
        return Row(title, round(published, 3), round(self.mfu, 3), reason)


def predictions(rows: Sequence[Published], model: str, cluster: str) -> list[Predicted]:
    return [Predicted(row, model, Cluster.named(cluster)) for row in rows]


def best_rows(predicted: Sequence[Predicted], one_card: bool = False) -> list[Row]:
    """The best row of each length and global batch of 1, by the paper and by us; `one_card` as in `throughput`."""
    rows = list[Row]()
    for length in dict.fromkeys(each.row.length for each in predicted):
        candidates = [
            each for each in predicted if (each.row.length, each.row.batch) == (length, predicted[0].row.batch)
        ]
        candidates = candidates or [each for each in predicted if each.row.length == length]
        paper_best = max(candidates, key=lambda each: each.row.tflops)
        our_best = max(candidates, key=lambda each: each.throughput(one_card))
        behind = 1 - paper_best.throughput(one_card) / our_best.throughput(one_card)
        behind_in_paper = 1 - our_best.row.tflops / paper_best.row.tflops
        reason = (
            ""
            if our_best is paper_best
            else f"we have theirs {behind:.1%} behind; they have ours {behind_in_paper:.1%} behind"
        )
        title = f"best of {length}K, batch {candidates[0].row.batch}{ONE_CARD if one_card else ''}"
        rows.append(Row(title, str(paper_best.row), str(our_best.row), reason))
    return rows


def spearman(predicted: Sequence[Predicted], one_card: bool = False) -> float:
    """Rank correlation of the paper's throughput and ours, by default `through_one_card` if `one_card`."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    paper_ranks, our_ranks = (
        ranks([each.row.tflops for each in predicted]),
        ranks([each.throughput(one_card) for each in predicted]),
    )
    n = len(predicted)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(paper_ranks, our_ranks, strict=True)) / (n * (n * n - 1))


def table_5() -> Table:
    results = predictions(TABLE_5, "llama2-7b", "8xa800")
    stored = Predicted(Published(30, 16, 1, 8, 1, 0), "llama2-7b", Cluster.named("8xa800"))
    sixteen = estimate(replace(stored.job, rows=16)).device / 2**30
    note = (
        f"paper inconsistent: 16 sequences of 30K without accumulation would store {sixteen:.0f} GiB a GPU; ours are "
        "16 micro-batches"
    )
    return Table(
        "Table 5, LLaMA2-7B on 8 x A800", TEXT, [*(each.compared() for each in results), *best_rows(results)], [note]
    )


def table_6() -> Table:
    results = predictions(TABLE_6, "llama3-8b", "16xa800")
    by_degrees = {each.row[:5]: each for each in results}

    def lost(length: int) -> float:
        """Additional seconds of the paper's tp 2 x U 4 x R 2 over its tp 4 x U 2 x R 2."""
        slow, fast = by_degrees[length, 1, 2, 4, 2], by_degrees[length, 1, 4, 2, 2]
        return slow.paper_seconds - fast.paper_seconds

    other_rows = [each for each in results if each.row.tp != 2]
    two, four = by_degrees[64, 1, 2, 4, 2], by_degrees[64, 1, 4, 2, 2]
    assumption = (
        "an assumption of ours, the same for all rows, on which the cost of tp 2 and tp 4 depends: a group that shares "
        "parameters, with several ranks on each node but not all (tp 2 and tp 4 on two nodes), crosses between nodes "
        "through one card instead of one for each rank. All-gathers and reduce-scatters of parameters and gradients "
        f"then take {two.through_one_card:.2f} s in place of {two.transfers:.2f} at tp 2, and "
        f"{four.through_one_card:.2f} in place of {four.transfers:.2f} at tp 4, whatever the length. The "
        "paper does not say which cards NCCL used"
    )
    rows = [
        *(each.compared() for each in results),
        *best_rows(results),
        Row("rank correlation (Spearman), 26 rows", "-", round(spearman(results), 3)),
        Row(f"rank correlation (Spearman), {len(other_rows)} rows without tp 2", "-", round(spearman(other_rows), 3)),
        *best_rows(results, one_card=True),
        Row(f"rank correlation (Spearman), 26 rows{ONE_CARD}", "-", round(spearman(results, one_card=True), 3)),
    ]
    notes = [
        "paper inconsistent: its tp 2 x U 4 x R 2 takes "
        + ", ".join(f"{lost(length):.2f} s at {length}K" for length in (64, 80, 120))
        + " more than its tp 4 x U 2 x R 2. Computation, activations' and parameters' bytes of tp 2 lie between those "
        "of tp 1 and tp 4, which are both faster; a loss that shrinks with length is none of them. The seven rows of "
        "tp 2 are why all 26 rows correlate less",
        f"one card a group: {assumption}",
    ]
    return Table("Table 6, LLaMA3-8B on 2 x 8 A800", TEXT, rows, notes)


def table_7() -> Table:
    results = predictions(TABLE_7, "llama3-8b", "16xa800")
    rows = [each.compared() for each in results]
    return Table("Table 7, longest sequences of LLaMA3-8B on 2 x 8 A800", TEXT, rows)


def fits() -> Table:
    """Settings that the paper ran, and settings that it reports as not fitting."""
    seven, eight = ("llama2-7b", "8xa800"), ("llama3-8b", "16xa800")
    refused = [
        (Published(64, 1, 1, 8, 1, 0), *seven),
        (Published(120, 1, 1, 8, 2, 0), *eight),
        (Published(160, 1, 1, 8, 2, 0), *eight),
        (Published(208, 1, 1, 8, 2, 0), *eight),
    ]
    ran = [(row, *seven) for row in (*TABLE_5[:3], *TABLE_5[6:7])]
    ran += [(row, *eight) for row in (TABLE_6[1], TABLE_6[10], TABLE_6[12], TABLE_6[21], TABLE_6[22], *TABLE_7)]
    rows = list[Row]()
    for verdict, settings in (("does not fit", refused), ("fits", ran)):
        for row, model, cluster in settings:
            prediction = Predicted(row, model, Cluster.named(cluster))
            room = Room.of(prediction.cluster).device / 2**30
            our_verdict = "fits" if prediction.device <= room else "does not fit"
            reason = f"{prediction.device:.1f} of {room:.1f} GiB; our own step {prediction.memory.device / 2**30:.1f}"
            if our_verdict != verdict:
                reason += f". It would fit with {room + 5 - prediction.device:.1f} GiB reserved in place of 5"
            rows.append(Row(f"{model}, {row.length}K, batch {row.batch}, {row}", verdict, our_verdict, reason))
    text = (
        "Memory without recomputation by our formulas, on Megatron-LM's terms: with the float32 buffer of whole "
        "gradients that its ZeRO-1 keeps (4 bytes a parameter), without one of four inner tensors of the MLP (fused "
        "SwiGLU), and "
        "without the two inputs of a block that tensor parallelism gathers, which it gathers again in backward (10 in "
        "place of 8 transfers). 5 GiB of a device are reserved. Our own step is beside it."
    )
    return Table("Settings that fit and that do not (sections 5.3 and 5.4)", text, rows)
