"""`prepare_diffusers`: shards the tokens of a diffusers transformer inside its forward.

Callers pass whole tensors and get the whole output. Hooks on the modules of a `Plan` shard the arguments and results of
the first modules, route attention, and gather the output.
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
from armillary.attention.parts import unbound
from armillary.core.parts import check_tensor
from armillary.integrations.diffusers.checks import (
    MARK,
    check_equal_over_ranks,
    check_model,
    check_modules,
    check_options,
    check_processor,
    check_unchanged,
    trained_parameters,
)
from armillary.integrations.diffusers.plans import Plan, Split, changed_modules, find_modules
from armillary.integrations.diffusers.streams import (
    KEEPS_STREAMS,
    ForwardState,
    JointRouting,
    Streams,
    keep_streams,
)

Hook = Callable[..., Any]


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
    keys of the text (and of a first image). Any number of tokens is accepted; an image needs at least one per rank.

    Gradient checkpointing is the model's own, `model.enable_gradient_checkpointing()`. Add adapters (LoRA) before,
    FSDP2 and torch.compile after. The method chooses kernels: do not use diffusers' attention backends or its own
    context parallelism (`enable_parallelism`).

    Bytes sent, beside those of the method: the output's `all_gather`, its gradient's `reduce_scatter`, and a
    `gather_integers` of three integers for each compared value.

    Args:
        compare: True: ranks compare the arguments of every call, and at the first call their trained parameters that
            are no DTensors. This copies all of these tensors to the host.

    Raises:
        ValueError: a model of another class, or with attention of another kind (IP-Adapter); a model that is prepared
            already. Then and at a call: dropout in training; diffusers' `enable_parallelism`; its caches and other
            hooks that read the tokens of one rank. At a call: another attention backend of diffusers; a text mask that
            hides tokens before visible ones, or has another length; options for processors other than LoRA's scale;
            tensors that are not whole; fewer image tokens than ranks; a processor or module that was replaced;
            arguments that differ between ranks; a block that runs outside of the model's forward.
    """
    plan, state = Plan.of(model), ForwardState(cp.method)
    check_model(model, plan)
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
    """Wraps the model's forward: checks whole arguments, shards them, and runs the modules with their streams.

    The wrapper is never part of a compiled graph.
    """
    forward, names = unbound(model.forward), _parameter_names(model)
    changed_names = [name for name, _ in changed_modules(model, plan)]

    @torch.compiler.disable
    def check_and_shard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Streams, Any, Any]:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        check_unchanged(module, changed_names)
        check_modules(module)
        check_options(arguments.get(plan.options), plan)
        if compare:
            weights = {} if state.compared_weights else trained_parameters(module)
            check_equal_over_ranks({**arguments, **weights}, state.method)
        state.compared_weights = True  # once is enough: equal gradients keep weights equal
        streams = _make_streams(module, arguments, plan, state.method)
        # diffusers may set its checkpointing function at any time before the call.
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not hasattr(checkpoint, KEEPS_STREAMS):
            module._gradient_checkpointing_func = keep_streams(checkpoint, state)  # pyright: ignore[reportArgumentType]
        changes = {name: _shard_function(split, streams) for name, split in plan.arguments.get("", {}).items()}
        if plan.text_mask:
            changes[plan.text_mask] = lambda _: None  # padding is in the documents of the streams
        return streams, *_change_arguments(names, args, kwargs, changes)

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


def _shard_function(split: Split, streams: Streams) -> Callable[[Any], Any]:
    return lambda value: streams.take(split, value)


def _shard_arguments_hook(module: nn.Module, splits: Mapping[str, Split], state: ForwardState) -> Hook:
    """Returns a pre-forward hook that replaces whole arguments by this rank's pieces."""
    names = _parameter_names(module)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        streams = state.streams()
        changes = {name: _shard_function(split, streams) for name, split in splits.items()}
        return _change_arguments(names, args, kwargs, changes)

    return hook


def _shard_results_hook(splits: tuple[Split, ...], state: ForwardState) -> Hook:
    """Returns a forward hook that replaces whole results by this rank's pieces."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        streams = state.streams()
        if isinstance(out, Tensor):
            return streams.take(splits[0], out)
        return tuple(streams.take(split, x) for split, x in zip(splits, out, strict=True))

    return hook


def _gather_hook(state: ForwardState) -> Hook:
    """Returns a forward hook that replaces this rank's piece of the image by the whole image."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return state.streams().gather(out)

    return hook


def _route_attention(name: str, module: Any, routing: JointRouting, plan: Plan) -> None:
    """Wraps a module's forward, so that its attention is over all tokens of its streams."""
    forward = unbound(module.forward)

    @wraps(forward)
    def forward_on_shards(module: Any, *args: Any, **kwargs: Any) -> Any:
        check_processor(name, module, plan)
        routing.used, routing.unrouted = False, ""
        with routing:
            out = forward(module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            routing.check_used(f"{name}, which needs diffusers' native attention backend,")
        return out

    module.forward = MethodType(forward_on_shards, module)


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters of a module's forward."""
    return tuple(signature(type(module).forward).parameters)[1:]


def _change_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[str, Callable[[Any], Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call. Each function in `changes` is applied to the argument of its name, if passed."""
    positional, kwargs = list(args), dict(kwargs)
    for name, change in changes.items():
        if name in kwargs:
            kwargs[name] = change(kwargs[name])
        elif (index := names.index(name)) < len(args):
            positional[index] = change(args[index])
    return tuple(positional), kwargs
