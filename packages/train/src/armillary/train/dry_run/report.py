"""Prints a dry run as tables or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

from armillary.data.console import Column, print_lines, print_table
from armillary.models import GPTConfig
from armillary.train.config.sections import Config
from armillary.train.cuda_setup import CudaSetup
from armillary.train.dry_run.predict import DryRun, dry_run
from armillary.train.kernels import ChosenKernel

PLANNER = "memory and time of a step: armillary-plan run, with these flags and --cluster 8xh100"
INSTALLATION = " (pip install ./packages/plan, in a checkout of the repository)"
"""How to install the planner, which is not a dependency of the trainer."""


def show_dry_run(config: Config, ranks: int | None, as_json: bool) -> None:
    """Prints a dry run on rank 0.

    Raises:
        ValueError: as `dry_run`, on all ranks.
    """
    result = dry_run(config, ranks)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print_dry_run(result)
        if result.cuda is not None:
            print(f"on CUDA: {cuda_line(result.cuda)}")
        print(f"a step: {result.tokens_per_step:,} tokens, {result.flops:.3g} FLOPs")
        print(PLANNER if find_spec("armillary.plan") else PLANNER + INSTALLATION)


def print_dry_run(result: DryRun, location: str = "") -> None:
    """Prints model and mesh, shapes of a micro-batch, the largest parameters, and attention's kernels.

    Args:
        location: text after the precision, such as ", on 8xh100".
    """
    family = "GPT" if isinstance(result.model, GPTConfig) else "LLaMA"
    axes = " x ".join(f"{name} {size}" for name, size in result.axes.items())
    print_lines(f"{family}, {result.parameters:,} parameters, {result.precision}{location}")
    print(f"mesh: {axes} = {result.ranks} {'rank' if result.ranks == 1 else 'ranks'}\n")
    print_table(STEP, ([name, shape_text(shape)] for name, shape in result.shapes.items()))
    print()
    print_table(PARAMETERS, parameter_rows(result))
    print("", *map(kernel_line, result.kernels), "", sep="\n")


def cuda_line(cuda: CudaSetup) -> str:
    """Returns the settings of CUDA and NCCL as a line of text."""
    return ", ".join(
        (
            "allocator as in the environment" if cuda.allocator is None else f"allocator {cuda.allocator}",
            f"device_id {cuda.device_id or 'none'}",
            f"{', '.join(cuda.high_priority) or 'no'} communicators of high priority",
            *([] if cuda.max_ctas is None else [f"max_ctas {cuda.max_ctas}"]),
            f"sm_margin {cuda.sm_margin}",
            f"{cuda.connections} work queues",
        )
    )


STEP = (Column("one rank, one micro-batch", text=True), Column("shape (numbers)"))
PARAMETERS = (
    Column("largest parameters", text=True),
    *map(Column, ("count", "whole (numbers)", "on a rank (numbers)")),
)


def parameter_rows(result: DryRun) -> Iterator[list[str]]:
    """Yields the rows of the table of parameters: the largest ones, an empty row, and the total."""
    for parameter in result.largest:
        yield [parameter.name, str(parameter.count), shape_text(parameter.shape), shape_text(parameter.local)]
    yield []
    yield ["all", "", f"{result.parameters:,}", f"{result.local_parameters:,}"]


def kernel_line(kernel: ChosenKernel) -> str:
    """Returns a line with the kernel on a device, and the reasons against others."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in kernel.rejected.items())
    reasons_text = f" (not {reasons})" if reasons else ""
    return f"attention kernel on {kernel.device}: {kernel.name or 'none'}{reasons_text}"


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
