"""`armillary-train --dry-run`: mesh, shards and shapes of a run. For memory and time see armillary-plan."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from math import prod

import torch

from armillary.attention import Method
from armillary.attention.internal import FAMILIES, Inputs, choose_kernel, kernel_candidates
from armillary.attention.plans import head_stages
from armillary.core.internal import compat
from armillary.core.testing import fake_world
from armillary.data.console import Column, flag_in_errors, print_lines, print_table
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig
from armillary.train.axes import choose_axes, mesh_axes
from armillary.train.build import open_stores, precision, shard_model, vocabulary_size
from armillary.train.config.check import check_config, model_config
from armillary.train.config.sections import Config
from armillary.train.device import CudaSetup, cuda_setup, inputs_of

# Maximum number of ranks of a dry run, whose time grows with that number.
MOST_RANKS = 2**14
# Number of parameters in the table of the largest.
SHOWN_PARAMETERS = 6
# Compute capability of a GPU, (major, minor).
Capability = tuple[int, int]
# Compute capabilities that a dry run shows on a machine without a GPU.
DRY_RUN_CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
STEP = (Column("one rank, one micro-batch", text=True), Column("shape (numbers)"))
PARAMETERS = (
    Column("largest parameters", text=True),
    *map(Column, ("count", "whole (numbers)", "on a rank (numbers)")),
)
PLANNER = "memory and time of a step: armillary-plan run, with these flags and --cluster 8xh100"
# How to install the planner, which is not a dependency of the trainer.
INSTALLATION = " (pip install ./packages/plan, in a checkout of the repository)"


@dataclass(frozen=True)
class Parameter:
    """A parameter, or `count` of equal name and shape in as many blocks, whose numbers are * in the name."""

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that runs on one kind of device, None if the requested one cannot; reasons against faster ones."""

    device: str
    name: str | None
    rejected: dict[str, str]


@dataclass(frozen=True)
class DryRun:
    """Sizes of a run.

    Args:
        axes: ranks on each mesh axis.
        precision: dtype of forward and backward, on GPUs unless the configuration asks for the CPU.
        shapes: shapes of a micro-batch's tensors on rank 0, by name.
        local_parameters: number of parameters in rank 0's shards.
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
    """Returns the sizes of a run, from its model sharded on the meta device. Starts its own fake process group.

    Args:
        ranks: by default torchrun's WORLD_SIZE; without torchrun, the product of the configured axes.
        capability: compute capability of the ranks' GPUs; by default as in `kernels_of`.

    Raises:
        ValueError: the configuration cannot be trained on this number of ranks, or this process has a process group.
    """
    check_config(config)
    # 1. The mesh. For a single rank `choose_axes` sets all axes that are not configured to 1.
    if ranks is None:
        ranks = int(os.environ.get("WORLD_SIZE", prod(choose_axes(config, 1).values())))
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: must be at least 1 and at most {MOST_RANKS:,}")
    axes = choose_axes(config, ranks)
    if (product := prod(axes.values())) != ranks:
        cp = "" if config.parallel.cp is None else f"--parallel.cp {config.parallel.cp}: "
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise ValueError(
            f"{cp}{sizes} = {product} ranks, but --ranks {ranks} is given; make the axes multiply to {ranks}, or give "
            f"--ranks {product}"
        )
    # 2. The vocabulary. The data are opened only if their paths are configured, or nothing else sets its size. With a
    # pretrained folder, which states the size, `model_config` ignores this one.
    vocabulary = config.model.vocab_size if config.model.pretrained is None else 1
    if vocabulary is None or config.data.path:
        vocabulary = vocabulary_size(open_stores(config.data, config.model.pretrained), config.model)
    # 3. The model. The trainer's own functions shard it, on a process group that communicates nothing.
    sizes, dtype = model_config(config.model, vocabulary, config.data.sequence_length), precision_of(config)
    with fake_world(**mesh_axes(config, axes)) as mesh:
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
    return precision(config, torch.device("cpu" if config.train.device == "cpu" else "cuda"))


def micro_batch_shapes(
    config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, attention: Method
) -> dict[str, tuple[int, ...]]:
    rows, tp, ulysses = config.rows_per_batch, axes["tp"], axes["ulysses"]
    with flag_in_errors("--data.sequence-length"):  # fewer tokens than shards
        layout = attention.layout(config.data.sequence_length)
    tokens = layout.sizes[attention.shard]
    shapes = {
        "tokens": (rows, tokens),
        "hidden": (rows, -(-tokens // tp), model.dim),  # between blocks, rank 0 of tp has every tp-th token
        "queries": (rows, tokens, model.heads // tp, model.head_dim),
    }
    if isinstance(model, LlamaConfig) and (latent := model.latent) is not None:
        shapes |= {"rotary keys": (rows, tokens, latent.rotary_dim), "latents": (rows, tokens, latent.rank)}
    else:
        shapes["keys, values"] = (rows, tokens, model.kv_heads // tp, model.head_dim)
    # Ulysses and UPipe attend with more tokens and fewer heads. `head_stages` knows no tensor parallelism.
    if tp == 1 and ulysses > 1:
        stage = head_stages(model.heads, model.kv_heads, ulysses, getattr(attention, "heads_per_stage", None))
        attended_tokens = layout.coarsen(ulysses).sizes[attention.shard // ulysses]  # shards may have unequal sizes
        shapes["queries in attention"] = (rows, attended_tokens, stage.queries, model.head_dim)
        shapes["keys in attention"] = (rows, attended_tokens, stage.keys, model.head_dim)
    return shapes


def largest_parameters(model: Llama | GPT) -> list[Parameter]:
    counts = Counter(  # one entry stands for the same parameter in all blocks
        (re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), tuple(compat.local_part(parameter).shape))
        for name, parameter in model.named_parameters()
    )
    entries = [Parameter(name, count, shape, local) for (name, shape, local), count in counts.items()]
    return sorted(entries, key=lambda p: -p.count * prod(p.shape))[:SHOWN_PARAMETERS]


def kernels_of(
    config: Config, model: LlamaConfig | GPTConfig, dtype: torch.dtype, capability: Capability | None = None
) -> list[ChosenKernel]:
    """Returns the attention kernel on each device of a dry run, with the reasons against faster kernels.

    The GPU has this capability; by default that of this machine's GPU, without one each of `DRY_RUN_CAPABILITIES`.
    """
    if config.train.device == "cpu":
        return [_explain_choice(inputs_of(config, model, dtype, torch.device("cpu")), config.parallel.kernel)]
    # A kernel's package, such as flash-attn, counts as installed if it is installed on this machine.
    inputs = inputs_of(config, model, dtype, torch.device("cuda"))
    known_capability = inputs.capability if capability is None else capability
    return [
        _explain_choice(replace(inputs, capability=each), config.parallel.kernel)
        for each in ([known_capability] if known_capability else DRY_RUN_CAPABILITIES)
    ]


def _explain_choice(inputs: Inputs, requested_kernel: str | None) -> ChosenKernel:
    device = inputs.device
    if inputs.capability is not None:
        number = ".".join(map(str, inputs.capability))
        device = f"compute capability {number} ({FAMILIES.get(inputs.capability[0], 'newer')})"
    # Candidates for this type of device by name, the most preferred first.
    candidates = {
        c.kernel.name: c for c in kernel_candidates(inputs) if c.kernel.limits.device in (None, inputs.device)
    }
    if requested_kernel is not None:
        candidate = candidates.get(requested_kernel)
        refusal = "of another device" if candidate is None else candidate.refusal
        if refusal is not None:
            return ChosenKernel(device, None, {requested_kernel: refusal})
        return ChosenKernel(device, requested_kernel, {})
    chosen_name = choose_kernel(inputs).name
    preferred = takewhile(lambda name: name != chosen_name, candidates)
    return ChosenKernel(device, chosen_name, {name: candidates[name].reason for name in preferred})


# -- output -----------------------------------------------------------------------------------------------------------


def show_dry_run(config: Config, ranks: int | None, as_json: bool) -> None:
    """Prints a dry run on rank 0, as tables or JSON. Raises as `dry_run`, on all ranks."""
    result = dry_run(config, ranks)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    print_dry_run(result)
    if (cuda := result.cuda) is not None:
        settings = [
            "allocator as in the environment" if cuda.allocator is None else f"allocator {cuda.allocator}",
            f"device_id {cuda.device_id or 'none'}",
            f"{', '.join(cuda.high_priority) or 'no'} communicators of high priority",
            *([] if cuda.max_ctas is None else [f"max_ctas {cuda.max_ctas}"]),
            f"sm_margin {cuda.sm_margin}",
            f"{cuda.connections} work queues",
        ]
        print(f"on CUDA: {', '.join(settings)}")
    print(f"a step: {result.tokens_per_step:,} tokens, {result.flops:.3g} FLOPs")
    print(PLANNER if find_spec("armillary.plan") else PLANNER + INSTALLATION)


def print_dry_run(result: DryRun, location: str = "") -> None:
    """Prints mesh, shapes, largest parameters and kernels, with `location` after the precision: ", on 8xh100"."""

    def text(shape: tuple[int, ...]) -> str:
        return " x ".join(f"{size:,}" for size in shape)

    family = "GPT" if isinstance(result.model, GPTConfig) else "LLaMA"
    print_lines(f"{family}, {result.parameters:,} parameters, {result.precision}{location}")
    axes = " x ".join(f"{name} {size}" for name, size in result.axes.items())
    print(f"mesh: {axes} = {result.ranks} {'rank' if result.ranks == 1 else 'ranks'}\n")
    print_table(STEP, [(name, text(shape)) for name, shape in result.shapes.items()])
    print()
    largest = [(each.name, str(each.count), text(each.shape), text(each.local)) for each in result.largest]
    total = ("all", "", f"{result.parameters:,}", f"{result.local_parameters:,}")
    print_table(PARAMETERS, [*largest, (), total])
    print()
    for kernel in result.kernels:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in kernel.rejected.items())
        print(f"attention kernel on {kernel.device}: {kernel.name or 'none'}{reasons and f' (not {reasons})'}")
    print()
