"""How many blocks may keep what, where not all can: as much as fits, in the order of what it costs to have it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from armillary.models import Checkpointing
from armillary.models.activation_checkpoint.keeping import fewest
from armillary.plan.memory.estimate import Estimate
from armillary.plan.memory.room import Room

Memory = Callable[[Checkpointing], Estimate]


def fitted(policy: Checkpointing, layers: int, memory: Memory, room: Room) -> Iterator[Checkpointing]:
    """A policy as it is; and with as many blocks' checkpoints on the device, and of the rest as much kept, as fits.

    An input that isn't kept costs what follows attention in the block below; a result of attention costs attention. So
    inputs are given up first. With every input kept there may be fewer results: that is yielded too.

    Args:
        memory: what a step holds.
    """
    yield policy
    if policy.policy == "none" or (not policy.offload and room.share(memory(policy)) <= 1):
        return
    if policy.offload:
        wide = replace(room, host=1 << 62)
        here = largest(0, layers, lambda n: wide.share(memory(replace(policy, on_device=n))) <= 1)
        if here == layers:  # then it need not be offloaded
            return
        policy = replace(policy, on_device=here or 0)
        yield policy
    if room.share(memory(policy)) > 1:
        for inputs in ("all", "fewest"):
            yield from with_counts(policy, layers, inputs == "all", lambda given: room.share(memory(given)) <= 1)


def with_counts(
    policy: Checkpointing, layers: int, every: bool, fits: Callable[[Checkpointing], bool]
) -> Iterator[Checkpointing]:
    """With as many results of attention as fit beside all inputs, or beside the fewest; then with as many inputs."""
    above = policy.on_device

    def given(outputs: int, inputs: int | None = None) -> Checkpointing:
        least = above + fewest(layers - above, max(0, outputs - above)) if above < layers else layers
        count = layers if every else least if inputs is None else inputs
        counts = {"outputs": None if outputs == layers else outputs} if most else {}
        return replace(policy, inputs=None if count == layers else count, **counts)

    most = layers if policy.policy == "attention_output" else 0
    outputs = largest(min(most, 1), most, lambda n: fits(given(n)))
    if outputs is None:
        return
    least = given(outputs).inputs
    inputs = None if least is None else largest(least, layers, lambda n: fits(given(outputs, n)))
    yield given(outputs, inputs)


def largest(least: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, of those from `least` to `most`; None if none does. The smaller, the more fits."""
    if not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
