"""Layers with a state in models of transformers: Mamba-2, Gated DeltaNet, Kimi's delta attention, short convolutions.

In transformers these layers call module-level functions of their model's file, under the same names in all files.
`route_states` replaces them by functions that call ours for sharded sequences and the original ones otherwise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from inspect import signature, unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from armillary.attention import AttentionMask
from armillary.attention.internal import current_sequence
from armillary.core import Axis, SequenceLayout, short_convolution
from armillary.states import gated_delta_rule, ssd

# Name of the option of a model's forward that carries the `StateSequence` to its layers. When backward recomputes a
# layer, in any thread, the layer therefore has the same layout and documents as in forward.
OPTION = "armillary_sequence"

# Kinds of layers, in configs, that carry a state or convolve.
STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})


class StateSequence(NamedTuple):
    """A sharded sequence: its layout over the ranks of `axis`, and a mask of its documents or tree; None without."""

    layout: SequenceLayout
    axis: Axis
    mask: AttentionMask | None


def convolve(
    sequence: StateSequence, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """`causal_conv1d_fn` of transformers: hidden_states [B, C, T], weight [C, taps] -> [B, C, T], with C channels."""
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    out = short_convolution(x, weight, sequence.layout, sequence.axis, bias, mask=sequence.mask)
    if activation is not None:
        out = import_module("transformers.activations").ACT2FN[activation](out)
    return out.transpose(1, 2).to(hidden_states.dtype)


def delta_rule(
    sequence: StateSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: query, key, value [B, T, heads, ...]."""
    _refuse_cache(initial_state, output_final_state)
    # Casts and the epsilon are those of the replaced functions.
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g, beta = (x.to(dtype) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out, _ = gated_delta_rule(q, k, v, g, beta, layout=sequence.layout, axis=sequence.axis, mask=sequence.mask)
    return out.to(query.dtype), None


def chunk_scan(
    sequence: StateSequence,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    z: Tensor | None = None,
) -> Tensor:
    """`mamba2_chunk_scan`: hidden_states [batch, T, H, D], B and C [batch, T, G, N] -> [batch, T, H, D].

    H heads share G groups of B and C; N is the state size. The output is in float32 or wider.
    """
    _refuse_cache(initial_states, return_final_states)
    if z is not None:
        raise ValueError("a gate z inside of mamba2_chunk_scan is not supported on shards")
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    out, _ = ssd(x, dt, A, B, C, layout=sequence.layout, axis=sequence.axis, mask=sequence.mask)
    return out if D is None else out + D.unsqueeze(-1) * x


def _refuse_cache(state: Tensor | None, returns_state: bool) -> None:
    if state is not None or returns_state:
        raise ValueError("a sharded sequence has no cache of states: call the model with use_cache=False")


# Our function for each function of transformers. A fused function has None: its replacement returns None, as the
# original does if its kernel is not installed, and the layer then calls the separate functions.
FUNCTIONS: Mapping[str, Callable[..., Any] | None] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": chunk_scan,
    "mamba2_split_conv1d_scan_combined": None,
}


# Functions that compute one more token from a cache. A sharded sequence has no cache, so they are never called.
STEPS = frozenset(
    {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"}
    | {"mamba2_selective_state_update"}
)

# Matches names of functions that mix tokens. Names with "mask" are of functions that make masks.
MIXING = re.compile("^(?!.*mask).*(conv1d|scan|delta|recurren|selective|state_update|linear_attn|retention)")


def shards_states(layer: type) -> bool:
    """Returns True for a module class of transformers with a state or a convolution that can be sharded.

    Its forward then mixes tokens only by functions that `route_states` replaces.
    """
    return any(name in FUNCTIONS for name in _mixing_functions(layer)) and not mixes_unknown(layer)


def mixes_unknown(layer: type) -> bool:
    return any(name not in FUNCTIONS and name not in STEPS for name in _mixing_functions(layer))


def _mixing_functions(layer: type) -> list[str]:
    """Returns the names of token-mixing functions of its file that a layer's forward refers to, from its bytecode."""
    forward: Any = unwrap(layer.forward) if issubclass(layer, nn.Module) else None
    names = forward.__code__.co_names if hasattr(forward, "__code__") else ()
    return [name for name in names if MIXING.search(name) and callable(forward.__globals__.get(name))]


def has_sharded_states(model: type) -> bool:
    """Returns True if a model's file has layers with a state and all of them can be sharded."""
    return any(_states_of_file(base.__module__) for base in model.__mro__ if base.__module__ in sys.modules)


@cache
def _states_of_file(file: str) -> bool:
    values = list(vars(sys.modules[file]).values()) if file.startswith("transformers.models.") else []
    layers = [x for x in values if isinstance(x, type) and issubclass(x, nn.Module) and x.__module__ == file]
    return any(map(shards_states, layers)) and not any(map(mixes_unknown, layers))


def route_states(model: type) -> None:
    """Replaces the `FUNCTIONS` in the files that define a model's classes, unless they are replaced already."""
    for file in {base.__module__ for base in model.__mro__}:
        namespace = vars(sys.modules[file]) if file.startswith("transformers.models.") else {}
        for name, replacement in FUNCTIONS.items():
            if name in namespace and not hasattr(namespace[name], OPTION):
                namespace[name] = _route(namespace[name], replacement)


def _route(original: Callable[..., Any], replacement: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wraps a function: calls with the option `OPTION` go to the replacement, all others to the original."""
    parameters = signature(unwrap(original))
    names = [] if replacement is None else list(signature(replacement).parameters)[1:]

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        sequence = kwargs.pop(OPTION, None)
        if sequence is None:
            if current_sequence() is not None:
                raise ValueError(
                    f"{original.__name__} inside `with sequence(...)` got no layout: its model has another attention "
                    "implementation, or does not pass its options to its layers"
                )
            return original(*args, **kwargs)
        if replacement is None:
            return None
        # A replacement takes some of the original's arguments, by name. The original may take them by its **kwargs.
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        return replacement(sequence, **{name: values[name] for name in names if name in values})

    setattr(call, OPTION, True)  # marks the function as replaced
    return call
