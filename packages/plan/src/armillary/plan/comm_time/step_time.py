"""How long a training step takes, part by part, from what is computed and what is sent."""

from __future__ import annotations

from dataclasses import dataclass, fields

from armillary.attention.planning.comm_plan import CommPlan
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
    """Attention of one block: forward and backward.

    Args:
        overlap: whether anything is sent while forward computes.
    """

    forward: Span
    backward: Span
    overlap: bool = True

    @classmethod
    def of(
        cls,
        plan: CommPlan,
        cluster: Cluster,
        head_dim: int,
        copies: int,
        tokens: int,
        kernel: str | None = None,
        margin: int = 0,
    ) -> Passes:
        """Attention of `copies` groups of ranks side by side.

        A kernel that is persistent and leaves no margin hides nothing in forward: NCCL's kernels start when it ends.

        Args:
            tokens, kernel, margin: as of `Accelerator.attention_shares`.
        """
        device = cluster.accelerator
        overlap = margin > 0 or not device.is_persistent(kernel)
        forward_share, backward_share = device.attention_shares(tokens, kernel, margin)
        forward = FORWARD * head_dim / (device.flops * forward_share)
        backward = BACKWARD * head_dim / (device.flops * backward_share)
        return cls(
            spent(plan.forward, cluster, forward, copies, overlap),
            spent(plan.backward, cluster, backward, copies),
            overlap,
        )


def step_time(job: Job, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a job's training step, whose attention takes `passes` in each block.

    What a block waits for is hidden behind its own computation, as far as that is not hiding attention's exchanges
    already: parameters are gathered a block ahead, gradients and checkpoints leave meanwhile. Checkpoints that are not
    brought back a block ahead are waited for, and so are those that a segment is run again from, and what it keeps.

    Raises:
        ValueError: as `estimate`.
    """
    step, device = StepSizes.of(job), cluster.accelerator
    products = device.flops * device.matmul
    tokens, layers = step.rows * step.tokens, step.model.layers
    dense = 2 * step.model.block * tokens / products
    again, attended_again = recomputed(step, dense, passes.forward)
    attended = (passes.forward + passes.backward).times(layers)
    lasts = {segment[-1] for segment in step.segments}
    hiding = [hidden_by(step, i in lasts, i, dense, passes) for i in range(layers)]
    waiting = waits(step, cluster)
    gathered_again, copied_again = running_again(step, cluster)
    return StepTime(
        dense=3 * dense * layers,
        attention=attended.compute,
        recomputed=again + attended_again.compute,
        head=6 * step.model.vocabulary * step.model.dim * tokens / products,
        exchange=attended.exposed + attended_again.exposed,
        steps=attended.overhead + attended_again.overhead,
        parameters=sum(exposed(waiting, each) for each in hiding) + gathered_again + ends(step, cluster),
        offload=sum(offloaded(step, i, cluster, each) for i, each in enumerate(hiding)) + copied_again,
        optimizer=update(step, cluster),
    )


def hides(attention: Span) -> float:
    """Seconds of attention's computation beside which nothing is sent yet."""
    return max(0.0, attention.compute + attention.exposed - attention.exchange)


def exposed(waiting: tuple[float, float], hiding: tuple[float, float]) -> float:
    """What of waiting in forward and in backward is not hidden."""
    return sum(max(0.0, wait - free) for wait, free in zip(waiting, hiding, strict=True))


def recomputed(step: StepSizes, dense: float, forward: Span) -> tuple[float, Span]:
    """What backward computes again in all blocks: (matrix products, attention).

    What projects in stages does that again in any case. Keeping x alone, all is computed again; keeping attention's
    results, all but attention; and in pieces, what follows it. For a block that keeps no x, what follows attention in
    the one below is computed once more.
    """
    layers, rest = step.model.layers, step.model.rest / step.model.block * dense
    if step.checkpointing.policy == "none":
        projecting = dense - rest if step.projects_in_stages else 0.0
        return layers * (projecting + (rest if step.checkpointing.tiled else 0.0)), Span()
    without_x, unattended = sum(not keep.x for keep in step.keeps), sum(not keep.attended for keep in step.keeps)
    return layers * dense + without_x * rest, forward.times(unattended)


def hidden_by(step: StepSizes, last: bool, i: int, dense: float, passes: Passes) -> tuple[float, float]:
    """What block i computes in forward and in backward, beside which it may be waiting for something.

    Args:
        last: of its segment; attention of the others is computed again when that is run again.
    """
    backward, parts = passes.backward, step.checkpointing.policy != "none"
    if parts and last and passes.overlap and not step.keeps[i].attended:
        backward += passes.forward
    again = dense if parts else recomputed(step, dense, passes.forward)[0] / step.model.layers
    return dense + (hides(passes.forward) if passes.overlap else 0.0), 2 * dense + again + hides(backward)


def running_again(step: StepSizes, cluster: Cluster) -> tuple[float, float]:
    """Waiting when segments are run again: (for parameters, for copies), which nothing hides.

    Parameters are those of each block but the last two, which are gathered in any case then. Copies are of what each
    block but the last has on the host, and what it keeps there from then on.
    """
    moments, gathers, moved = Moments(step), 0, 0.0
    for segment in step.segments:
        gathers += len(segment[:-2])
        moved += sum((moments.kept(segment[:-1], host=True) + moments.made_again(segment[:-1], host=True)).values())
    return gathers * waits(step, cluster)[0], moved / cluster.accelerator.host_bandwidth


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


def offloaded(step: StepSizes, i: int, cluster: Cluster, hiding: tuple[float, float]) -> float:
    """Waiting for checkpoints of block i, on their way to the host in forward and back in backward.

    Back, nothing hides them unless they are brought while the block above is differentiated.
    """
    moments, bandwidth = Moments(step), cluster.accelerator.host_bandwidth
    there = sum(moments.kept([i], host=True).values())
    back = there + sum(moments.made_again([i], host=True).values())
    ahead = step.checkpointing.prefetch and i < step.model.layers - 1
    return exposed((there / bandwidth, back / bandwidth), (hiding[0], hiding[1] if ahead else 0.0))


def update(step: StepSizes, cluster: Cluster) -> float:
    """AdamW on a rank's share of the parameters; on the host, with its gradients going there and the result back."""
    owned = step.model.all / step.sharing
    if not step.on_host:
        return ADAM * owned / cluster.accelerator.memory_bandwidth
    moved = 2 * MASTER * owned / cluster.accelerator.host_bandwidth
    return moved + ADAM * owned * cluster.ranks_per_node / HOST_BANDWIDTH
