"""What a training step holds in memory, by closed formulas: at once, and within a few percent of `simulate`."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.plan.memory.estimate.choice import AttentionChoice
from armillary.plan.memory.estimate.held import Held
from armillary.plan.memory.estimate.moments import Moments
from armillary.plan.memory.estimate.step import MASTER, StepSizes
from armillary.plan.memory.simulation.simulate import Job

__all__ = ["AttentionChoice", "Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step on one rank at the moment when the device holds most, and when the host does.

    Breakdowns are by category, and add up; `moment` is when. `moments` has the device's bytes at every moment that was
    looked at.
    """

    device: int
    device_breakdown: dict[str, int]
    host: int
    host_breakdown: dict[str, int]
    moment: str
    moments: dict[str, int]


def estimate(job: Job) -> Estimate:
    """What `simulate(job)` would find, by formulas; without tensors, and at once.

    For causal masks, zigzag layouts, FlashAttention-2 (`SimulatedFlash`), and heads and tokens that divide evenly.
    Norms and activations are as on CUDA: RMSNorm keeps x alone, and the backward of silu is one kernel.

    Raises:
        ValueError: the job's attention is not an `AttentionChoice`.
    """
    step = StepSizes.of(job)
    moments = {name: held.whole() for name, held in Moments(step).all()}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = max((held.whole() for held in host_moments(step)), key=lambda held: sum(held.values()))
    return Estimate(
        device=sum(moments[moment].values()),
        device_breakdown=moments[moment],
        host=sum(host.values()),
        host_breakdown=host,
        moment=moment,
        moments={name: sum(held.values()) for name, held in moments.items()},
    )


def host_moments(step: StepSizes) -> list[Held]:
    """What the host holds at the last block's backward, where a segment is run again, and in the optimizer's step."""
    model, moments = step.model, Moments(step)
    shard, last = MASTER / step.sharing if step.on_host else 0, model.layers - 1
    state = Held(parameters=shard * model.all, optimizer=2 * shard * model.all)

    def before(i: int) -> Held:
        done = Held(gradients=shard * (model.head + (last - i) * model.block))
        return state + moments.before(i, host=True) + done

    return [*(before(i) for i in {last, *moments.run_again()}), state + Held(gradients=shard * model.all)]
