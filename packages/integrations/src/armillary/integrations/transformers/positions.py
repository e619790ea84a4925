"""Positions on shards where models derive more from them than transformers can know from one shard.

- M-RoPE: position ids [3, B, T], the time, height and width of each token. Such a model also takes position ids [B, T]
  and repeats them for each axis, as is right for text. Tokens of images then get other positions than transformers
  computes for them. So ids [B, T] beside images are refused.
- RoPE of type `dynamic` and `longrope`: its frequencies depend on the last position of the sequence. transformers
  derives these frequencies from the largest position id of a call. On a shard that is the shard's.
- Models whose forward takes no position ids, such as BART: modules inside that do get those of the batch.
- Llama 4: layers without RoPE scale queries by position, counted from the shard's first token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import currentframe, getsource, signature, unwrap
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from armillary.attention.internal import current_sequence, find_axes, gather_integers, in_backward
from armillary.core.internal import compat
from armillary.integrations.transformers.models import (
    POSITION_MODULES,
    innermost_model,
    is_model,
    method_of,
    sharded_modules,
    shards_of,
)

# Matches the source of a forward that repeats position ids [B, T] for each axis.
REPEATS_POSITIONS = re.compile(r"position_ids\.(ndim|dim\(\)) == 2")

# Matches the start of names of arguments that models of transformers get beside images, videos and sound.
IMAGE_ARGUMENTS = re.compile("pixel_values|image_|video_|visual_|deepstack_|mm_|input_features")


def repeats_positions(model: Any) -> bool:
    """Returns True for a class with M-RoPE that takes position ids [B, T] too."""
    try:
        return REPEATS_POSITIONS.search(getsource(unwrap(model.forward))) is not None
    except (OSError, TypeError):
        return False


@compat.outside_graphs  # it communicates
def check_image_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model with M-RoPE that refuses position ids [B, T] beside images, on every rank.

    Bytes sent in each forward with position ids: a `gather_integers` of one integer, because only some ranks may have
    tokens of images.
    """
    method = method_of(model.config)
    call = signature(model.forward).bind_partial(*args, **kwargs).arguments
    position_ids = call.get("position_ids")
    # A recomputation repeats a call that was checked in forward.
    if method is None or not isinstance(position_ids, Tensor) or in_backward():
        return
    errors = [[int(position_ids.ndim == 2 and _has_images(call))]]
    if find_axes(method) is not None:
        errors = gather_integers(errors, method)
    if any(is_error for (is_error,) in errors):
        raise ValueError(
            f"{type(model).__name__} gets position_ids [B, T] beside images or embeddings: it has M-RoPE, and tokens "
            "of images have several positions. Pass [3, B, T]: `batch.take(position_ids, dim=2)` of those that "
            "get_rope_index returns for whole rows, or position_ids.expand(3, -1, -1) for text alone"
        )


def _has_images(call: dict[str, Any]) -> bool:
    """Returns True if a call of a text model, or a model around it, has images, or embeddings that may be of images."""
    calls = [call, *_outer_calls()]
    for arguments in calls:
        options = {**arguments, **arguments.get("kwargs", {})}
        if any(IMAGE_ARGUMENTS.match(name) and _is_set(value) for name, value in options.items()):
            return True
    # A model that gets token ids makes the embeddings of the text model inside of it.
    return calls[-1].get("input_ids") is None


def _is_set(value: Any) -> bool:
    # Zeros alone, such as the token types of text, count as no argument.
    return bool(value.any()) if isinstance(value, Tensor) else value is not None and value is not False and value != {}


def _outer_calls() -> Iterator[dict[str, Any]]:
    """Yields the arguments of the calls of models that are running around this one, the innermost first."""
    # A text model gets embeddings alone, so token ids and images are read from the stack frames of its callers.
    frame: FrameType | None = currentframe()
    while frame is not None:
        code, variables = frame.f_code, frame.f_locals
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if is_model(variables.get("self")) and "input_ids" in parameters:
            yield {name: variables.get(name) for name in (*parameters, "kwargs") if name in variables}
        frame = frame.f_back


def depends_on_last_position(rope: Any) -> bool:
    """Returns True if a config's RoPE parameters, or a module's `rope_type`, name such a type for any layer."""
    return any(name in repr(rope) for name in ("dynamic", "longrope"))  # transformers too looks for "dynamic" in a type


# Attribute of modules that have their hooks already.
HOOKED = "armillary_last_position"


def give_last_position(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model: gives its rotary modules the largest position id of all ranks of a sequence.

    Bytes sent in each forward of a rotary module: a `gather_integers` of one integer.
    """
    # Around such a module, hooks add this position to the position ids [..., T], and drop its cosines and sines
    # [..., T + 1, D].
    if hasattr(model, HOOKED):
        return
    setattr(model, HOOKED, True)
    for _, module in sharded_modules(model):
        # The hook of a submodel may have come first.
        if depends_on_last_position(getattr(module, "rope_type", None)) and not hasattr(module, HOOKED):
            setattr(module, HOOKED, True)
            module.register_forward_pre_hook(_append_last_position, with_kwargs=True)
            module.register_forward_hook(_drop_last_position)


@compat.never_traced  # it communicates
def _append_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = method_of(module.config)
    if method is None or method.shards == 1:
        return None
    ids: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = max(row[0] for row in gather_integers([[int(ids.max())]], method))
    ids = torch.cat([ids, ids.new_full((*ids.shape[:-1], 1), last)], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": ids}
    return (args[0], ids, *args[2:]), kwargs


def _drop_last_position(module: Any, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> Any:
    if shards_of(module.config) == 1:
        return output
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(x[..., :-1, :] for x in output)


# Attribute of a model, once its modules have their hooks: True if they get position ids that its forward does not take.
GIVES_POSITIONS = "armillary_positions"


def gives_positions(model: Any) -> bool:
    """Returns True if modules of a model get the position ids of the batch, in whose block the call is."""
    context = current_sequence()
    return getattr(model, GIVES_POSITIONS, False) and context is not None and context.position_ids is not None


def give_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model: gives position ids to modules that take them, in parts whose forward does not.

    Such a part (BART's decoder, DPR's encoder) would count from the first token of each shard.
    """
    if hasattr(model, GIVES_POSITIONS):
        return
    setattr(model, GIVES_POSITIONS, False)
    for name, module in sharded_modules(model):
        outer = innermost_model(model, name.rpartition(".")[0])[0]
        takes = [{"input_ids", "position_ids"} & set(signature(x.forward).parameters) for x in (outer, module)]
        is_position = is_model(module) or POSITION_MODULES.search(type(module).__name__) is not None
        if name and is_position and takes[0] == {"input_ids"} and "position_ids" in takes[1]:
            module.register_forward_pre_hook(_give_position_ids, with_kwargs=True)
            setattr(outer, GIVES_POSITIONS, True)


def _give_position_ids(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = current_sequence()
    ids = None if context is None else context.position_ids
    call = signature(module.forward).bind_partial(*args, **kwargs)
    if ids is None or (is_model(module) and call.arguments.get("position_ids") is not None):
        return None
    # Embeddings take ids [T], of all rows.
    if not is_model(module):
        if not bool((ids == ids[0]).all()):
            raise ValueError(
                f"{type(module).__name__} takes one position for each token of all rows, but positions differ from row "
                "to row: shard rows with the same documents, or one row at a time"
            )
        ids = ids[0]
    call.arguments["position_ids"] = ids
    return call.args, call.kwargs


def scale_by_position(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Returns queries [B, H, T, D], in Llama 4's layers without RoPE scaled by their positions in the sequence [T]."""
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return query
    # The layer has already scaled by positions in the shard: multiply by the ratio of the two scales.
    local_positions = torch.arange(len(positions), device=query.device)
    local_scale, scale = (_scale(module, x.to(query.device)).double() for x in (local_positions, positions))
    # In float32 or wider: a ratio of two bfloat16 scales would round twice.
    ratio = (scale / local_scale).to(torch.promote_types(query.dtype, torch.float32))
    return (query * ratio[:, None]).to(query.dtype)


def _scale(module: Any, positions: Tensor) -> Tensor:
    # Constant over `floor_scale` positions ("Scalable-Softmax", arXiv 2501.19399).
    return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
