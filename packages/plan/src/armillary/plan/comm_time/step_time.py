"""Predicts the time of a training step, part by part: computation, and the communication that it does not hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from armillary.attention.planning.comm_plan import CommPlan
from armillary.core.observe.ledger import PHASES
from armillary.models.state_config import Mixer
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.comm_plan_time import BACKWARD, FORWARD, PassTime, all_gather_seconds, plan_seconds
from armillary.plan.memory import Job
from armillary.plan.memory.estimate.peaks import Peaks
from armillary.plan.memory.estimate.step import MASTER, StepSizes

ADAM = 7 * MASTER
"""Bytes that AdamW reads (parameter, gradient, two moments) and writes (all but the gradient) per parameter."""
HOST_BANDWIDTH = 200e9
"""Memory bandwidth of a machine in bytes a second, for an optimizer on the host."""

SentBytes = tuple[tuple[int, ...], tuple[int, ...]]
"""Bytes by rank: (in forward, in backward)."""

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
    """Time of one block's attention, forward and backward, and of a hybrid's other mixers.

    Args:
        overlap: False if nothing is sent while forward computes.
        sent_bytes: bytes that each rank sends, in forward and in backward.
        states: the same for a block of each recurrent mixer.
        relayout: one exchange of activations between attention's layout and that of recurrent layers (forward), and of
            the gradients of these activations (backward).
        relayouts: number of such exchanges in a step, in both directions.
    """

    forward: PassTime
    backward: PassTime
    overlap: bool = True
    sent_bytes: SentBytes = ((), ())
    states: Mapping[Mixer, Passes] = field(default_factory=dict[Mixer, "Passes"])
    relayout: Passes | None = None
    relayouts: int = 0

    def both(self) -> PassTime:
        """Forward and backward."""
        return self.forward + self.backward

    def at(self, mixer: Mixer) -> Passes:
        """Returns the passes of a block with this mixer."""
        return self.states.get(mixer, self)

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

        If a persistent kernel leaves NCCL no multiprocessors (margin 0), forward hides no communication: NCCL's kernels
        start when it ends.

        Args:
            tokens, kernel, margin: as in `Accelerator.attention_shares`.
            stride: as in `plan_seconds`.
        """
        device = cluster.accelerator
        overlap = margin > 0 or not device.is_persistent(kernel)
        forward_share, backward_share = device.attention_shares(tokens, kernel, margin)
        # Seconds for one (query, key) pair of one head.
        forward_pair = FORWARD * head_dim / (device.flops * forward_share)
        backward_pair = BACKWARD * head_dim / (device.flops * backward_share)
        return cls(
            plan_seconds(plan.forward, cluster, forward_pair, copies, overlap, stride),
            plan_seconds(plan.backward, cluster, backward_pair, copies, stride=stride),
            overlap,
            sent_bytes(plan, cluster.ranks // copies),
        )


def sent_bytes(plan: CommPlan, ranks: int) -> SentBytes:
    """Bytes that each of a plan's ranks sends, in forward and in backward."""
    forward, backward = (tuple(plan.bytes(r, phase=phase) for r in range(ranks)) for phase in PHASES)
    return forward, backward


def step_time(job: Job, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a job's training step, whose attention takes `passes` in each block.

    FSDP2 gathers parameters one block ahead and reduces gradients while the next block computes; checkpoints are copied
    at the same time. So a block's computation hides these transfers, except for the time in which it already hides
    attention's exchanges. Exposed are copies of checkpoints without prefetch, and transfers of
    recomputed segments (the blocks from one kept input to the next).

    Raises:
        ValueError: as `estimate`.
    """
    step, device = StepSizes.of(job), cluster.accelerator
    matmul_flops = device.flops * device.matmul
    tokens, layers = step.rows * step.tokens, step.model.layers
    # 1. Computation, summed over the blocks of each mixer.
    dense = recomputed = 0.0
    attention = PassTime() if passes.relayout is None else passes.relayout.both().times(passes.relayouts)
    recomputed_attention = PassTime()
    computing, gathers = [(0.0, 0.0)] * layers, [(0.0, 0.0)] * layers  # by block
    segment_ends = {segment[-1] for segment in step.segments}
    for sizes, blocks in step.by_mixer(range(layers)):
        mixer_passes = passes.at(sizes.mixer)
        # 6 FLOPs per parameter and token (arXiv 2001.08361): a multiply and an add in forward, twice that in backward.
        block_dense = 2 * sizes.model.block * tokens / matmul_flops
        dense += 3 * block_dense * len(blocks)
        recomputed += recomputed_products(step, sizes, blocks, block_dense)
        recomputed_attention += mixer_passes.forward.times(recomputed_attentions(step, blocks))
        attention += mixer_passes.both().times(len(blocks))
        gather = parameter_transfers(sizes, cluster)
        for i in blocks:
            computing[i] = block_computation(step, i, i in segment_ends, block_dense, mixer_passes)
            gathers[i] = gather
    # 2. Transfers of parameters and gradients, less the computation beside them.
    segment_gathers, segment_copies = recomputed_segments(step, cluster)
    parameters = sum(map(exposed_seconds, gathers, computing)) + segment_gathers + root_transfers(step, cluster)
    return StepTime(
        dense=dense,
        attention=attention.compute,
        recomputed=recomputed + recomputed_attention.compute,
        # The logits' product, and two for their gradients. `linear_token_loss` computes logits once.
        head=6 * step.model.vocabulary * step.model.dim * tokens / matmul_flops,
        exchange=attention.exposed + recomputed_attention.exposed,
        steps=attention.overhead + recomputed_attention.overhead,
        tensor=tensor_transfers(step, cluster),
        parameters=parameters,
        offload=sum(block_offload(step, i, cluster, each) for i, each in enumerate(computing)) + segment_copies,
        optimizer=optimizer_update(step, cluster),
    )


def step_bytes(job: Job, passes: Passes) -> list[int]:
    """Bytes that each rank sends in a step for attention, states and moves between layouts, recomputation included.

    Not counted: under a checkpoint policy, methods with a head axis send q, k, v and out once more in backward.
    """
    step, total = StepSizes.of(job), [0] * len(passes.sent_bytes[0])

    def add(by_rank: Sequence[int], times: int) -> None:
        total[:] = [a + times * b for a, b in zip(total, by_rank, strict=True)]

    for sizes, blocks in step.by_mixer(range(step.model.layers)):
        forward, backward = passes.at(sizes.mixer).sent_bytes
        add(forward, len(blocks) + recomputed_attentions(step, blocks))
        add(backward, len(blocks))
    if passes.relayout is not None:
        for by_rank in passes.relayout.sent_bytes:
            add(by_rank, passes.relayouts)
    return total


def exposed_seconds(transfers: Seconds, computing: Seconds) -> float:
    """Seconds of transfers, in forward and backward, beyond those of the concurrent computation."""
    return sum(max(0.0, transfer - compute) for transfer, compute in zip(transfers, computing, strict=True))


def recomputed_products(step: StepSizes, sizes: StepSizes, blocks: Sequence[int], dense: float) -> float:
    """Seconds of matrix products that backward recomputes in the blocks of one mixer.

    - Policy "none" recomputes the projections of staged methods, and chunked MLPs.
    - A block that keeps its input recomputes all its products.
    - One that does not also recomputes the part after attention of the previous block once more.

    Args:
        sizes: sizes of these blocks.
        dense: seconds of one block's products in forward.
    """
    # Time of products is proportional to the parameters that they multiply with.
    after_attention = sizes.model.after_attention / sizes.model.block * dense
    if step.checkpointing.policy == "none":
        projections = dense - after_attention if sizes.projects_in_stages else 0.0
        return len(blocks) * (projections + (after_attention if step.checkpointing.tiled else 0.0))
    without_input = sum(not step.keeps[i].x for i in blocks)
    return len(blocks) * dense + without_input * after_attention


def recomputed_attentions(step: StepSizes, blocks: Sequence[int]) -> int:
    """Number of these blocks that recompute attention in backward: those that do not keep its output."""
    return 0 if step.checkpointing.policy == "none" else sum(not step.keeps[i].attention_output for i in blocks)


def block_computation(step: StepSizes, i: int, ends_segment: bool, dense: float, passes: Passes) -> Seconds:
    """Seconds of computation of block i that can hide transfers: (forward, backward).

    Args:
        ends_segment: the block is the last of its segment. The other blocks recompute their attention when the segment
            is recomputed, not in their own backward.
    """
    backward, is_checkpointed = passes.backward, step.checkpointing.policy != "none"
    if is_checkpointed and passes.overlap and ends_segment and not step.keeps[i].attention_output:
        backward += passes.forward
    recomputed = dense if is_checkpointed else recomputed_products(step, step.at(i), [i], dense)

    def idle_links(attention: PassTime) -> float:
        # Attention's own exchanges use the links first; the rest of its time is free for other transfers.
        return max(0.0, attention.compute + attention.exposed - attention.exchange)

    hidden_by_forward = idle_links(passes.forward) if passes.overlap else 0.0
    # Backward has twice the products of forward, and those that it recomputes.
    return dense + hidden_by_forward, 2 * dense + recomputed + idle_links(backward)


def recomputed_segments(step: StepSizes, cluster: Cluster) -> Seconds:
    """Exposed seconds of recomputed segments: (all-gathers of parameters, copies from and to the host).

    The parameters of a segment's last two blocks are gathered for their backward anyway; the others' are gathered once
    more. Checkpoints of all blocks but the last are read from the host, and those that recomputation adds are written.
    """
    peaks, gathers, copied = Peaks(step), 0.0, 0.0
    if len(step.segments) == len(step.keeps):
        return 0.0, 0.0  # every block stores its input
    for segment in step.segments:
        gathers += sum(parameter_transfers(step.at(i), cluster)[0] for i in segment[:-2])
        copied += sum(
            (
                peaks.stored_tensors(segment[:-1], host=True) + peaks.recomputed_checkpoints(segment[:-1], host=True)
            ).values()
        )
    return gathers, copied / cluster.accelerator.host_bandwidth


def tensor_transfers(step: StepSizes, cluster: Cluster) -> float:
    """Seconds of tensor parallelism's all-gathers and reduce-scatters of [B, T, E], for which computation waits.

    Their number times the time of one.
    """
    if step.tp == 1:
        return 0.0
    layers, policy = step.model.layers, step.checkpointing
    # Attention and MLP gather their input and reduce-scatter their output, in forward and in backward: 8 a block
    # (sequence parallelism, arXiv 2205.05198). Embedding and loss have 4 together.
    count = 8 * layers + 4
    if policy.policy != "none":
        # Backward recomputes attention's gather, and the part after attention: a reduce-scatter, a gather, and another
        # reduce-scatter, whose result is not needed. Recomputing attention itself gathers once more.
        count += 4 * layers + sum(not keep.attention_output for keep in step.keeps)
        # A block without its input repeats the part after attention of the block below.
        count += 3 * sum(not keep.x for keep in step.keeps)
    elif policy.tiled:
        count += 3 * layers
    return count * all_gather_seconds(cluster, step.tp * step.x, step.tp)


def parameter_transfers(step: StepSizes, cluster: Cluster) -> Seconds:
    """Seconds to transfer a block's parameters and gradients: (all-gather in forward, transfers in backward)."""
    gather = sharded_seconds(step, cluster, step.model.block * step.e)
    regather = gather if step.zero_stage == 3 else 0.0  # stages 1 and 2 keep parameters gathered
    return gather, regather + reduced_seconds(step, cluster, step.model.block)


def root_transfers(step: StepSizes, cluster: Cluster) -> float:
    """Seconds to all-gather embedding and head and to reduce their gradients. Nothing hides these."""
    parameters = step.model.table + step.model.head + step.model.root
    return sharded_seconds(step, cluster, parameters * step.e) + reduced_seconds(step, cluster, parameters)


def sharded_seconds(step: StepSizes, cluster: Cluster, size: float) -> float:
    """Seconds to all-gather, or to reduce-scatter, `size` bytes over the ranks that share parameters."""
    return all_gather_seconds(cluster, size, step.sharing, step.tp)


def reduced_seconds(step: StepSizes, cluster: Cluster, parameters: float) -> float:
    """Seconds to reduce-scatter gradients, and to all-reduce the result over replicas."""
    replicas, stride = cluster.ranks // (step.sharing * step.tp), step.sharing * step.tp
    # HSDP's all-reduce of a shard is a reduce-scatter and an all-gather.
    over_replicas = 2 * all_gather_seconds(cluster, MASTER * parameters / step.sharing, replicas, stride)
    return sharded_seconds(step, cluster, MASTER * parameters) + over_replicas


def block_offload(step: StepSizes, i: int, cluster: Cluster, computing: Seconds) -> float:
    """Exposed seconds of copies of block i's checkpoints: to the host in forward and back in backward.

    Backward of the block above hides the copy back, if it is prefetched.
    """
    if not step.checkpointing.offload:
        return 0.0
    peaks, bandwidth = Peaks(step), cluster.accelerator.host_bandwidth
    to_host = sum(peaks.stored_tensors([i], host=True).values())
    from_host = to_host + sum(peaks.recomputed_checkpoints([i], host=True).values())
    prefetched = step.checkpointing.prefetch and i < step.model.layers - 1
    return exposed_seconds(
        (to_host / bandwidth, from_host / bandwidth), (computing[0], computing[1] if prefetched else 0.0)
    )


def optimizer_update(step: StepSizes, cluster: Cluster) -> float:
    """Seconds of AdamW on a rank's shard. On the host, gradients are copied there and parameters back."""
    # AdamW is bound by memory bandwidth; on the host all ranks of a node share it.
    owned = step.all_parameters / step.sharing
    if not step.on_host:
        return ADAM * owned / cluster.accelerator.memory_bandwidth
    copied = 2 * MASTER * owned / cluster.accelerator.host_bandwidth
    return copied + ADAM * owned * cluster.ranks_per_node / HOST_BANDWIDTH
