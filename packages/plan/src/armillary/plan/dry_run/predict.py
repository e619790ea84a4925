"""Mesh, shapes, memory and time of a configuration's steps, from a model without data on ranks that do not exist."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from armillary.core.mesh import check_axes
from armillary.core.quantity import quantity
from armillary.models import GPTConfig, LlamaConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.dry_run.shapes import Parameter, largest_of, local_part, shapes_of
from armillary.plan.memory import Job, fake_world
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate
from armillary.plan.memory.estimate.held import Held
from armillary.plan.memory.fit import HOST_RESERVE, RESERVE, Room
from armillary.plan.presets import MOST_RANKS, cluster_of
from armillary.train.build import build_model, precision
from armillary.train.check import check
from armillary.train.config import Config
from armillary.train.parallel import choose_axes
from armillary.train.rows import open_stores, vocabulary_size
from armillary.train.tasks import task_tokens
from armillary.train.tune.choice import with_choice
from armillary.train.tune.question import dtype_name


@dataclass(frozen=True)
class Prediction:
    """A run, as rank 0 will have it.

    Args:
        axes: ranks on each mesh axis.
        cluster: None: the CPU, or machines that nobody named.
        shapes: of a part of a step, by what it is.
        parameters: numbers of the whole model.
        local_parameters: those that rank 0 holds.
        largest: parameters with most numbers.
        memory: by closed formulas; None where these do not hold (tensor parallelism).
        room: bytes that there are; None without a cluster.
        flops: of a step over all ranks.
        seconds: of a step; None without a cluster.
        mfu: that was assumed for this.
        limit: seconds that the configuration allows a step.
    """

    axes: dict[str, int]
    cluster: Cluster | None
    model: LlamaConfig | GPTConfig
    precision: str
    shapes: dict[str, tuple[int, ...]]
    parameters: int
    local_parameters: int
    largest: list[Parameter]
    tokens_per_step: int
    memory: Estimate | None
    room: Room | None
    flops: float
    seconds: float | None
    mfu: float
    limit: float

    @property
    def fits(self) -> bool | None:
        """Whether memory suffices; None where that is not known."""
        if self.memory is None or self.room is None:
            return None
        return self.room.share(self.memory) <= 1


def predict(config: Config, ranks: int | None = None, cluster: str | None = None, mfu: float = 0.4) -> Prediction:
    """What a run of this configuration will be. Needs no process group, GPU or, with a given vocabulary, data.

    Args:
        ranks: by default torchrun's, else the cluster's, else what the axes multiply to.
        cluster: such as "16xh100"; by default as many H100s as ranks, where these fill nodes of 8.
        mfu: share of the peak FLOP/s that is reached.

    Raises:
        ValueError: a configuration that could not be trained, ranks that are not the cluster's, or an mfu that is no
            share.
    """
    check(config)
    if not 0 < mfu <= 1:
        raise ValueError(f"--mfu {mfu}: must be above 0, and at most 1")
    ranks = ranks_of(config, ranks, cluster)
    machines = machines_of(config, ranks, cluster)
    dtype = precision(config, torch.device("cpu" if machines is None else "cuda"))
    config = with_choice(config, ranks, dtype_name(dtype))
    axes = choose_axes(config.parallel, ranks)
    check_axes(axes, ranks)
    with fake_world(**axes) as mesh:
        model, attention = build_model(config, mesh, vocabulary(config), dtype)
    job = job_of(config, axes, model.config, dtype)
    local = sum(local_part(parameter).numel() for parameter in model.parameters())
    tokens = config.data.rows * config.data.sequence_length
    flops = tokens * model.config.flops_per_token(config.data.sequence_length)
    peak = None if machines is None else machines.accelerator.flops
    return Prediction(
        axes=axes,
        cluster=machines,
        model=model.config,
        precision=dtype_name(dtype),
        shapes=shapes_of(job, attention),
        parameters=model.config.parameters(),
        local_parameters=local,
        largest=largest_of(model),
        tokens_per_step=tokens,
        memory=memory_of(config, job, local) if axes["tp"] == 1 else None,
        room=None if machines is None else Room.of(machines, quantity(RESERVE), quantity(HOST_RESERVE)),
        flops=flops,
        seconds=None if peak is None else flops / (ranks * peak * mfu),
        mfu=mfu,
        limit=60 * config.train.timeout_minutes,
    )


def ranks_of(config: Config, ranks: int | None, cluster: str | None) -> int:
    """How many ranks a run is to have."""
    if ranks is None and "WORLD_SIZE" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks is None and cluster is not None:
        return cluster_of(cluster).ranks
    if ranks is None:
        return prod(choose_axes(config.parallel, 1).values())
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: must be at least 1 and at most {MOST_RANKS:,}")
    return ranks


def machines_of(config: Config, ranks: int, cluster: str | None) -> Cluster | None:
    """The cluster that was named, or one that may be meant."""
    if cluster is None:
        return None if ranks % 8 or config.train.device == "cpu" else Cluster.named(f"{ranks}xh100")
    found = cluster_of(cluster)
    if found.ranks != ranks:
        raise ValueError(f"--cluster {cluster} has {found.ranks} ranks, and the run {ranks}; make them the same")
    return found


def vocabulary(config: Config) -> int:
    """V. The data are opened if there are any, or if nothing else tells it."""
    known = config.model.vocab_size if config.model.pretrained is None else 1  # the folder has its own
    if known is not None and not config.data.path:
        return known
    stores = open_stores(config.data, config.model.pretrained)
    return vocabulary_size(stores, config.model, task_tokens(config.data))


def memory_of(config: Config, job: Job, local_parameters: int) -> Estimate:
    """What a step holds. Gradients of earlier parts of it are there all the while, in 4 bytes a number: a bound, since
    some of them are counted in any case."""
    found = estimate(job)
    if config.train.accumulation == 1:
        return found
    more = Held(gradients=4 * local_parameters)
    if job.on_host:
        host = (Held(found.host_breakdown) + more).whole()
        return replace(found, host=sum(host.values()), host_breakdown=host)
    device = (Held(found.device_breakdown) + more).whole()
    return replace(found, device=sum(device.values()), device_breakdown=device)


def job_of(config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, dtype: torch.dtype) -> Job:
    """The step of one rank, as memory is estimated and simulated for."""
    parallel = config.parallel
    return Job(
        model=model,
        axes=axes,
        attention=AttentionChoice(parallel.attention, parallel.heads_per_stage, parallel.team, parallel.placement),
        length=config.data.sequence_length,
        rows=config.rows_per_batch,
        checkpointing=config.checkpointing,
        on_host=config.optimizer.on_host,
        precision=dtype,
    )
