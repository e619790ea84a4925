"""Showing a dry run: tables for people, JSON for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from armillary.attention.kernels.choice import ChosenKernel
from armillary.data.console.table import Column, print_table
from armillary.models import GPTConfig
from armillary.train.config import Config
from armillary.train.cuda_setup import CudaSetup
from armillary.train.dry_run.predict import DryRun, dry_run

PLANNER = (
    "memory and time of a step: armillary-plan run, with these flags and --cluster 8xh100 (pip install armillary-plan)"
)


def show_dry_run(config: Config, ranks: int | None, as_json: bool) -> None:
    """Prints what `dry_run` finds, on the first of torchrun's ranks.

    Raises:
        ValueError: as `dry_run`, on all of them.
    """
    found = dry_run(config, ranks)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found)
        if found.cuda is not None:
            print(f"on CUDA: {asked(found.cuda)}")
        print(f"a step: {found.tokens_per_step:,} tokens, {found.flops:.3g} FLOPs", PLANNER, sep="\n")


def show(found: DryRun, where: str = "") -> None:
    """Prints model and mesh, shapes of a step, parameters, and attention's kernel.

    Args:
        where: on which machines.
    """
    family = "GPT" if isinstance(found.model, GPTConfig) else "LLaMA"
    axes = " x ".join(f"{name} {size}" for name, size in found.axes.items())
    print(f"{family}, {found.parameters:,} parameters, {found.precision}{where}")
    print(f"mesh: {axes} = {found.ranks} {'rank' if found.ranks == 1 else 'ranks'}\n")
    print_table(STEP, ([name, shown(shape)] for name, shape in found.shapes.items()))
    print()
    print_table(PARAMETERS, parameters(found))
    print("", *map(kernel_line, found.kernels), "", sep="\n")


def asked(cuda: CudaSetup) -> str:
    """What is asked of CUDA and NCCL, for people."""
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


def parameters(found: DryRun) -> Iterator[list[str]]:
    for parameter in found.largest:
        yield [parameter.name, str(parameter.count), shown(parameter.shape), shown(parameter.local)]
    yield []
    yield ["all", "", f"{found.parameters:,}", f"{found.local_parameters:,}"]


def kernel_line(kernel: ChosenKernel) -> str:
    """The kernel on a device, and why it is not another."""
    why = "; ".join(f"{name}: {reason}" for name, reason in kernel.rejected.items())
    not_others = f" (not {why})" if why else ""
    return f"attention kernel on {kernel.device}: {kernel.name or 'none'}{not_others}"


def shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
