"""The text of `armillary-check --report`, to be pasted into an issue.

It has only versions, the kind of machine, mesh, method, mask, layout, and the bytes that each rank sends. Paths, names
of hosts and users, environment variables and data are not read.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.cuda import nccl

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import named_method

OWN_PACKAGES = ("core", "attention", "states", "integrations", "check", "data", "models", "train", "plan")
OTHER_PACKAGES = ("torch", "triton", "flash-attn", "transformers", "accelerate", "diffusers", "trl", "peft", "numpy")


def report_of_call(method: str, ring: int, ulysses: int, tokens: int, documents: Sequence[int] | None) -> str:
    """Returns the report on this machine, and on a call of `method` with `tokens` tokens in 16 bits.

    Raises:
        ValueError: the method does not exist or does not divide attention over these axes.
    """
    lines = [*_versions(), *_machine(), ("mesh", f"ring={ring} ulysses={ulysses}"), ("method", method)]
    named, mask = named_method(method), AttentionMask(documents=documents)
    layout = named.layout(tokens, ring, "zigzag", mask)
    kind = "causal" if documents is None else f"causal, {len(documents) - 1} documents"
    lines += [("mask", kind), ("layout", f"zigzag, {tokens} tokens, {', '.join(map(str, layout.sizes))} by shard")]
    # Sizes of LLaMA-3-8B.
    work = AttentionShape.of(layout, mask, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    plan = named.comm_plan(work, ring, ulysses)
    for axis in named.axes:
        for phase in ("forward", "backward"):
            sent = [plan.bytes(rank, phase=phase, axis=axis) for rank in range(ring * ulysses)]
            lines.append((f"{phase} bytes", f"{', '.join(f'{n:,}' for n in sent)} by rank, on {axis}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _versions() -> list[tuple[str, str]]:
    lines = [("python", f"{platform.python_version()} {platform.python_implementation()}")]
    for package in (*[f"armillary-{name}" for name in OWN_PACKAGES], *OTHER_PACKAGES):
        try:
            lines.append((package, version(package)))
        except PackageNotFoundError:
            continue
    nccl_version = ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return [*lines, ("cuda", f"{torch.version.cuda or 'none'}, NCCL {nccl_version}")]


def _machine() -> list[tuple[str, str]]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return [
        ("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        ("devices", devices or "none"),
    ]
