"""Checkpoint policies, and variants that store fewer checkpoints if memory does not suffice for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from armillary.models import Checkpointing
from armillary.models.parts import best_input_count
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
"""First without offload, then with offload and prefetch, then without prefetch. Each of these groups is ordered from
the fastest policy, which needs the most memory, to the slowest."""


def fit_policy(
    policy: Checkpointing, layers: int, memory: Callable[[Checkpointing], Estimate], room: Room
) -> Iterator[Checkpointing]:
    """Yields the policy itself, then variants that store as many checkpoints as fit.

    With `offload`, one variant keeps the checkpoints of as many of the last blocks as fit on the device. If memory
    still does not suffice, two variants drop checkpoints: the first keeps all inputs and drops attention outputs, the
    second drops inputs first. A dropped output costs a recomputation of attention, a dropped input only one of the part
    after attention in the previous block.

    Args:
        memory: estimates the memory of a step under a policy.
    """

    def fits(candidate: Checkpointing) -> bool:
        return room.share(memory(candidate)) <= 1

    # 1. All checkpoints, on the device or on the host.
    yield policy
    if policy.policy == "none" or (not policy.offload and fits(policy)):
        return
    # 2. With offload: keep the checkpoints of as many of the last blocks as fit on the device. A host of unlimited size
    # leaves the device's memory as the only limit.
    if policy.offload:
        unlimited_host = replace(room, host=1 << 62)
        on_device = largest(0, layers, lambda n: unlimited_host.share(memory(replace(policy, on_device=n))) <= 1)
        if on_device == layers:
            return  # all blocks keep their checkpoints on the device: the policy without offload is the same
        policy = replace(policy, on_device=on_device or 0)
        yield policy
    # 3. Fewer checkpoints.
    if not fits(policy):
        yield from _with_counts(policy, layers, True, fits)
        yield from _with_counts(policy, layers, False, fits)


def _with_counts(
    policy: Checkpointing, layers: int, all_inputs: bool, fits: Callable[[Checkpointing], bool]
) -> Iterator[Checkpointing]:
    """Yields the policy with the most attention outputs that fit, and then the most inputs that fit beside them.

    Yields nothing if no number of outputs fits.

    Args:
        all_inputs: True keeps all inputs. False chooses the number of outputs with the number of inputs whose peak is
            lowest (`best_input_count`).
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

    # First choose the number of outputs, which is 0 under policy "layer", then of inputs, in the remaining memory.
    first, last = (1, layers) if has_outputs else (0, 0)
    outputs = largest(first, last, lambda n: fits(variant(n)))
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
