"""RoPE in `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters` with both (transformers 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from math import isfinite
from typing import Any, cast

from armillary.core.parts import check_bool, number
from armillary.models.layers.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
"""The class of each `rope_type` of Hugging Face."""

THETA = 10_000.0
"""The default of `rope_theta` in `transformers`."""

ORIGINAL = "original_max_position_embeddings"


def read_rope(fields: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Returns RoPE's theta and scaling (None if there is none) from the fields of a `config.json`.

    Raises:
        ValueError: the scaling is not supported, or a field is unknown, missing or not a number. The error names it.
    """
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope: Any = fields.get(source) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{source}={rope!r} must be an object or null")
    options = cast("dict[str, Any]", rope).copy()
    theta = options.pop("rope_theta", fields.get("rope_theta"))
    theta = number("rope_theta", THETA if theta is None else theta)
    legacy_type = options.pop("type", "default")  # the name in files of older releases
    kind = options.pop("rope_type", legacy_type)
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        raise ValueError(f"{source}={rope}; rope_type must be default, {' or '.join(SCALINGS)}")
    for factor in (options.pop("partial_rotary_factor", None), fields.get("partial_rotary_factor")):
        if factor not in (None, 1):
            raise ValueError(f"partial_rotary_factor={factor!r} must be 1: heads are rotated as a whole")
    names = [] if kind == "default" else [field.name for field in fields_of(SCALINGS[kind])]
    if unknown := sorted(options.keys() - {*names}):
        raise ValueError(f"{source}={rope}; with rope_type {kind!r}, {', '.join(unknown)} is not supported")
    if kind == "default":
        return theta, None
    try:
        rope_scaling = scaling(kind, options, fields, max_positions)
        # Extreme values fail here, instead of in the first forward pass. The head dim does not matter for this check.
        if not (rope_scaling.frequencies(64, theta).isfinite().all() and isfinite(rope_scaling.amplitude)):
            raise ValueError(f"with rope_theta={theta}, its frequencies are not finite")
    except (TypeError, ValueError, ArithmeticError) as error:  # a TypeError names a missing argument
        raise ValueError(f"{source}={rope}: {error}") from error
    return theta, rope_scaling


def scaling(kind: str, options: Mapping[str, Any], fields: Mapping[str, Any], max_positions: int) -> RopeScaling:
    """Returns a scaling, with the defaults of `transformers`.

    Args:
        kind: the `rope_type`.
        options: its fields in `rope_scaling` or `rope_parameters`.
        fields: all fields of the `config.json`.
    """
    for name, value in options.items():
        if value is not None:
            check_bool(name, value) if name == "truncate" else number(name, value)
    # `transformers` treats 0 like null, except in these two fields.
    values = {name: value for name, value in options.items() if value or name in ("truncate", "factor")}
    if kind != "linear":
        # The field beside `rope_scaling` takes precedence over the one inside (Phi 3).
        values[ORIGINAL] = fields.get(ORIGINAL) or values.get(ORIGINAL) or max_positions
        original = number(ORIGINAL, values[ORIGINAL])
        if kind == "yarn" and values.get("factor") is None:
            values["factor"] = max_positions / original
    return SCALINGS[kind](**values)


def describe_rope(theta: float, rope_scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the fields `rope_theta` and `rope_scaling`, which all versions of `transformers` read.

    Raises:
        ValueError: Hugging Face has no `rope_type` for the scaling.
    """
    if rope_scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    for kind, scaling_type in SCALINGS.items():
        if type(rope_scaling) is scaling_type:
            values = {field.name: getattr(rope_scaling, field.name) for field in fields_of(scaling_type)}
            options = {name: value for name, value in values.items() if value is not None}
            return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **options}}
    accepted = ", ".join(scaling_type.__name__ for scaling_type in SCALINGS.values())
    raise ValueError(f"rope_scaling={rope_scaling} has no name in Hugging Face's config.json; {accepted} have")
