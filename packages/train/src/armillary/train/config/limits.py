"""Limits of fields, annotated at the field: `steps: Count`, or `x: Annotated[float, Field(gt=0)]`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from armillary.data.console.quantity import LARGEST
from armillary.train.config.overlay import flag, shown

Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrNone = Annotated[int, Field(ge=1, le=LARGEST)] | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]

WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def check_limits(config: Any, prefix: str = "") -> None:
    """Refuses values that are outside of their fields' limits, or of another type.

    Raises:
        ValueError: names the flag, its value and what is accepted.
    """
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            check_limits(value, f"{name}.")
            continue
        hint, adapter = field_of(type(config), field.name)
        try:
            adapter.validate_python(tuple(value) if isinstance(value, list) else value, strict=True)  # pyright: ignore[reportUnknownArgumentType]
        except ValidationError as error:
            raise ValueError(f"--{flag(name)} {shown(value)}: {wanted(hint, error)}") from error


@lru_cache(maxsize=1024)
def field_of(kind: type[Any], name: str) -> tuple[Any, TypeAdapter[Any]]:
    """Annotation of a field, and what checks it."""
    hint = get_type_hints(kind, include_extras=True)[name]
    return hint, TypeAdapter(hint)


def wanted(hint: Any, error: ValidationError) -> str:
    """What the field accepts: its limits, or pydantic's message where another rule is broken."""
    detail = error.errors()[0]
    given = [one for part in (hint, *get_args(hint)) for one in getattr(part, "__metadata__", ())]
    limits = [limit for info in given if isinstance(info, FieldInfo) for limit in info.metadata]
    kept = {word: getattr(x, name) for x in limits for name, word in WORDS.items() if hasattr(x, name)}
    if not kept or detail["type"].endswith("_type"):
        return detail["msg"]
    if detail["type"] == "less_than_equal" and kept["at most"] == LARGEST:
        return "must be at most 2^63 - 1"
    return f"must be {' and '.join(f'{word} {limit:,}' for word, limit in kept.items() if limit != LARGEST)}"
