"""What a model of diffusers cannot be, or be called with, where its tokens are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from armillary.attention.context_parallel.packing import axes, gather
from armillary.attention.methods.base import Method
from armillary.core import compat
from armillary.integrations.diffusers.plans import Plan, attention_modules, named

MARK = "armillary_sharded"
"""On all modules that are changed: on a copy of the model, too."""


def check_model(model: nn.Module, plan: Plan, attend: Method) -> None:
    kind = type(model).__name__
    if hasattr(model, MARK):
        raise ValueError(f"this {kind} is parallelized already; call parallelize_diffusers once")
    if attend.shards > 1 and axes(attend) is None:
        raise ValueError(
            f"{type(attend).__name__} does not say which axes its {attend.shards} ranks are on: give it an `axis`, and "
            "`inner` where it is made of another"
        )
    routed = {name: module for pattern in plan.attention for name, module in named(model, pattern)}
    known = routed.keys() | {name for pattern in plan.whole_keys for name, _ in named(model, pattern)}
    if unknown := sorted(attention_modules(model).keys() - known):
        known_ones = ", ".join((*plan.attention, *plan.whole_keys))
        raise ValueError(f"{kind} has attention of an unknown kind, {unknown[0]}; known are {known_ones}")
    for name, module in routed.items():
        check_processor(name, module, plan)
    check_modules(model)


def check_processor(name: str, module: Any, plan: Plan) -> None:
    """Refuses processors that may attend to others than the tokens of their streams."""
    found = type(module.processor)
    if found.__name__ not in plan.processors or not found.__module__.startswith("diffusers."):
        raise ValueError(
            f"{name} has the processor {found.__name__}, whose keys may be others than all ranks' tokens; set "
            f"{' or '.join(plan.processors)}, and leave IP-Adapters and other processors out"
        )


def check_modules(model: nn.Module) -> None:
    """Refuses what makes ranks differ, or looks across the tokens of one rank alone."""
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is under diffusers' enable_parallelism too, which shards it a second time; leave "
            "that out"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p:
            raise ValueError(f"{name} drops {module.p} of what it is given, other parts on each rank; set p=0")
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if type(hook).__module__.rsplit(".", 1)[-1] not in HARMLESS:
                raise ValueError(
                    f"{type(hook).__name__} on {name or type(model).__name__} may decide by the tokens of one rank; "
                    f"remove it (disable_cache()): of diffusers' hooks, {' and '.join(HARMLESS)} will do"
                )


HARMLESS = ("group_offloading", "layerwise_casting")


def check_unchanged(model: nn.Module, changed: Sequence[str]) -> None:
    for name in changed:
        if not hasattr(model.get_submodule(name), MARK):
            raise ValueError(f"{name} was replaced after parallelize_diffusers; add adapters before it")


def check_options(options: Mapping[str, Any] | None, plan: Plan) -> None:
    if others := sorted(set(options or ()) - {"scale"}):
        raise ValueError(f"{plan.options} has {', '.join(others)}; only LoRA's scale is known to hold for each shard")


def learned(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that learn and that each rank has whole: adapters are initialized at random."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not compat.is_dtensor(p)}


def compare_over_ranks(given: Mapping[str, Any], attend: Method) -> None:
    """Refuses tensors and numbers that are not the same, to the bit, on all ranks of `attend`. All must call it.

    Raises:
        ValueError: on every rank, with the names of those that differ.
    """
    if attend.shards == 1:
        return
    found = [(name, x) for name, value in given.items() for x in pytree.tree_leaves(value) if isinstance(x, PLAIN)]
    digests: dict[int, list[int]] = {}
    for i, digest in gather([[i, _digest(x)] for i, (_, x) in enumerate(found)], attend):
        digests.setdefault(i, []).append(digest)
    differ = [i for i, of_ranks in digests.items() if len(set(of_ranks)) > 1 or len(of_ranks) < attend.shards]
    if differ:
        names = sorted({found[i][0] if i < len(found) else "arguments of other ranks" for i in differ})
        raise ValueError(
            f"{', '.join(names)}: not the same on all {attend.shards} ranks, which share each image. Give every rank "
            "the same batch, noise, timesteps and weights, drawn with one seed or broadcast"
        )


PLAIN = (Tensor, int, float, str)


def _digest(x: Tensor | int | float | str) -> int:
    """A number that is another, as good as surely, for other contents, shape or dtype."""
    if not isinstance(x, Tensor):
        content = repr(x).encode()
    else:
        bits = x.detach().contiguous().flatten().view(torch.uint8).to("cpu", copy=True)  # NumPy keeps hold of storages
        content = f"{tuple(x.shape)} {x.dtype} ".encode() + bits.numpy().tobytes()
    return int.from_bytes(blake2b(content, digest_size=7).digest(), "big")
