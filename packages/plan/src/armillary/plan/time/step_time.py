"""Predicts the time of a training step, part by part: computation, and the communication that it does not hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from armillary.plan.cluster import Cluster
from armillary.plan.memory import Job
from armillary.plan.memory.formulas import Peaks
from armillary.plan.memory.latent_sizes import step_sizes
from armillary.plan.memory.tensor_sizes import FLOAT32_BYTES, StepSizes
from armillary.plan.time.clocks import PassTime, all_gather_seconds
from armillary.plan.time.passes import Passes, window_of

# Bytes that AdamW reads (parameter, gradient, two moments) and writes (parameter, two moments) per parameter.
ADAM_BYTES = 7 * FLOAT32_BYTES
# Memory bandwidth of a machine's processors in bytes per second, for an optimizer on the host.
HOST_MEMORY_BANDWIDTH = 200e9

# Seconds of one block: (in forward, in backward).
BlockSeconds = tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by cause.

    Args:
        dense: matrix products of blocks, forward and backward.
        attention: attention kernels with the expansion of latents, and recurrences of a hybrid, forward and backward.
        recomputed: recomputation in backward, attention included.
        head: matrix products of the head, for logits and their gradients.
        exchange: waiting for communication of attention and of a hybrid's states and layouts, and the slowdown of
            kernels that run beside it.
        steps: kernel launches and merges of partial results, in the steps of attention's communication plan.
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
        return asdict(self)


def step_time(job: Job, passes: Passes, cluster: Cluster) -> StepTime:
    """Seconds of a job's training step, whose attention takes `passes` in each block.

    Raises:
        ValueError: the job's attention is not an `AttentionChoice`.
    """
    step, device = step_sizes(job), cluster.accelerator
    matmul_flops = device.flops * device.matmul
    tokens, layers = step.rows * step.tokens, step.model.layers
    # 1. Computation, summed over the blocks of each mixer and window.
    dense = recomputed = 0.0
    attention = PassTime() if passes.relayout is None else passes.relayout.both().times(passes.relayouts)
    recomputed_attention = PassTime()
    computation, transfers = [(0.0, 0.0)] * layers, [(0.0, 0.0)] * layers  # by block
    segment_ends = {segment[-1] for segment in step.segments}
    peaks = Peaks(step)
    for sizes, blocks, block_passes in by_passes(job, step, passes):
        # 6 FLOPs per parameter and token (arXiv 2001.08361): a multiply and an add in forward, twice that in backward.
        # Attention's passes have the expansion of latents.
        block_dense = 2 * (sizes.model.block - sizes.model.expansion) * tokens / matmul_flops
        dense += 3 * block_dense * len(blocks)
        recomputed += recomputed_products(step, sizes, blocks, block_dense)
        recomputed_attention += block_passes.forward.times(recomputed_attentions(step, blocks))
        attention += block_passes.both().times(len(blocks))
        # Forward gathers parameters; backward gathers them again under ZeRO stage 3, and reduces gradients.
        gather, reduction = parameter_transfers(step, cluster, sizes.model.block)
        block_transfers = gather, (gather if step.zero_stage == 3 else 0.0) + reduction
        for i in blocks:
            computation[i] = block_computation(step, i, i in segment_ends, block_dense, block_passes)
            transfers[i] = block_transfers
    # 2. Transfers of parameters and gradients. While a block computes, FSDP2 gathers the parameters of the next one,
    # and in backward reduces the gradients of the last. The computation hides these transfers, except for the time in
    # which it already hides attention's exchanges. Nothing hides those of embedding, head, root, and recomputed
    # segments (the blocks from one kept input to the next).
    segment_gathers, segment_copies = recomputed_segments(peaks, cluster)
    root_seconds = sum(parameter_transfers(step, cluster, step.model.outside_blocks))
    parameters = sum(map(exposed_seconds, transfers, computation)) + segment_gathers + root_seconds
    return StepTime(
        dense=dense,
        attention=attention.compute,
        recomputed=recomputed + recomputed_attention.compute,
        # Three products of 2 FLOPs per element: logits, the gradient of hidden states, and the gradient of the weight.
        # `linear_token_loss` computes the gradients in its forward, so logits are not recomputed.
        head=6 * step.model.vocabulary * step.model.dim * tokens / matmul_flops,
        exchange=attention.exposed + recomputed_attention.exposed,
        steps=attention.overhead + recomputed_attention.overhead,
        tensor=tensor_transfers(step, cluster),
        parameters=parameters,
        offload=sum(block_offload(peaks, i, cluster, computation[i]) for i in range(layers)) + segment_copies,
        optimizer=optimizer_update(step, cluster),
    )


def step_bytes(job: Job, passes: Passes) -> list[int]:
    """Bytes that each rank sends in a step for attention, states and moves between layouts, recomputation included."""
    step, total = step_sizes(job), [0] * len(passes.sent_bytes[0])

    def add(by_rank: Sequence[int], times: int) -> None:
        total[:] = [a + times * b for a, b in zip(total, by_rank, strict=True)]

    for _, blocks, block_passes in by_passes(job, step, passes):
        forward, backward = block_passes.sent_bytes
        # Backward runs forward once more in the blocks that recompute it.
        add(forward, len(blocks) + recomputed_attentions(step, blocks))
        add(backward, len(blocks))
    if passes.relayout is not None:
        for by_rank in passes.relayout.sent_bytes:
            add(by_rank, passes.relayouts)
    return total


def by_passes(job: Job, step: StepSizes, passes: Passes) -> Iterator[tuple[StepSizes, Sequence[int], Passes]]:
    """Yields (sizes, indices of blocks, their passes) for all blocks with the same mixer and window."""
    for sizes, mixer_blocks in step.by_mixer(range(step.model.layers)):
        blocks = defaultdict[int | None, list[int]](list)
        for i in mixer_blocks:
            blocks[window_of(job.model, i)].append(i)
        for window, indices in blocks.items():
            yield sizes, indices, passes.at(sizes.mixer, window, step.checkpointing.policy)


def exposed_seconds(transfers: BlockSeconds, computation: BlockSeconds) -> float:
    """Seconds by which transfers take longer than the concurrent computation, in forward and backward together."""
    return sum(max(0.0, transfer - compute) for transfer, compute in zip(transfers, computation, strict=True))


def recomputed_products(step: StepSizes, sizes: StepSizes, blocks: Sequence[int], dense: float) -> float:
    """Seconds of products that backward recomputes in the blocks of one mixer. `dense`: of one block in forward."""
    # The time of a product is proportional to the number of parameters in its matrix.
    after_attention = sizes.model.after_attention / (sizes.model.block - sizes.model.expansion) * dense
    if step.checkpointing.policy == "none":
        # The projections of staged methods and, with chunked MLPs, the part after attention.
        projections = dense - after_attention if sizes.projects_in_stages else 0.0
        return len(blocks) * (projections + (after_attention if step.checkpointing.tiled else 0.0))
    # All products of a block. If a block does not keep its input, the part after attention of the previous block
    # computes the input once more.
    without_input = sum(not step.keeps[i].x for i in blocks)
    return len(blocks) * dense + without_input * after_attention


def recomputed_attentions(step: StepSizes, blocks: Sequence[int]) -> int:
    """Number of these blocks that recompute attention in backward, because they do not keep its output."""
    return 0 if step.checkpointing.policy == "none" else sum(not step.keeps[i].attention_output for i in blocks)


def block_computation(step: StepSizes, i: int, ends_segment: bool, dense: float, passes: Passes) -> BlockSeconds:
    """Seconds of computation of block i that can hide transfers: (forward, backward)."""
    backward, is_checkpointed = passes.backward, step.checkpointing.policy != "none"
    # Other blocks of a segment recompute attention earlier, when the segment is recomputed from its input.
    # Recomputed attention hides transfers too, if forward sends while it computes.
    if is_checkpointed and passes.overlap and ends_segment and not step.keeps[i].attention_output:
        backward += passes.forward
    recomputed = dense if is_checkpointed else recomputed_products(step, step.at(i), [i], dense)

    def idle_link_seconds(attention: PassTime) -> float:
        # Attention's own exchanges use the links first. For the rest of its time the links are free.
        return max(0.0, attention.compute + attention.exposed - attention.exchange)

    hidden_by_forward = idle_link_seconds(passes.forward) if passes.overlap else 0.0
    # Backward has twice the products of forward, and the recomputed ones.
    return dense + hidden_by_forward, 2 * dense + recomputed + idle_link_seconds(backward)


def recomputed_segments(peaks: Peaks, cluster: Cluster) -> tuple[float, float]:
    """Exposed seconds of recomputed segments: (all-gathers of parameters, copies from and to the host)."""
    step, gather_seconds, copied_bytes = peaks.step, 0.0, 0.0
    if len(step.segments) == len(step.keeps):
        return 0.0, 0.0  # every block stores its input
    for segment in step.segments:
        # The last two blocks of a segment are gathered for backward anyway, the others once more.
        gather_seconds += sum(parameter_transfers(step, cluster, step.at(i).model.block)[0] for i in segment[:-2])
        # Stored checkpoints of all blocks but the last are read from the host, recomputed ones written there.
        read_tensors = peaks.stored_tensors(segment[:-1], host=True)
        written_tensors = peaks.recomputed_checkpoints(segment[:-1], host=True)
        copied_bytes += sum((read_tensors + written_tensors).values())
    return gather_seconds, copied_bytes / cluster.accelerator.host_bandwidth


def tensor_transfers(step: StepSizes, cluster: Cluster) -> float:
    """Seconds of tensor parallelism's all-gathers and reduce-scatters of [B, T, E], none of which computation hides."""
    if step.tp == 1:
        return 0.0
    layers, policy = step.model.layers, step.checkpointing
    # Attention and MLP gather their input and reduce-scatter their output, in forward and in backward: 8 a block
    # (sequence parallelism, arXiv 2205.05198). Embedding and loss have 4 together.
    count = 8 * layers + 4
    if policy.policy != "none":
        # Backward repeats 4 a block: attention's gather, and in the part after attention a reduce-scatter, a gather and
        # a reduce-scatter (whose result is not needed). Recomputing attention gathers once more.
        count += 4 * layers + sum(not keep.attention_output for keep in step.keeps)
        # If a block does not keep its input, the part after attention of the previous block runs once more.
        count += 3 * sum(not keep.x for keep in step.keeps)
    elif policy.tiled:  # without checkpoints, a chunked MLP still recomputes the part after attention
        count += 3 * layers
    return count * all_gather_seconds(cluster, step.tp * step.x, step.tp)


def parameter_transfers(step: StepSizes, cluster: Cluster, parameters: float) -> tuple[float, float]:
    """Seconds to all-gather so many parameters in the compute dtype, and to reduce their float32 gradients."""
    gather = all_gather_seconds(cluster, parameters * step.e, step.sharing, step.tp)
    reduce_scatter = all_gather_seconds(cluster, FLOAT32_BYTES * parameters, step.sharing, step.tp)
    # HSDP all-reduces the shard of gradients of each rank over replicas: a reduce-scatter and an all-gather.
    ranks_per_replica = step.sharing * step.tp
    replicas, shard_bytes = cluster.ranks // ranks_per_replica, FLOAT32_BYTES * parameters / step.sharing
    return gather, reduce_scatter + 2 * all_gather_seconds(cluster, shard_bytes, replicas, stride=ranks_per_replica)


def block_offload(peaks: Peaks, i: int, cluster: Cluster, computation: BlockSeconds) -> float:
    """Exposed seconds of copies of block i's checkpoints: to the host in forward, and from the host in backward."""
    step, bandwidth = peaks.step, cluster.accelerator.host_bandwidth
    if not step.checkpointing.offload:
        return 0.0
    to_host = sum(peaks.stored_tensors([i], host=True).values())
    from_host = to_host + sum(peaks.recomputed_checkpoints([i], host=True).values())
    # The backward of the next block hides the copy from the host. The last block has no next one.
    prefetched = step.checkpointing.prefetch and i < step.model.layers - 1
    forward, backward = computation
    return exposed_seconds((to_host / bandwidth, from_host / bandwidth), (forward, backward if prefetched else 0.0))


def optimizer_update(step: StepSizes, cluster: Cluster) -> float:
    """Seconds of AdamW on a rank's shard. If it runs on the host, gradients are copied there and parameters back."""
    # Memory bandwidth limits AdamW. All ranks of a node share the host's.
    parameters_per_rank = step.all_parameters / step.sharing
    if not step.on_host:
        return ADAM_BYTES * parameters_per_rank / cluster.accelerator.memory_bandwidth
    copies = 2 * FLOAT32_BYTES * parameters_per_rank / cluster.accelerator.host_bandwidth
    return copies + ADAM_BYTES * parameters_per_rank * cluster.ranks_per_node / HOST_MEMORY_BANDWIDTH
