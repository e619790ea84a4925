"""Checks of a diffusers model before its tokens are sharded, and of the arguments of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from armillary.attention import Method
from armillary.core.parts import compat
from armillary.integrations.diffusers.plans import Plan, attention_modules, find_modules
from armillary.integrations.inputs import unequal_values

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
    """Raises ValueError on every rank, with the names of arguments that are not equal on all ranks.

    Bytes sent: those of `unequal_values`. Every rank of the method must call it.
    """
    if names := sorted(unequal_values(arguments, method)):
        raise ValueError(
            f"{', '.join(names)}: not the same on all {method.shards} ranks, which share each image. Give every rank "
            "the same batch, noise, timesteps and weights, drawn with one seed or broadcast"
        )
