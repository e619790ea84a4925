"""Transformers of diffusers (Flux, Qwen-Image, SD3, Wan) whose tokens are sharded over ranks, called as on one device.

Whole tensors go in and come out. Between, each rank has a piece of the image's tokens and one of the text's: a `Plan`
says where they are cut. Nothing there is causal, so that each token may have any position as long as all keys are seen.
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

from armillary.attention.context_parallel.sdpa import unbound
from armillary.attention.context_parallel.sequence import check_method
from armillary.attention.methods.base import Method
from armillary.core.validation import check_tensor
from armillary.integrations.diffusers.checks import (
    MARK,
    check_model,
    check_modules,
    check_options,
    check_processor,
    check_unchanged,
    compare_over_ranks,
    learned,
)
from armillary.integrations.diffusers.plans import Plan, Split, changed_modules, named
from armillary.integrations.diffusers.streams import (
    FINDS_STREAMS,
    JointRouting,
    Running,
    Streams,
    recomputing,
)


def parallelize_diffusers(model: nn.Module, attend: Method, *, compare: bool = True) -> None:
    """Shards the tokens of a transformer of diffusers over the ranks of `attend`, inside the model, in place.

        parallelize_diffusers(model, attend)  # FluxTransformer2DModel, or a pipeline's `transformer`
        for block in (*model.transformer_blocks, *model.single_transformer_blocks, model):
            fully_shard(block, mesh=ranks)
        sum_gradients(model)  # from armillary.core: FSDP2 averages gradients, and these are shares of one

        loss = F.mse_loss(model(noisy, ...).sample, target)  # whole tensors in, the whole output out, on every rank
        loss.backward()

    The model is called as on one device: every rank gives the same whole tensors (images, noise, timesteps, text) and
    gets the whole output, and so the whole loss. A rank's gradients, of parameters and of inputs, are its tokens' share
    of the gradient, to be summed over ranks.

    Flux and SD3 attend with image and text together, Qwen-Image with the text's padding left out
    (`encoder_hidden_states_mask`, ones and then zeros); Wan attends to the video's tokens, and each rank has all keys
    of the text (and of a first image). Any number of tokens will do, but for an image with fewer than there are ranks.

    Gradient checkpointing is the model's own, `model.enable_gradient_checkpointing()`. Adapters (LoRA) come before
    this, FSDP2 and torch.compile after it. Kernels are those of `attend`: leave diffusers' attention backends and its
    own context parallelism (`enable_parallelism`) out.

    Args:
        compare: whether ranks compare what the model is given, at every call (and what of its parameters learns, at
            the first): 8 bytes are sent for each argument, but all of it is read on the host.

    Raises:
        ValueError: a model of another class, or with attention of another kind (IP-Adapter); one that is parallelized
            already; a method whose axes are unknown. At a call: dropout, caches and other hooks of diffusers that look
            at a rank's tokens, a text mask with holes, options for processors but LoRA's scale, tokens that do not fit
            or are fewer than ranks, a processor or module that was put in later; arguments that differ between ranks.
    """
    check_method(attend)
    plan, running = Plan.of(model), Running(attend)
    check_model(model, plan, attend)
    for pattern, arguments in plan.arguments.items():
        for _, module in named(model, pattern) if pattern else []:
            module.register_forward_pre_hook(_taking(module, arguments, running), with_kwargs=True)
    for pattern, splits in plan.results.items():
        for _, module in named(model, pattern):
            module.register_forward_hook(_taking_results(splits, running))
    for pattern, order in plan.attention.items():
        for name, module in named(model, pattern):
            _route(name, module, JointRouting(running, order), plan)
    for _, module in named(model, plan.output):
        module.register_forward_hook(_gathering(running))
    for _, module in changed_modules(model, plan):
        setattr(module, MARK, True)
    _run_sharded(model, plan, running, compare)


def _run_sharded(model: nn.Module, plan: Plan, running: Running, compare: bool) -> None:
    """Has the model's forward begin with whole arguments, and know its streams. Never part of a compiled graph."""
    forward, names = unbound(model.forward), _parameters(model)
    changed = [name for name, _ in changed_modules(model, plan)]

    @torch.compiler.disable
    def begin(own: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Streams, Any, Any]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        check_unchanged(own, changed)
        check_modules(own)
        check_options(given.get(plan.options), plan)
        if compare:
            compare_over_ranks(given if running.begun else {**given, **learned(own)}, running.attend)
        running.begun = True
        streams = _streams(own, given, plan, running.attend)
        _keep_streams(own, running)
        changes = {name: _taker(split, streams) for name, split in plan.arguments.get("", {}).items()}
        if plan.text_mask:
            changes[plan.text_mask] = lambda _: None  # the streams have it
        return streams, *_changed(names, args, kwargs, changes)

    @wraps(forward)
    def over_all_shards(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        streams, args, kwargs = begin(own, args, kwargs)  # pyright: ignore[reportCallIssue] - not known to disable
        with running.within(streams):
            return forward(own, *args, **kwargs)

    model.forward = MethodType(torch.compiler.disable(over_all_shards, recursive=False), model)


def _streams(model: Any, given: Mapping[str, Any], plan: Plan, attend: Method) -> Streams:
    """The streams of a call, from the shapes of what is given: tokens [B, N, C], or an image that is cut in patches."""
    image: Any = given.get("hidden_states")
    text: Any = given.get("encoder_hidden_states")
    check_tensor("hidden_states", image)
    check_tensor("encoder_hidden_states", text)
    tokens = image.shape[1]
    if image.ndim > 3:
        size, patch = image.shape[2:], model.config.patch_size
        patch = patch if isinstance(patch, Sequence) else [patch] * len(size)
        tokens = prod(length // step for length, step in zip(size, patch, strict=True))
    mask = given.get(plan.text_mask) if plan.text_mask else None
    return Streams(attend, tokens, text.shape[1], plan.attention.values(), mask)


def _keep_streams(model: Any, running: Running) -> None:
    """Has blocks that are run again in backward find these streams; diffusers may set its function at any time."""
    checkpoint = getattr(model, "_gradient_checkpointing_func", None)
    if checkpoint is not None and not hasattr(checkpoint, FINDS_STREAMS):
        model._gradient_checkpointing_func = recomputing(checkpoint, running)


def _taker(split: Split, streams: Streams) -> Callable[[Any], Any]:
    return lambda whole: streams.take(split, whole)


def _taking(module: nn.Module, splits: Mapping[str, Split], running: Running) -> Callable[..., Any]:
    """A hook that hands a module this rank's pieces of some arguments."""
    names = _parameters(module)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        streams = running.now()
        return _changed(names, args, kwargs, {name: _taker(split, streams) for name, split in splits.items()})

    return hook


def _taking_results(splits: tuple[Split, ...], running: Running) -> Callable[..., Any]:
    """A hook that takes this rank's pieces of what a module returns."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        streams = running.now()
        if isinstance(out, Tensor):
            return streams.take(splits[0], out)
        return tuple(streams.take(split, x) for split, x in zip(splits, out, strict=True))

    return hook


def _gathering(running: Running) -> Callable[..., Tensor]:
    """A hook that makes the whole image of this rank's piece, which a module returns."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return running.now().gather(out)

    return hook


def _route(name: str, module: Any, routing: JointRouting, plan: Plan) -> None:
    """Has a module's attention see all tokens of its streams."""
    forward = unbound(module.forward)

    @wraps(forward)
    def over_all_shards(own: Any, *args: Any, **kwargs: Any) -> Any:
        check_processor(name, own, plan)
        routing.used, routing.beside = False, ""
        with routing:
            out = forward(own, *args, **kwargs)
        if not torch.compiler.is_compiling():
            routing.check_used(f"{name}, whose attention backend is to be diffusers' native one,")
        return out

    module.forward = MethodType(over_all_shards, module)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes."""
    return tuple(signature(type(module).forward).parameters)[1:]


def _changed(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[str, Callable[[Any], Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, some of them changed, in the order of `changes`."""
    positional, kwargs = list(args), dict(kwargs)
    for name, change in changes.items():
        if name in kwargs:
            kwargs[name] = change(kwargs[name])
        elif (place := names.index(name)) < len(args):
            positional[place] = change(args[place])
    return tuple(positional), kwargs
