"""Seconds of a training step of a hybrid, whose blocks have attention or a state."""

from __future__ import annotations

from dataclasses import replace

from armillary.attention.planning.states import state_comm_plan
from armillary.models import LlamaConfig
from armillary.models.state_config import Mixer
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.comm_plan_time import Span, plan_seconds
from armillary.plan.comm_time.step_time import Passes, StepTime, sizes_time
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.memory.estimate.step import StepSizes


def hybrid_time(job: Job, passes: Passes, cluster: Cluster, kind: str = "zigzag") -> StepTime:
    """Seconds of a hybrid's training step: blocks of each mixer as in a model of these blocks, times their number.

    Recurrences run at the speed of matrix products, with the operations of the recurrence token by token: chunked
    kernels compute more. Their exchanges hide behind nothing. The halo of the short convolution is left out.

    Args:
        passes: of a block's attention.
        kind: of the layout.

    Raises:
        ValueError: as `estimate`, or a layout that layers with a state do not take.
    """
    config = job.model
    assert isinstance(config, LlamaConfig)
    total: dict[str, float] = {}
    for mixer, count in config.mixer_counts().items():
        mixer_passes = passes if mixer == "attention" else state_passes(job, config, mixer, cluster, kind)
        one, two = (sizes_time(mixer_sizes(job, config, mixer, n), mixer_passes, cluster).parts() for n in (1, 2))
        # Embedding, head and what else is outside of blocks counts once.
        total = total or {name: 2 * one[name] - two[name] for name in one}
        total = {name: seconds + count * (two[name] - one[name]) for name, seconds in total.items()}
    return StepTime(**total)


def mixer_sizes(job: Job, config: LlamaConfig, mixer: Mixer, layers: int) -> StepSizes:
    """Returns the sizes of a step of `layers` blocks with one mixer."""
    # The counts are of the whole model's blocks: here every block keeps its input.
    uniform = replace(job.checkpointing, inputs=None, outputs=None, on_device=0)
    model = replace(config, layers=layers, mixers=("attention",), states=None)
    sizes = StepSizes.of(replace(job, model=model, checkpointing=uniform))
    if mixer == "attention":
        return sizes
    other_parameters = config.block_parameters(mixer) - config.block_parameters("attention")
    widths = replace(sizes.model, block=sizes.model.block + other_parameters // sizes.tp)
    return replace(sizes, model=widths)


def state_passes(job: Job, config: LlamaConfig, mixer: Mixer, cluster: Cluster, kind: str) -> Passes:
    """Time of a block's recurrence, which backward computes again, and under a checkpoint policy twice."""
    assert isinstance(job.attention, AttentionChoice) and config.states is not None
    sizes, states = mixer_sizes(job, config, mixer, 1), config.states
    layout = job.attention.layout(job.length, sizes.ring, kind)
    if sizes.ulysses > 1:
        layout = layout.refine(sizes.ulysses)
    plan = state_comm_plan(
        "ssd" if mixer == "mamba2" else "gated_delta_rule",
        layout,
        heads=states.heads // sizes.tp,
        key_dim=states.key_dim,
        value_dim=states.value_dim,
        batch=sizes.rows,
    )
    device, copies = cluster.accelerator, cluster.ranks // layout.shards
    operations = states.flops_per_token(mixer) / 3 / sizes.tp * sizes.tokens * sizes.rows
    compute = operations / (device.flops * device.matmul)
    forward_exchange, backward_exchange = (
        plan_seconds(steps, cluster, 0.0, copies, stride=sizes.tp).exchange for steps in (plan.forward, plan.backward)
    )
    forward = Span(compute, forward_exchange, exchange=forward_exchange)
    backward = Span(3 * compute, backward_exchange, exchange=backward_exchange)
    if job.checkpointing.policy == "attention_output":  # which blocks with a state do not keep
        backward += forward
    return Passes(forward, backward)
