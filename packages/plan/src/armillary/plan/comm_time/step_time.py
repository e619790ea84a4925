"""How long a training step takes, part by part, from what is computed and what is sent."""

from __future__ import annotations

from dataclasses import dataclass, fields

from armillary.attention.comm_plan import CommPlan
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.comm_plan_time import BACKWARD, FORWARD, Span, around, spent
from armillary.plan.memory import Job
from armillary.plan.memory.estimate.moments import Moments
from armillary.plan.memory.estimate.step import MASTER, StepSizes

ADAM = 7 * MASTER
"""Bytes that AdamW reads and writes for each parameter: itself, its gradient, both moments."""
HOST_BANDWIDTH = 200e9
"""Bytes a second of a machine's memory, for an optimizer on the host."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step on every rank, by what they are spent on.

    Args:
        dense: matrix products of blocks, forward and backward.
        attention: its kernels, forward and backward.
        recomputed: what backward computes again, attention too.
        head: the loss.
        exchange: waiting for what attention sends, and computing more slowly beside it.
        steps: launches and merges of attention's steps.
        parameters: waiting for parameters and gradients on their way between ranks.
        offload: waiting for what is kept on the host.
        optimizer: the update.
    """

    dense: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    head: float = 0.0
    exchange: float = 0.0
    steps: float = 0.0
    parameters: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Passes:
    """Attention of one block: forward and backward."""

    forward: Span
    backward: Span

    @classmethod
    def of(cls, plan: CommPlan, cluster: Cluster, head_dim: int, copies: int) -> Passes:
        """Of `copies` groups of ranks side by side."""
        device = cluster.accelerator
        forward = FORWARD * head_dim / (device.flops * device.attention)
        backward = BACKWARD * head_dim / (device.flops * device.attention_backward)
        return cls(spent(plan.forward, cluster, forward, copies), spent(plan.backward, cluster, backward, copies))


def step_time(job: Job, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a job's training step, whose attention takes `passes` in each block.

    What a block waits for is hidden behind its own computation, as far as that is not hiding attention's exchanges
    already: parameters are gathered a block ahead, gradients and checkpoints leave meanwhile.

    Raises:
        ValueError: as `estimate`.
    """
    step, device = StepSizes.of(job), cluster.accelerator
    products = device.flops * device.matmul
    tokens, layers = step.rows * step.tokens, step.model.layers
    dense = 2 * step.model.block * tokens / products
    again, attended_again = recomputed(step, dense, passes.forward)
    forward, backward = passes.forward, passes.backward + attended_again
    hiding = (dense + hides(forward), 2 * dense + again + hides(backward))
    return StepTime(
        dense=3 * dense * layers,
        attention=(forward.compute + passes.backward.compute) * layers,
        recomputed=(again + attended_again.compute) * layers,
        head=6 * step.model.vocabulary * step.model.dim * tokens / products,
        exchange=(forward.exposed + backward.exposed) * layers,
        steps=(forward.overhead + backward.overhead) * layers,
        parameters=exposed(waits(step, cluster), hiding) * layers + ends(step, cluster),
        offload=exposed(copies(step, cluster), hiding) * layers,
        optimizer=update(step, cluster),
    )


def hides(attention: Span) -> float:
    """Seconds of attention's computation beside which nothing is sent yet."""
    return max(0.0, attention.compute + attention.exposed - attention.exchange)


def exposed(waiting: tuple[float, float], hiding: tuple[float, float]) -> float:
    """What of waiting in forward and in backward is not hidden."""
    return sum(max(0.0, wait - free) for wait, free in zip(waiting, hiding, strict=True))


def recomputed(step: StepSizes, dense: float, forward: Span) -> tuple[float, Span]:
    """What backward computes again of a block: (matrix products, attention).

    What projects in stages does that again in any case. Keeping x alone, all is computed again; keeping attention's
    results, all but attention; and in pieces, what follows it.
    """
    model = step.model
    rest = model.rest / model.block
    projecting = (1 - rest) * dense if step.projects_in_stages else 0.0
    match step.checkpointing.policy:
        case "layer":
            return dense, forward
        case "attention_output":
            return dense, Span()
        case _:
            return projecting + (rest * dense if step.checkpointing.tiled else 0.0), Span()


def waits(step: StepSizes, cluster: Cluster) -> tuple[float, float]:
    """What a block's parameters take on their way in forward, and with their gradients in backward."""
    if step.sharing == 1:
        return 0.0, 0.0
    gather, reduce = (around(cluster, step.model.block * size) for size in (step.e, MASTER))
    return gather, gather + reduce


def ends(step: StepSizes, cluster: Cluster) -> float:
    """Gathering the embedding and the head, and reducing their gradients: nothing hides that."""
    if step.sharing == 1:
        return 0.0
    alone = step.model.table + step.model.head + step.model.root
    return around(cluster, alone * step.e) + around(cluster, alone * MASTER)


def copies(step: StepSizes, cluster: Cluster) -> tuple[float, float]:
    """What copying checkpoints of a block to the host takes in forward, and back in backward."""
    if not step.checkpointing.offload:
        return 0.0, 0.0
    there = sum(Moments(step).kept_by_block().values()) / cluster.accelerator.host_bandwidth
    return there, there


def update(step: StepSizes, cluster: Cluster) -> float:
    """AdamW on a rank's share of the parameters; on the host, with its gradients going there and the result back."""
    owned = step.model.all / step.sharing
    if not step.on_host:
        return ADAM * owned / cluster.accelerator.memory_bandwidth
    moved = 2 * MASTER * owned / cluster.accelerator.host_bandwidth
    return moved + ADAM * owned * cluster.ranks_per_node / HOST_BANDWIDTH
