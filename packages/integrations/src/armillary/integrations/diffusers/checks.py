"""Checks of a diffusers model before its tokens are sharded, and of the arguments of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from armillary.attention import Method
from armillary.attention.parts import gather_integers
from armillary.core.parts import compat
from armillary.integrations.diffusers.plans import Plan, attention_modules, find_modules

MARK = "armillary_sharded"
"""Attribute of every module that `prepare_diffusers` changed. A copy of the model has it too."""


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError for a model that is prepared already, or has attention outside of its plan."""
    kind = type(model).__name__
    if hasattr(model, MARK):
        raise ValueError(f"this {kind} is prepared already; call cp.prepare once")
    routed = {name: module for pattern in plan.attention for name, module in find_modules(model, pattern)}
    supported = routed.keys() | {name for pattern in plan.whole_keys for name, _ in find_modules(model, pattern)}
    # Attention outside of the plan would attend to this rank's tokens alone.
    if unknown := sorted(attention_modules(model).keys() - supported):
        patterns = ", ".join((*plan.attention, *plan.whole_keys))
        raise ValueError(f"{kind} has attention of an unknown kind, {unknown[0]}; {patterns} are supported")
    for name, module in routed.items():
        check_processor(name, module, plan)
    check_modules(model)


def check_processor(name: str, module: Any, plan: Plan) -> None:
    """Raises ValueError for processors that may attend to more than the tokens of their streams."""
    processor = type(module.processor)
    if processor.__name__ not in plan.processors or not processor.__module__.startswith("diffusers."):
        raise ValueError(
            f"{name} has the processor {processor.__name__}, which may add keys of its own; set "
            f"{' or '.join(plan.processors)}, without IP-Adapters"
        )


def check_modules(model: nn.Module) -> None:
    """Raises ValueError for dropout in training, diffusers' own parallelism, and hooks that may read local tokens."""
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is under diffusers' enable_parallelism too, which shards it a second time; remove "
            "that call"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p:
            raise ValueError(f"{name} has dropout {module.p}, which draws other numbers on each rank; set p=0")
        # Caches compare activations between steps, and would skip blocks on some ranks only.
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if type(hook).__module__.rsplit(".", 1)[-1] not in HARMLESS:
                raise ValueError(
                    f"{type(hook).__name__} on {name or type(model).__name__} may decide by the tokens of one rank; "
                    f"remove it (disable_cache()): of diffusers' hooks, {' and '.join(HARMLESS)} are supported"
                )


HARMLESS = ("group_offloading", "layerwise_casting")
"""Modules of diffusers.hooks whose hooks do not read activations."""


def check_unchanged(model: nn.Module, names: Sequence[str]) -> None:
    """Raises ValueError if a module that `prepare_diffusers` changed was replaced."""
    for name in names:
        if not hasattr(model.get_submodule(name), MARK):
            raise ValueError(f"{name} was replaced after cp.prepare; add adapters before it")


def check_options(options: Mapping[str, Any] | None, plan: Plan) -> None:
    """Raises ValueError for options of attention processors, other than LoRA's scale."""
    if unsupported := sorted(set(options or ()) - {"scale"}):
        raise ValueError(f"{plan.options} has {', '.join(unsupported)}; only LoRA's scale is supported on shards")


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns trained parameters that are replicated, such as adapters, which each rank may initialize differently."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not compat.is_dtensor(p)}


def check_equal_over_ranks(arguments: Mapping[str, Any], method: Method) -> None:
    """Raises ValueError unless tensors, numbers and strings are equal, to the bit, on all ranks of a method.

    Bytes sent: a `gather_integers` of two integers for each value. Every rank of the method must call it.

    Raises:
        ValueError: on every rank, with the names of arguments that differ.
    """
    if method.shards == 1:
        return
    values = [(name, x) for name, value in arguments.items() for x in pytree.tree_leaves(value) if isinstance(x, PLAIN)]
    # 56-bit hashes fit into int64, so one gather of integers compares values of any type.
    digests: dict[int, list[int]] = {}
    for i, digest in gather_integers([[i, _digest(x)] for i, (_, x) in enumerate(values)], method):
        digests.setdefault(i, []).append(digest)
    # A rank that was passed fewer values has sent fewer digests.
    different = [i for i, ranks in digests.items() if len(set(ranks)) > 1 or len(ranks) < method.shards]
    if different:
        names = sorted({values[i][0] if i < len(values) else "arguments of other ranks" for i in different})
        raise ValueError(
            f"{', '.join(names)}: not the same on all {method.shards} ranks, which share each image. Give every rank "
            "the same batch, noise, timesteps and weights, drawn with one seed or broadcast"
        )


PLAIN = (Tensor, int, float, str)
"""Types of arguments that are compared."""


def _digest(x: Tensor | int | float | str) -> int:
    """Returns a hash of contents, shape and dtype."""
    if not isinstance(x, Tensor):
        content = repr(x).encode()
    else:
        # A copy, because NumPy keeps the storage of the tensor that it views.
        bits = x.detach().contiguous().flatten().view(torch.uint8).to("cpu", copy=True)
        content = f"{tuple(x.shape)} {x.dtype} ".encode() + bits.numpy().tobytes()
    return int.from_bytes(blake2b(content, digest_size=7).digest(), "big")
