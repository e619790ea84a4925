"""Limits of the configuration's fields, in their annotations: `steps: Count`, `x: Annotated[float, Field(gt=0)]`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from armillary.data.console import LARGEST
from armillary.train.config.overlay import flag, flag_text

Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrNone = Annotated[int, Field(ge=1, le=LARGEST)] | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]

WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""Words for pydantic's limits, in error messages."""


def check_limits(config: Any, prefix: str = "") -> None:
    """Checks all fields of a configuration and its sections against their annotations.

    Raises:
        ValueError: a value outside its field's limits, or of another type; names the flag, the value and the limits.
    """
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            check_limits(value, f"{name}.")
            continue
        annotation, adapter = field_adapter(type(config), field.name)
        try:
            # Strict mode refuses a list for a tuple, but Python code may build a configuration with either.
            adapter.validate_python(tuple(value) if isinstance(value, list) else value, strict=True)  # pyright: ignore[reportUnknownArgumentType]
        except ValidationError as error:
            raise ValueError(f"--{flag(name)} {flag_text(value)}: {requirement(annotation, error)}") from error


@lru_cache(maxsize=1024)
def field_adapter(kind: type[Any], name: str) -> tuple[Any, TypeAdapter[Any]]:
    """Returns a field's annotation and its pydantic adapter, which takes a millisecond to build."""
    annotation = annotations_of(kind)[name]
    return annotation, TypeAdapter(annotation)


@lru_cache(maxsize=64)
def annotations_of(kind: type[Any]) -> dict[str, Any]:
    """Returns the annotations of a dataclass by field, evaluated once for all of its fields."""
    return get_type_hints(kind, include_extras=True)


def requirement(annotation: Any, error: ValidationError) -> str:
    """Returns a field's limits in words, such as "must be at least 1 and at most 32".

    Returns pydantic's message if the field has no limits or the value is of another type.

    Args:
        annotation: the field's annotation.
        error: pydantic's error for the value.
    """
    bounds: dict[str, float] = {}
    # The annotation is an `Annotated` that has the limits, or, as `CountOrNone`, a union with such a member.
    for member in (annotation, *get_args(annotation)):
        for info in getattr(member, "__metadata__", ()):
            for limit in info.metadata if isinstance(info, FieldInfo) else ():
                bounds |= {word: getattr(limit, name) for name, word in WORDS.items() if hasattr(limit, name)}
    first_error = error.errors()[0]
    if not bounds or first_error["type"].endswith("_type"):
        return first_error["msg"]
    if first_error["type"] == "less_than_equal" and bounds["at most"] == LARGEST:
        return "must be at most 2^63 - 1"
    return f"must be {' and '.join(f'{word} {bound:,}' for word, bound in bounds.items() if bound != LARGEST)}"
