"""Checkpoint policies, and how many blocks can follow one when memory does not suffice for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from armillary.models import Checkpointing
from armillary.models.activation_checkpoint.segments import best_input_count
from armillary.plan.memory.estimate import Estimate
from armillary.plan.memory.room import Room

POLICIES = (
    Checkpointing("none"),
    Checkpointing("none", tiled=True),
    Checkpointing("attention_output"),
    Checkpointing("layer"),
    Checkpointing("attention_output", offload=True),
    Checkpointing("layer", offload=True),
    Checkpointing("attention_output", offload=True, prefetch=False),
    Checkpointing("layer", offload=True, prefetch=False),
)
"""Ordered from the fastest, which needs the most memory, to the slowest, which needs the least."""


def fit_policy(
    policy: Checkpointing, layers: int, memory: Callable[[Checkpointing], Estimate], room: Room
) -> Iterator[Checkpointing]:
    """Yields the policy itself, then variants that store as many checkpoints as fit.

    With `offload`, as many of the last blocks as fit keep their checkpoints on the device instead. If the host is still
    too small, two variants drop checkpoints: one keeps all inputs and drops attention outputs, one drops inputs first.
    A dropped output costs the recomputation of attention; a dropped input only that of the part after attention in the
    block below.

    Args:
        memory: estimates a step under a policy.
    """

    def fits(candidate: Checkpointing) -> bool:
        return room.share(memory(candidate)) <= 1

    # 1. All checkpoints, on the device or on the host.
    yield policy
    if policy.policy == "none" or (not policy.offload and fits(policy)):
        return
    # 2. With offload: as many of the last blocks as fit on the device. Only the device's memory limits their number.
    if policy.offload:
        unlimited_host = replace(room, host=1 << 62)
        on_device = largest(0, layers, lambda n: unlimited_host.share(memory(replace(policy, on_device=n))) <= 1)
        if on_device == layers:
            return  # the policy without offload has this case
        policy = replace(policy, on_device=on_device or 0)
        yield policy
    # 3. Fewer checkpoints.
    if not fits(policy):
        yield from _with_counts(policy, layers, True, fits)
        yield from _with_counts(policy, layers, False, fits)


def _with_counts(
    policy: Checkpointing, layers: int, all_inputs: bool, fits: Callable[[Checkpointing], bool]
) -> Iterator[Checkpointing]:
    """Yields the policy with the most attention outputs that fit, and then the most inputs.

    Args:
        all_inputs: True keeps all inputs while it chooses the outputs, False the fewest that they need.
    """
    on_device, has_outputs = policy.on_device, policy.policy == "attention_output"

    def variant(outputs: int, inputs: int | None = None) -> Checkpointing:
        if all_inputs:
            inputs = layers
        elif inputs is None:
            # Blocks with checkpoints on the device always keep their inputs.
            inputs = on_device + best_input_count(layers - on_device, max(0, outputs - on_device))
        counts = {"outputs": None if outputs == layers else outputs} if has_outputs else {}
        return replace(policy, inputs=None if inputs == layers else inputs, **counts)

    # First the outputs, with the fewest inputs that they need; then inputs in the remaining memory.
    outputs = largest(1, layers, lambda n: fits(variant(n))) if has_outputs else 0 if fits(variant(0)) else None
    if outputs is None:
        return
    inputs = variant(outputs).inputs
    if inputs is not None:
        inputs = largest(inputs, layers, lambda n: fits(variant(outputs, n)))
    yield variant(outputs, inputs)


def largest(first: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest number from `first` to `last` that fits, by bisection; None if even `first` does not."""
    if not fits(first):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if fits(middle) else (first, middle - 1)
    return first
