"""`prepare_diffusers`: shards the tokens of a diffusers transformer inside its forward.

Callers pass whole tensors and get the whole output. Hooks on the modules of a `Plan` shard the arguments and results of
the first modules, route attention, and gather the output. A model is checked when it is prepared and again, with its
arguments, at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from armillary.attention import ContextParallel, Method
from armillary.attention.internal import RankComparison, describe_unequal, unbound
from armillary.core.internal import check_tensor, compat
from armillary.integrations.diffusers.streams import (
    KEEPS_STREAMS,
    ForwardState,
    JointRouting,
    Plan,
    Split,
    Streams,
    changed_modules,
    find_modules,
    keep_streams,
)
from armillary.integrations.versions import check_version

Hook = Callable[..., Any]

# Attribute of every module that `prepare_diffusers` changed. A copy of the model has it too.
MARK = "armillary_sharded"

# Modules of diffusers.hooks whose hooks do not read activations.
HARMLESS = ("group_offloading", "layerwise_casting")


def prepare_diffusers(model: nn.Module, cp: ContextParallel, *, compare: bool = True) -> None:
    """Shards the tokens of a transformer of diffusers inside the model, in place; `ContextParallel.prepare` calls it.

        cp = ContextParallel("token_ring", mesh)
        cp.prepare(model)  # FluxTransformer2DModel, or a pipeline's `transformer`
        for block in (*model.transformer_blocks, *model.single_transformer_blocks, model):
            fully_shard(block, mesh=ranks)

        loss = F.mse_loss(model(noisy, ...).sample, target)  # whole tensors in, the whole output out, on every rank
        loss.backward()  # FSDP2 and DDP average: gradients are those of the whole loss

    The model is called as on one device: every rank passes the same whole tensors (images, noise, timesteps, text) and
    gets the whole output, and so the whole loss. Gradients are right after averaging over ranks, by FSDP2, DDP or
    `cp.reduce_gradients(model)`; those of inputs are averaged with `dist.all_reduce`.

    Flux and SD3 attend to image and text together; Qwen-Image leaves padding of the text out
    (`encoder_hidden_states_mask`, ones and then zeros); Wan attends to the tokens of the video, and each rank has all
    keys of the text (and of a first image). A text may have any number of tokens; an image needs at least one per rank.

    Gradient checkpointing is the model's own, `model.enable_gradient_checkpointing()`. Add adapters (LoRA) before,
    FSDP2 and torch.compile after. The method chooses kernels: do not use diffusers' attention backends or its own
    context parallelism (`enable_parallelism`).

    Bytes sent, beside those of the method: the output's `all_gather`, its gradient's `reduce_scatter`, and an
    `all_gather` of 8 for each compared value and 8 more, on one axis after another.

    Args:
        compare: True: ranks compare the arguments of every call, and at the first call their trained parameters that
            are no DTensors, by digests that are computed on their device.

    Raises:
        ValueError: a release of diffusers that is not tested; a model of another class, or with attention of another
            kind (IP-Adapter); a model that is prepared already. Then and at a call: dropout in training; diffusers'
            `enable_parallelism`; its caches and other hooks that read the tokens of one rank. At a call: another
            attention backend of diffusers; a text mask that hides tokens before visible ones, or has another length;
            options for processors other than LoRA's scale; tensors that are not whole; fewer image tokens than ranks; a
            processor or module that was replaced; arguments that differ between ranks; a block that runs outside of the
            model's forward.
    """
    check_version("diffusers")
    plan, state = Plan.of(model), ForwardState(cp.method)
    _check_model(model, plan)
    # Arguments of the model itself (the empty pattern) are sharded by `_wrap_forward`.
    for pattern, splits in plan.arguments.items():
        for _, module in find_modules(model, pattern) if pattern else []:
            module.register_forward_pre_hook(_shard_arguments_hook(module, splits, state), with_kwargs=True)
    for pattern, splits in plan.results.items():
        for _, module in find_modules(model, pattern):
            module.register_forward_hook(_shard_results_hook(splits, state))
    for pattern, order in plan.attention.items():
        for name, module in find_modules(model, pattern):
            _route_attention(name, module, JointRouting(state, order), plan)
    for _, module in find_modules(model, plan.output):
        module.register_forward_hook(_gather_hook(state))
    # Hooks stay on a model's copies. The mark on each module shows at a call whether the module was replaced since.
    for _, module in changed_modules(model, plan):
        setattr(module, MARK, True)
    _wrap_forward(model, plan, state, compare)


def _wrap_forward(model: nn.Module, plan: Plan, state: ForwardState, compare: bool) -> None:
    """Wraps the model's forward: checks whole arguments, shards them, and runs the modules with their streams."""
    forward, names = unbound(model.forward), _parameter_names(model)
    changed_names = [name for name, _ in changed_modules(model, plan)]

    @torch.compiler.disable  # it communicates
    def check_and_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Streams, Any, Any]:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # 1. The modules are those that were prepared, and read no tokens in other ways.
        for name in changed_names:
            if not hasattr(module.get_submodule(name), MARK):
                raise ValueError(f"{name} was replaced after cp.prepare; add adapters before it")
        _check_modules(module)
        if unsupported := sorted(set(arguments.get(plan.options) or ()) - {"scale"}):
            raise ValueError(f"{plan.options} has {', '.join(unsupported)}; only LoRA's scale is supported on shards")
        # 2. Ranks have the same arguments, and the same replicated parameters that are trained, such as adapters, which
        # each rank may initialize differently. Once is enough for these: equal gradients keep them equal.
        if compare:
            parameters = [] if state.compared_weights else module.named_parameters()
            weights = {name: p for name, p in parameters if p.requires_grad and not compat.is_dtensor(p)}
            # The names first: ranks compare as many values.
            values = {name: arguments.get(name) for name in names}
            _compare({**values, "names of trained parameters": list(weights)}, state.method)
            _compare(weights, state.method)
        state.compared_weights = True
        # 3. The streams, and this rank's pieces of the arguments. Padding of the text is in the streams' documents.
        streams = _make_streams(module, arguments, plan, state.method)
        splits: dict[str, Split | None] = {**plan.arguments.get("", {})}
        if plan.text_mask:
            splits[plan.text_mask] = None
        # 4. diffusers may set its checkpointing function at any time before the call.
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not hasattr(checkpoint, KEEPS_STREAMS):
            module._gradient_checkpointing_func = keep_streams(checkpoint, state)  # pyright: ignore[reportArgumentType]
        return streams, *_sharded(names, args, kwargs, splits, streams)

    @wraps(forward)
    def forward_on_shards(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # pyright does not know that `disable` keeps the signature.
        streams, args, kwargs = check_and_shard(module, args, kwargs)  # pyright: ignore[reportCallIssue]
        with state.running(streams):
            return forward(module, *args, **kwargs)

    model.forward = MethodType(torch.compiler.disable(forward_on_shards, recursive=False), model)


def _make_streams(model: Any, arguments: Mapping[str, Any], plan: Plan, method: Method) -> Streams:
    """Returns the streams of a call, from the shapes of its arguments: tokens [B, N, C], or an image cut in patches."""
    image: Any = arguments.get("hidden_states")
    text: Any = arguments.get("encoder_hidden_states")
    check_tensor("hidden_states", image)
    check_tensor("encoder_hidden_states", text)
    tokens = image.shape[1]
    if image.ndim > 3:  # [B, C, (frames,) height, width]
        size, patch = image.shape[2:], model.config.patch_size
        patch = patch if isinstance(patch, Sequence) else [patch] * len(size)
        tokens = prod(length // step for length, step in zip(size, patch, strict=True))
    mask = arguments.get(plan.text_mask) if plan.text_mask else None
    return Streams(method, tokens, text.shape[1], plan.attention.values(), mask)


def _compare(values: Mapping[str, Any], method: Method) -> None:
    """Raises ValueError on every rank if ranks have different values."""
    if method.shards > 1 and values and (unequal := RankComparison(values, method).unequal):
        raise ValueError(
            f"{describe_unequal(unequal)}: not the same on all {method.shards} ranks, which share each image. Give "
            "every rank the same batch, noise, timesteps and weights, drawn with one seed or broadcast"
        )


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(signature(type(module).forward).parameters)[1:]


def _sharded(
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    splits: Mapping[str, Split | None],
    streams: Streams,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, with this rank's pieces of those that have a split; None for a split None."""

    def take(name: str, x: Any) -> Any:
        if name not in splits:
            return x
        split = splits[name]
        return None if split is None else streams.take(split, x)

    positional = [take(name, x) for name, x in zip(names, args, strict=False)]
    return (*positional, *args[len(names) :]), {name: take(name, x) for name, x in kwargs.items()}


# Hooks are functions and not objects, because a copy of a model must share the state with its copied forward.


def _shard_arguments_hook(module: nn.Module, splits: Mapping[str, Split], state: ForwardState) -> Hook:
    names = _parameter_names(module)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _sharded(names, args, kwargs, splits, state.streams())

    return hook


def _shard_results_hook(splits: tuple[Split, ...], state: ForwardState) -> Hook:

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        streams = state.streams()
        if isinstance(out, Tensor):
            return streams.take(splits[0], out)
        return tuple(streams.take(split, x) for split, x in zip(splits, out, strict=True))

    return hook


def _gather_hook(state: ForwardState) -> Hook:

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return state.streams().gather(out)

    return hook


def _route_attention(name: str, module: Any, routing: JointRouting, plan: Plan) -> None:
    """Wraps a module's forward, so that its attention is over all tokens of its streams."""
    forward = unbound(module.forward)

    @wraps(forward)
    def forward_on_shards(module: Any, *args: Any, **kwargs: Any) -> Any:
        _check_processor(name, module, plan)
        routing.used, routing.unrouted = False, ""
        with routing:
            out = forward(module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            routing.check_used(f"{name}, which needs diffusers' native attention backend,")
        return out

    module.forward = MethodType(forward_on_shards, module)


def _check_model(model: nn.Module, plan: Plan) -> None:
    kind = type(model).__name__
    if hasattr(model, MARK):
        raise ValueError(f"this {kind} is prepared already; call cp.prepare once")
    routed = {name: module for pattern in plan.attention for name, module in find_modules(model, pattern)}
    supported = routed.keys() | {name for pattern in plan.whole_keys for name, _ in find_modules(model, pattern)}
    # Attention outside of the plan would attend to this rank's tokens alone.
    if unknown := sorted({name for name, x in model.named_modules() if hasattr(x, "get_processor")} - supported):
        patterns = ", ".join((*plan.attention, *plan.whole_keys))
        raise ValueError(f"{kind} has attention of an unknown kind, {unknown[0]}; {patterns} are supported")
    for name, module in routed.items():
        _check_processor(name, module, plan)
    _check_modules(model)


def _check_processor(name: str, module: Any, plan: Plan) -> None:
    # Another processor may attend to more than the tokens of its streams.
    processor = type(module.processor)
    if processor.__name__ not in plan.processors or not processor.__module__.startswith("diffusers."):
        raise ValueError(
            f"{name} has the processor {processor.__name__}, which may add keys of its own; set "
            f"{' or '.join(plan.processors)}, without IP-Adapters"
        )


def _check_modules(model: nn.Module) -> None:
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
