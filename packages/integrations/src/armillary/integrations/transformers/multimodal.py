"""Position ids of models with M-RoPE: [3, B, T], the time, height and width of each token.

Such a model also takes position ids [B, T] and repeats them for each axis, as is right for text. Tokens of images then
get other positions than transformers computes for them. So ids [B, T] beside images are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import currentframe, getsource, signature, unwrap
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention import Method
from armillary.attention.parts import find_axes, gather_integers, in_backward

REPEATS_POSITIONS = re.compile(r"position_ids\.(ndim|dim\(\)) == 2")
"""Matches the source of a forward that repeats position ids [B, T] for each axis."""

IMAGE_ARGUMENTS = re.compile("pixel_values|image_|video_|visual_|deepstack_|mm_|input_features")
"""Matches the start of names of arguments that models of transformers get beside images, videos and sound."""


def repeats_positions(model: Any) -> bool:
    """Returns True for a class with M-RoPE that takes position ids [B, T] too."""
    try:
        return REPEATS_POSITIONS.search(getsource(unwrap(model.forward))) is not None
    except (OSError, TypeError):
        return False


class MultimodalPositions:
    """Pre-forward hook of a model with M-RoPE that refuses position ids [B, T] beside images, on every rank.

    Bytes sent in each forward with position ids: a `gather_integers` of one integer, because only some ranks may have
    tokens of images.

    Args:
        method_of: returns the method that a config selects, or None.
    """

    def __init__(self, method_of: Callable[[Any], Method | None]) -> None:
        self.method_of = method_of

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check = self._check
        if torch.compiler.is_compiling():  # a graph cannot contain the check, which communicates
            check = cast(Callable[..., None], torch.compiler.disable(check))
        check(model, args, kwargs)

    def _check(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        method = self.method_of(model.config)
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
                f"{type(model).__name__} gets position_ids [B, T] beside images or embeddings: it has M-RoPE, and "
                "tokens of images have several positions. Pass [3, B, T]: `batch.take(position_ids, dim=2)` of those "
                "that get_rope_index returns for whole rows, or position_ids.expand(3, -1, -1) for text alone"
            )


def _has_images(call: dict[str, Any]) -> bool:
    """Returns True if a call of a text model, or a model around it, has images, or embeddings that may be of images.

    Args:
        call: arguments of the text model. A model around it makes the embeddings itself if it gets token ids.
    """
    calls = [call, *_outer_calls()]
    for arguments in calls:
        options = {**arguments, **arguments.get("kwargs", {})}
        if any(IMAGE_ARGUMENTS.match(name) and _is_set(value) for name, value in options.items()):
            return True
    return calls[-1].get("input_ids") is None


def _is_set(value: Any) -> bool:
    """Returns False for an argument that is None or empty, or has zeros alone, such as the token types of text."""
    return bool(value.any()) if isinstance(value, Tensor) else value is not None and value is not False and value != {}


def _outer_calls() -> Iterator[dict[str, Any]]:
    """Yields the arguments of the calls of models that are running around this one, the innermost first.

    A text model gets embeddings alone, so token ids and images are read from the stack frames of its callers.
    """
    frame: FrameType | None = currentframe()
    while frame is not None:
        code, variables = frame.f_code, frame.f_locals
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_model = hasattr(type(variables.get("self")), "get_correct_attn_implementation")
        if is_model and "input_ids" in parameters:
            yield {name: variables.get(name) for name in (*parameters, "kwargs") if name in variables}
        frame = frame.f_back
