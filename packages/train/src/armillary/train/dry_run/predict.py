"""The model of a run, sharded over its mesh on the meta device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod

import torch

from armillary.core.parts import check_axes, compat
from armillary.models import GPTConfig, LlamaConfig
from armillary.train.build import precision, shard_model
from armillary.train.config.check import check_config
from armillary.train.config.model_sizes import model_config
from armillary.train.config.sections import Config
from armillary.train.cuda_setup import CudaSetup, cuda_setup
from armillary.train.dry_run.shapes import Parameter, largest_parameters, micro_batch_shapes
from armillary.train.kernels import Capability, ChosenKernel, kernels_of
from armillary.train.parallel import choose_axes, mesh_axes
from armillary.train.rows import open_stores, vocabulary_size
from armillary.train.runtime.fake_world import fake_world

MOST_RANKS = 2**14
"""Maximum number of ranks of a dry run, whose time grows with that number."""


@dataclass(frozen=True)
class DryRun:
    """Sizes of a run.

    Args:
        axes: ranks on each mesh axis.
        model: sizes of the model.
        precision: dtype of forward and backward, on GPUs unless the configuration asks for the CPU.
        shapes: shapes of a micro-batch's tensors on rank 0, by name.
        parameters: number of parameters of the model.
        local_parameters: number of parameters in rank 0's shards.
        largest: the largest parameters.
        tokens_per_step: tokens of a step, over all ranks and micro-batches.
        flops: floating-point operations of a step, over all ranks.
        cuda: settings of CUDA and NCCL; None on the CPU.
        kernels: the attention kernel on the run's device; for GPUs on a machine without one, that of each GPU family.
    """

    axes: dict[str, int]
    model: LlamaConfig | GPTConfig
    precision: str
    shapes: dict[str, tuple[int, ...]]
    parameters: int
    local_parameters: int
    largest: list[Parameter]
    tokens_per_step: int
    flops: float
    cuda: CudaSetup | None
    kernels: list[ChosenKernel]

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())


def dry_run(config: Config, ranks: int | None = None, capability: Capability | None = None) -> DryRun:
    """Returns the sizes of a run, from its model sharded on the meta device. Needs no GPU.

    Starts its own fake process group.

    Args:
        ranks: by default torchrun's WORLD_SIZE; without torchrun, the product of the configured axes.
        capability: compute capability of the ranks' GPUs; by default as in `kernels_of`.

    Raises:
        ValueError: the configuration cannot be trained on this number of ranks, or this process has a process group.
    """
    check_config(config)
    axes = checked_axes(config, ranks)
    dtype = precision_of(config)
    # The trainer's own functions shard the model, on a process group that communicates nothing.
    with fake_world(**mesh_axes(config, axes)) as mesh:
        sizes = model_config(config.model, vocabulary(config), config.data.sequence_length)
        model, attention = shard_model(sizes, config, mesh, dtype)
    tokens = config.data.global_batch_size * config.data.sequence_length
    return DryRun(
        axes=axes,
        model=model.config,
        precision=str(dtype).removeprefix("torch."),
        shapes=micro_batch_shapes(config, axes, model.config, attention),
        parameters=model.config.parameters(),
        local_parameters=sum(compat.local_part(parameter).numel() for parameter in model.parameters()),
        largest=largest_parameters(model),
        tokens_per_step=tokens,
        flops=tokens * model.config.flops_per_token(config.data.sequence_length),
        cuda=None if config.train.device == "cpu" else cuda_setup(config, axes["ring"]),
        kernels=kernels_of(config, model.config, dtype, capability),
    )


def precision_of(config: Config) -> torch.dtype:
    """Returns the dtype of forward and backward on GPUs, or on the CPU if the run is configured for the CPU."""
    return precision(config, torch.device("cpu" if config.train.device == "cpu" else "cuda"))


def checked_axes(config: Config, ranks: int | None) -> dict[str, int]:
    """Returns the number of ranks on each mesh axis.

    Args:
        ranks: number of ranks; None: torchrun's WORLD_SIZE, without torchrun the product of the configured axes.

    Raises:
        ValueError: a number of ranks that a dry run does not allow, or that is not the product of the axes.
    """
    if ranks is None:
        # For a single rank `choose_axes` sets all axes that are not configured to 1.
        ranks = int(os.environ.get("WORLD_SIZE", prod(choose_axes(config, 1).values())))
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: must be at least 1 and at most {MOST_RANKS:,}")
    axes = choose_axes(config, ranks)
    check_axes(axes, ranks)
    return axes


def vocabulary(config: Config) -> int:
    """Returns V; 1 if a pretrained folder sets V and no data are configured, because `model_config` ignores it then.

    Opens the data only if their paths are configured, or if neither a flag nor a folder sets V.
    """
    size = config.model.vocab_size if config.model.pretrained is None else 1
    if size is not None and not config.data.path:
        return size
    stores = open_stores(config.data, config.model.pretrained)
    return vocabulary_size(stores, config.model)
