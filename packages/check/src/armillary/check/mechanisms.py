"""Mechanisms of an architecture, and those that its tiny copy exercises.

A right copy says nothing about a window that is longer than its sequence. So each mechanism is switched off on one
rank: if the logits stay the same, the comparison of shards with one rank would not notice a mistake in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from armillary.check.compare import MODEL_LIMITS
from armillary.check.tiny import VOCABULARY, WINDOWS
from armillary.core.testing import relative_error
from armillary.integrations import selects_keys, shards_states

NOTICED = 100 * MODEL_LIMITS[torch.float64]
"""Relative change of logits from which on a comparison notices it for certain."""
UNLIMITED = 1e9
"""A cap of scores, or a length of a window, that limits nothing."""
CHUNK = "attention_chunk_size"
KEY_LATENTS = ("kv_a_layernorm", "kv_a_norm")
"""Names of the norms of latents, from which keys and values are expanded."""
CROSS_ATTENTION = re.compile(r"cross_?att|encoder_attn", re.IGNORECASE)
"""Matches names of modules that attend to another sequence."""
ROUTERS = re.compile("Router|TopKGating")
"""Matches class names of modules that choose experts."""


def mechanisms_of(
    config: Any, build: Callable[[Any], nn.Module], logits: Callable[[nn.Module, Tensor], Tensor], tokens: int
) -> dict[str, bool]:
    """Returns the mechanisms of a copy: True if the logits of `tokens` random tokens change without it.

    Args:
        config: config of the copy.
        build: returns the model of a config.
        logits: returns the logits [1, N, V] of a model for ids [1, N].
    """
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    model, half = build(config).double().eval(), tokens // 2

    def changes(actual: Tensor, expected: Tensor) -> bool:
        return relative_error(actual, expected) > NOTICED

    with torch.no_grad():
        expected = logits(model, ids)
        # 1. Tokens see those of other shards: the last token of the first half reaches the second half.
        changed_ids = ids.clone()
        changed_ids[0, half - 1] = 3 + (ids[0, half - 1] - 2) % (VOCABULARY - 3)
        mechanisms = {"other shards": changes(logits(model, changed_ids)[:, half:], expected[:, half:])}
        # 2. Documents: the second half alone differs from what it is behind the first half.
        mechanisms["documents"] = changes(logits(model, ids[:, half:]), expected[:, half:])
        # 3. Settings of the config. The mutant has the same weights.
        for name, settings in settings_off(config).items():
            mutant_config = deepcopy(config)
            for field, value in settings.items():
                setattr(mutant_config, field, value)
            mutant = build(mutant_config).double().eval()
            mutant.load_state_dict(model.state_dict(), strict=False)
            mechanisms[name] = changes(logits(mutant, ids), expected)
        # 4. Parts of the model.
        for name in parts_off(model, tokens):
            mechanisms[name] = changes(logits(model, ids), expected)
    return mechanisms


def settings_off(config: Any) -> dict[str, dict[str, Any]]:
    """Returns the fields, by mechanism, that switch off what a config switches on."""
    fields: dict[str, Any] = config.to_dict()

    def numbers(*names: str) -> list[str]:
        return [name for name in names if isinstance(fields.get(name), (int, float)) and fields[name]]

    ropes = {name: rope for name in ("rope_parameters", "rope_scaling") if isinstance(rope := fields.get(name), dict)}
    off: dict[str, dict[str, Any]] = {
        "window": dict.fromkeys(numbers(*(name for name in WINDOWS if name != CHUNK)), int(UNLIMITED)),
        "chunks": dict.fromkeys(numbers(CHUNK), int(UNLIMITED)),
        "softcap": dict.fromkeys(numbers(*(name for name in fields if "softcap" in name)), UNLIMITED),
        "rope scaling": {name: plain for name, rope in ropes.items() if (plain := _unscaled(rope)) != rope},
        "rope by layer": {name: equal for name, rope in ropes.items() if (equal := _equal_ropes(rope)) != rope},
        "shared keys": dict.fromkeys(numbers("num_kv_shared_layers"), 0),
    }
    if isinstance(layers := fields.get("no_rope_layers"), list) and 0 in layers:
        off["rope by layer"]["no_rope_layers"] = [1] * len(layers)
    if isinstance(bases := fields.get("layer_rope_theta"), list) and len(set(bases)) > 1:
        off["rope by layer"]["layer_rope_theta"] = [max(bases)] * len(bases)
    return {name: settings for name, settings in off.items() if settings}


def _unscaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters without scaling."""
    off = {"factor": 1.0, "long_factor": rope.get("short_factor")}
    plain = {name: off.get(name, x) for name, x in rope.items()}
    # A dictionary for each kind of layer.
    return {name: _unscaled(cast(Any, x)) if isinstance(x, dict) else x for name, x in plain.items()}


def _equal_ropes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same rotary parameters for all kinds of layers; the rotated part depends on the heads of a kind."""
    first = next((x for x in rope.values() if isinstance(x, dict)), {})
    part = "partial_rotary_factor"
    return {name: first | {k: x[k] for k in x if k == part} if isinstance(x, dict) else x for name, x in rope.items()}


def parts_off(model: nn.Module, tokens: int) -> Iterator[str]:
    """Yields the mechanisms that are parts of a model, each while it is switched off."""
    modules = dict(model.named_modules())
    without_weight = partial(torch.full_like, fill_value=-UNLIMITED)
    # 1. Sinks without weight, routers that choose other experts.
    sinks = [x for name, x in model.named_parameters() if "sink" in name.rpartition(".")[2]]
    routers = [x for module in modules.values() if ROUTERS.search(type(module).__name__) for x in module.parameters()]
    for name, parameters, change in (("sinks", sinks, without_weight), ("router", routers, torch.neg)):
        before = [x.detach().clone() for x in parameters]
        for x in parameters:
            x.copy_(change(x))
        if parameters:
            yield name
        for x, values in zip(parameters, before, strict=True):
            x.copy_(values)
    # 2. States that do not reach the second half of the sequence.
    if states := [module for module in modules.values() if shards_states(type(module))]:
        forwards = [module.forward for module in states]
        for module in states:
            module.forward = _by_halves(module.forward, tokens)
        yield "states"
        for module, forward in zip(states, forwards, strict=True):
            module.forward = forward
    # 3. Modules that return zeros.
    latents = [module for name, module in modules.items() if name.rpartition(".")[2] in KEY_LATENTS]
    cross_attention = [module for name, module in modules.items() if CROSS_ATTENTION.search(name.rpartition(".")[2])]
    for name, parts in (("latents", latents), ("cross attention", cross_attention)):
        if parts:
            hooks = [module.register_forward_hook(_zeros) for module in parts]
            yield name
            for hook in hooks:
                hook.remove()


def _by_halves(forward: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    """Returns a forward that runs both halves of a sequence as sequences of their own."""

    def forward_of_halves(*args: Any, **kwargs: Any) -> Any:
        def half(x: Any, part: slice) -> Any:
            of_tokens = isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == tokens
            return cast(Tensor, x)[:, part] if of_tokens else x

        outputs = list[Any]()
        for part in (slice(tokens // 2), slice(tokens // 2, None)):
            named = {name: half(x, part) for name, x in kwargs.items()}
            outputs.append(forward(*(half(x, part) for x in args), **named))
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, 1)
        return torch.cat([output[0] for output in outputs], 1), *outputs[1][1:]

    return forward_of_halves


def _zeros(module: nn.Module, args: Any, output: Any) -> Any:
    return torch.zeros_like(output) if isinstance(output, Tensor) else (torch.zeros_like(output[0]), *output[1:])


def missing_layers(model: nn.Module) -> set[type]:
    """Returns the layers with a state, and those that select keys, of a model's file that the model does not have."""
    of_file = vars(sys.modules[type(model).__module__]).values()
    classes = {x for x in of_file if isinstance(x, type) and issubclass(x, nn.Module)}
    return {x for x in classes if shards_states(x) or selects_keys(x)} - {type(x) for x in model.modules()}
