"""Advice for a step that does not fit: the nearest changes with which it fits, by formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from armillary.data.console import gib
from armillary.models import Checkpointing
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import Estimate, estimate
from armillary.plan.memory.room import DoesNotFitError, Room, more_devices
from armillary.plan.presets import is_hybrid
from armillary.plan.search.candidates import POLICIES, Mesh, candidates, fit_policy, largest

SIMULATED_SHARE = 4
"""Steps whose estimated memory is more than this many times the room are not simulated.

A long sequence has many chunks, and a simulation runs the ops of each.
"""
FORMULAS = ("forward_memory", "backward_memory")
"""Functions of a method's plan that an estimate needs."""


def check_simulated(job: Job, cluster: Cluster, room: Room, flag: str) -> None:
    """Refuses a step that by formulas needs far more memory than there is, because its simulation would take too long.

    Args:
        flag: flag of the sequence length, for the error's message.

    Raises:
        DoesNotFitError: the step needs more than `SIMULATED_SHARE` times the room. The message has the `advice`.
    """
    if room.share(usage := estimate(job)) > SIMULATED_SHARE:
        raise DoesNotFitError(
            f"{flag} {job.length:,} does not fit {cluster.name}: {room.comparison(usage)}; {advice(job, cluster, room)}"
        )


def advice(job: Job, cluster: Cluster, room: Room) -> str:
    """Returns the nearest changes with which a step fits, by formulas, and how many accelerators would suffice.

    A change is another checkpoint policy, another method on as many ranks, or fewer tokens. If neither a policy nor a
    method alone suffices, both are changed.
    """
    policy, method = fitting_policy(job, room), fitting_method(job, room)
    both = fitting_method(replace(job, checkpointing=POLICIES[-1], on_host=True), room)
    jobs = [other for other in (policy, method) if other is not None] or [both]
    changes = [f"{change_text(job, other)} ({usage_text(other)})" for other in jobs if other is not None]
    if (length := fewer_tokens(job, cluster, room)) is not None:
        changes.append(f"{length:,} tokens")
    accelerators = more_devices(job, cluster, room)
    return f"by formulas it fits with {', or with '.join(changes)}; {accelerators}" if changes else accelerators


def fitting_policy(job: Job, room: Room) -> Job | None:
    """Returns the job under the fastest policy that fits, with the optimizer where it is or else on the host."""
    for placed in [job] if job.on_host else [job, replace(job, on_host=True)]:

        @cache  # the bisections of `fit_policy` repeat policies
        def memory(checkpointing: Checkpointing, placed: Job = placed) -> Estimate:
            return estimate(replace(placed, checkpointing=checkpointing))

        for policy in POLICIES:
            for checkpointing in fit_policy(policy, job.model.layers, memory, room):
                changed = replace(placed, checkpointing=checkpointing)
                # A step that fits by formulas alone may not fit when simulated.
                if changed != job and room.share(memory(checkpointing)) <= 1:
                    return changed
    return None


def fitting_method(job: Job, room: Room) -> Job | None:
    """Returns the job with another method that fits, on the job's mesh if one does, else on another of as many ranks.

    Of several, the one that leaves the most memory free. None for a hybrid: it is simulated for every mesh.
    """
    if is_hybrid(job.model):
        return None
    mesh = Mesh(**{"shard": 1, "ring": 1, "ulysses": 1, **job.axes})
    ranks, rows = mesh.replicas * mesh.ring * mesh.ulysses * mesh.tp, job.rows * mesh.replicas
    fitting = list[tuple[bool, float, int, Job]]()
    for i, candidate in enumerate(candidates(job.model.heads, ranks, rows, (), (mesh.tp,), (mesh.replicate,))):
        if candidate.mesh.shard == mesh.shard and not candidate.attention.method.missing(*FORMULAS):
            changed = replace(job, axes=candidate.mesh.axes, attention=candidate.attention)
            share = room.share(estimate(changed))
            if share <= 1 and candidate.attention != job.attention:
                fitting.append((candidate.mesh != mesh, share, i, changed))
    return min(fitting)[-1] if fitting else None


def fewer_tokens(job: Job, cluster: Cluster, room: Room) -> int | None:
    """Returns the longest shorter sequence that fits; None if there is none.

    Lengths are multiples of 1,024 tokens for each rank, or of the number of ranks if the job has fewer tokens.
    """
    multiple = 1024 * cluster.ranks if job.length > 1024 * cluster.ranks else cluster.ranks

    def fits(count: int) -> bool:
        return room.share(estimate(replace(job, length=count * multiple))) <= 1

    shorter = (job.length - 1) // multiple
    count = largest(1, shorter, fits) if shorter else None
    return None if count is None else count * multiple


# -- text -------------------------------------------------------------------------------------------------------------


def change_text(job: Job, other: Job) -> str:
    """Describes the changes from a job to another: method and mesh, checkpoints, and the optimizer's place."""
    changes = list[str]()
    if other.attention != job.attention or other.axes != job.axes:
        changes.append(f"{other.attention} on {Mesh(**other.axes)}")
    if other.checkpointing != job.checkpointing:
        is_stored = other.checkpointing.policy != "none"
        changes.append(f"checkpoints: {policy_text(other.checkpointing)}" if is_stored else "no checkpoints")
        changes += ["a chunked MLP"] if other.checkpointing.tiled else []
    if other.on_host != job.on_host:
        changes.append("the optimizer on the host")
    return " and ".join(changes)


def usage_text(job: Job) -> str:
    usage = estimate(job)
    return f"{gib(usage.device)} GiB of a device, {gib(usage.host)} GiB of the host"


def policy_text(policy: Checkpointing) -> str:
    """Describes a policy: "attention output of 25 blocks and 5 inputs on the host, but for the last block"."""

    def blocks(count: int) -> str:
        return f"{count} block{'' if count == 1 else 's'}"

    outputs = "" if policy.outputs is None else f" of {blocks(policy.outputs)}"
    inputs = "" if policy.inputs is None else f" and {policy.inputs} inputs"
    last_blocks = "block" if policy.on_device == 1 else blocks(policy.on_device)
    on_device = f", but for the last {last_blocks}" if policy.on_device else ""
    return f"{policy.policy.replace('_', ' ')}{outputs}{inputs}{' on the host' if policy.offload else ''}{on_device}"
