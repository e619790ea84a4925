"""Seconds of a training step, part by part, from its computation and its communication."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from armillary.attention.planning.comm_plan import CommPlan
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.comm_plan_time import BACKWARD, FORWARD, Span, all_gather_seconds, plan_seconds
from armillary.plan.memory import Job
from armillary.plan.memory.estimate.peaks import Peaks
from armillary.plan.memory.estimate.step import MASTER, StepSizes

ADAM = 7 * MASTER
"""Bytes that AdamW reads and writes per parameter: the parameter, its gradient and both moments."""
HOST_BANDWIDTH = 200e9
"""Memory bandwidth of a machine in bytes a second, for an optimizer on the host."""

Seconds = tuple[float, float]
"""(in forward, in backward) of one block."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by cause.

    Args:
        dense: matrix products of blocks, forward and backward.
        attention: attention kernels, and recurrences of a hybrid, forward and backward.
        recomputed: recomputation in backward, attention included.
        head: the loss.
        exchange: waiting for attention's communication, and the slowdown of kernels beside it.
        steps: launches and merges of attention's steps.
        tensor: all-gathers and reduce-scatters of tensor parallelism.
        parameters: waiting for all-gathers of parameters and reduce-scatters of gradients.
        offload: waiting for copies to and from the host.
        optimizer: the update.
    """

    dense: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    head: float = 0.0
    exchange: float = 0.0
    steps: float = 0.0
    tensor: float = 0.0
    parameters: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return asdict(self)


@dataclass(frozen=True)
class Passes:
    """Time of one block's attention, forward and backward.

    Args:
        overlap: False if nothing is sent while forward computes.
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
        stride: int = 1,
    ) -> Passes:
        """Times the plan, run by `copies` groups of ranks side by side.

        Forward of a persistent kernel without a margin hides no communication: NCCL's kernels start when it ends.

        Args:
            tokens, kernel, margin: as in `Accelerator.attention_shares`.
            stride: as in `plan_seconds`.
        """
        device = cluster.accelerator
        overlap = margin > 0 or not device.is_persistent(kernel)
        forward_share, backward_share = device.attention_shares(tokens, kernel, margin)
        forward = FORWARD * head_dim / (device.flops * forward_share)
        backward = BACKWARD * head_dim / (device.flops * backward_share)
        return cls(
            plan_seconds(plan.forward, cluster, forward, copies, overlap, stride),
            plan_seconds(plan.backward, cluster, backward, copies, stride=stride),
            overlap,
        )


def step_time(job: Job, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a job's training step, whose attention takes `passes` in each block.

    Parameters are gathered a block ahead, gradients and checkpoints leave meanwhile: a block's computation hides these
    transfers, except for the part of it that already hides attention's exchanges. Exposed are checkpoints without
    prefetch, and what a recomputed segment gathers and copies.

    Raises:
        ValueError: as `estimate`.
    """
    return sizes_time(StepSizes.of(job), passes, cluster)


def sizes_time(step: StepSizes, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a step with these sizes; see `step_time`."""
    device = cluster.accelerator
    products = device.flops * device.matmul
    tokens, layers = step.rows * step.tokens, step.model.layers
    # Two FLOPs per parameter and token in forward, and twice as many in backward.
    dense = 2 * step.model.block * tokens / products
    recomputed, recomputed_attention = recomputed_blocks(step, dense, passes.forward)
    attention = (passes.forward + passes.backward).times(layers)
    segment_ends = {segment[-1] for segment in step.segments}
    computing = [block_computation(step, i, i in segment_ends, dense, passes) for i in range(layers)]
    gather = parameter_transfers(step, cluster)
    segment_gathers, segment_copies = recomputed_segments(step, cluster)
    return StepTime(
        dense=3 * dense * layers,
        attention=attention.compute,
        recomputed=recomputed + recomputed_attention.compute,
        head=6 * step.model.vocabulary * step.model.dim * tokens / products,
        exchange=attention.exposed + recomputed_attention.exposed,
        steps=attention.overhead + recomputed_attention.overhead,
        tensor=tensor_transfers(step, cluster),
        parameters=sum(exposed(gather, each) for each in computing) + segment_gathers + root_transfers(step, cluster),
        offload=sum(block_offload(step, i, cluster, each) for i, each in enumerate(computing)) + segment_copies,
        optimizer=optimizer_update(step, cluster),
    )


def exposed(transfers: Seconds, computing: Seconds) -> float:
    """Seconds of transfers that the concurrent computation does not hide."""
    return sum(max(0.0, transfer - compute) for transfer, compute in zip(transfers, computing, strict=True))


def recomputed_blocks(step: StepSizes, dense: float, forward: Span) -> tuple[float, Span]:
    """Recomputation in backward, over all blocks: (seconds of matrix products, attention).

    - Policy "none" recomputes the projections of staged methods, and chunked MLPs.
    - With a block's input, all its products are recomputed; with attention's output, all but attention.
    - Without its input, the part after attention of the block below is recomputed once more.
    """
    layers, after_attention = step.model.layers, step.model.after_attention / step.model.block * dense
    if step.checkpointing.policy == "none":
        projections = dense - after_attention if step.projects_in_stages else 0.0
        return layers * (projections + (after_attention if step.checkpointing.tiled else 0.0)), Span()
    # `keeps` has the checkpoints of each block; see `armillary.models.activation_checkpoint`.
    without_input = sum(not keep.x for keep in step.keeps)
    without_attention = sum(not keep.attention_output for keep in step.keeps)
    return layers * dense + without_input * after_attention, forward.times(without_attention)


def block_computation(step: StepSizes, i: int, ends_segment: bool, dense: float, passes: Passes) -> Seconds:
    """Computation of block i that can hide transfers.

    Args:
        ends_segment: the block is the last of its segment. Other blocks recompute their attention when the segment is
            recomputed, not in their own backward.
    """
    backward, by_parts = passes.backward, step.checkpointing.policy != "none"
    if by_parts and passes.overlap and ends_segment and not step.keeps[i].attention_output:
        backward += passes.forward
    recomputed = dense if by_parts else recomputed_blocks(step, dense, passes.forward)[0] / step.model.layers

    def idle_links(span: Span) -> float:
        # Attention's own exchanges use the links first; the rest of its time is free for other transfers.
        return max(0.0, span.compute + span.exposed - span.exchange)

    hidden_by_forward = idle_links(passes.forward) if passes.overlap else 0.0
    return dense + hidden_by_forward, 2 * dense + recomputed + idle_links(backward)


def recomputed_segments(step: StepSizes, cluster: Cluster) -> Seconds:
    """Exposed transfers of recomputed segments: (all-gathers of parameters, copies from and to the host).

    The last two blocks' parameters are gathered at that time in any case. Copied are the other blocks' checkpoints,
    from the host, and the tensors that recomputation stores there for them.
    """
    peaks, gathers, copied = Peaks(step), 0, 0.0
    if len(step.segments) == len(step.keeps):
        return 0.0, 0.0  # every block stores its input
    for segment in step.segments:
        gathers += len(segment[:-2])
        copied += sum(
            (peaks.stored(segment[:-1], host=True) + peaks.recomputed_checkpoints(segment[:-1], host=True)).values()
        )
    return gathers * parameter_transfers(step, cluster)[0], copied / cluster.accelerator.host_bandwidth


def tensor_transfers(step: StepSizes, cluster: Cluster) -> float:
    """All-gathers and reduce-scatters of [B, T, E] over the tensor-parallel ranks. Computation waits for them.

    A block has two of each, forward and backward; embedding and loss together have four. Recomputed are, without
    policy "none", attention's gather for its backward, and again if attention is recomputed; and the three of the part
    after attention, whose last output nobody needs, but which is reduced all the same.
    """
    if step.tp == 1:
        return 0.0
    layers, policy = step.model.layers, step.checkpointing
    count = 8 * layers + 4
    if policy.policy != "none":
        count += 4 * layers + sum(not keep.attention_output for keep in step.keeps)
        count += 3 * sum(not keep.x for keep in step.keeps)
    elif policy.tiled:
        count += 3 * layers
    return count * all_gather_seconds(cluster, step.tp * step.x, step.tp)


def parameter_transfers(step: StepSizes, cluster: Cluster) -> Seconds:
    """A block's parameters and gradients: (all-gather in forward, transfers in backward)."""
    gather = sharded_seconds(step, cluster, step.model.block * step.e)
    regather = gather if step.zero_stage == 3 else 0.0
    return gather, regather + reduced_seconds(step, cluster, step.model.block)


def root_transfers(step: StepSizes, cluster: Cluster) -> float:
    """All-gather of embedding and head, and reduction of their gradients. Nothing hides these."""
    parameters = step.model.table + step.model.head + step.model.root
    return sharded_seconds(step, cluster, parameters * step.e) + reduced_seconds(step, cluster, parameters)


def sharded_seconds(step: StepSizes, cluster: Cluster, size: float) -> float:
    """All-gather, or reduce-scatter, of `size` bytes over the ranks that share parameters."""
    return all_gather_seconds(cluster, size, step.sharing, step.tp)


def reduced_seconds(step: StepSizes, cluster: Cluster, parameters: float) -> float:
    """Reduce-scatter of gradients, and all-reduce of the result over replicas."""
    replicas, stride = cluster.ranks // (step.sharing * step.tp), step.sharing * step.tp
    over_replicas = 2 * all_gather_seconds(cluster, MASTER * parameters / step.sharing, replicas, stride)
    return sharded_seconds(step, cluster, MASTER * parameters) + over_replicas


def block_offload(step: StepSizes, i: int, cluster: Cluster, computing: Seconds) -> float:
    """Exposed copies of block i's checkpoints: to the host in forward and back in backward.

    Backward of the block above hides the copy back, if it is prefetched.
    """
    if not step.checkpointing.offload:
        return 0.0
    peaks, bandwidth = Peaks(step), cluster.accelerator.host_bandwidth
    to_host = sum(peaks.stored([i], host=True).values())
    from_host = to_host + sum(peaks.recomputed_checkpoints([i], host=True).values())
    prefetched = step.checkpointing.prefetch and i < step.model.layers - 1
    return exposed((to_host / bandwidth, from_host / bandwidth), (computing[0], computing[1] if prefetched else 0.0))


def optimizer_update(step: StepSizes, cluster: Cluster) -> float:
    """AdamW on a rank's shard. On the host, gradients are copied there and parameters back."""
    # AdamW is bound by memory bandwidth; on the host all ranks of a node share it.
    owned = step.model.all / step.sharing
    if not step.on_host:
        return ADAM * owned / cluster.accelerator.memory_bandwidth
    copied = 2 * MASTER * owned / cluster.accelerator.host_bandwidth
    return copied + ADAM * owned * cluster.ranks_per_node / HOST_BANDWIDTH
