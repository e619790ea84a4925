"""Estimates the peak memory of a training step by closed formulas, within a few percent of `simulate`."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.peaks import CategoryBytes, Peaks
from armillary.plan.memory.estimate.step import FLOAT32_BYTES, StepSizes
from armillary.plan.memory.simulation.simulate import Job

__all__ = ["AttentionChoice", "Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of a training step on one rank, of the device's memory and of the host's.

    Args:
        device_breakdown, host_breakdown: bytes by category, at the peak of that memory.
        moment: moment of the step at which the device's memory peaks, such as "loss".
        moments: the device's bytes at each moment that may be the peak.
    """

    device: int
    device_breakdown: dict[str, int]
    host: int
    host_breakdown: dict[str, int]
    moment: str
    moments: dict[str, int]


def estimate(job: Job) -> Estimate:
    """Estimates the result of `simulate(job)` by formulas, without tensors.

    The formulas hold for 16 bits, causal masks, zigzag layouts, FlashAttention-2 (`SimulatedFlash`), and numbers of
    heads and tokens that are multiples of the number of ranks. Norms and activations are those of CUDA: RMSNorm saves
    only x for backward, and the backward of silu is one kernel.

    Raises:
        ValueError: the job's attention is not an `AttentionChoice`.
    """
    step = StepSizes.of(job)
    moments = {name: sizes.round() for name, sizes in Peaks(step).all()}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = max((sizes.round() for sizes in host_peaks(step)), key=lambda sizes: sum(sizes.values()))
    return Estimate(
        device=sum(moments[moment].values()),
        device_breakdown=moments[moment],
        host=sum(host.values()),
        host_breakdown=host,
        moment=moment,
        moments={name: sum(sizes.values()) for name, sizes in moments.items()},
    )


def host_peaks(step: StepSizes) -> list[CategoryBytes]:
    """Host memory at the moments that may be its peak.

    These are the last block's backward, the backward of the last block of each recomputed segment, and the optimizer's
    step.
    """
    model, peaks = step.model, Peaks(step)
    # Bytes on this rank per parameter of the model, for each of: master weight, gradient, and AdamW's two moments.
    shard = FLOAT32_BYTES / step.sharing if step.on_host else 0
    state = CategoryBytes(parameters=shard * step.all_parameters, optimizer=2 * shard * step.all_parameters)

    def in_backward(i: int) -> CategoryBytes:
        # The gradients of the head and of all blocks after block i are reduced, and copied to the host.
        reduced = CategoryBytes(gradients=shard * (model.head + step.parameters(range(i + 1, model.layers))))
        return state + peaks.stored_before(i, host=True) + reduced

    blocks = {model.layers - 1, *peaks.recomputed_segment_ends()}
    return [*(in_backward(i) for i in blocks), state + CategoryBytes(gradients=shard * step.all_parameters)]
