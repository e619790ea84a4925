"""A configuration as a TOML file for `--config`, with every field and its comment."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from docstring_parser import parse_from_object

from armillary.core.internal import parse_toml
from armillary.train.config.overlay import flag, overlay_settings
from armillary.train.config.sections import Config

FIRST_LINE = "# Every field of a run, for armillary-train --config FILE. Flags override it."


def config_toml(recipe: str, defaults: Config, config: Config) -> str:
    """Returns the text of the file: the recipe's name, and a table for each section.

    Args:
        defaults: the recipe's configuration. Fields that are None there and here are comments: TOML has no None.

    Raises:
        ValueError: a value that TOML cannot express, such as a path that the recipe has and this run has not.
    """
    tables = [f"{FIRST_LINE}\nrecipe = {toml_value(recipe)}"]
    for section in fields(config):
        values, default_values = getattr(config, section.name), getattr(defaults, section.name)
        summary = (inspect.getdoc(type(values)) or "").partition("\n")[0]
        lines = [f"# {summary}", f"[{flag(section.name)}]"]
        comments = {x.arg_name: x.description or "" for x in parse_from_object(type(values)).params}
        for field in fields(values):
            key, value = flag(field.name), getattr(values, field.name)
            is_unset = value is None and getattr(default_values, field.name) is None
            lines += wrap(comments[field.name], width=100, initial_indent="# ", subsequent_indent="# ")
            lines += [f"# {key} =" if is_unset else f"{key} = {toml_value(value)}"]
        tables.append("\n".join(lines))
    text = "\n\n".join(tables)
    settings = parse_toml(text)
    del settings["recipe"]
    if overlay_settings(defaults, settings, Path("run.toml")) != config:
        raise ValueError(f"--export-config: the recipe {recipe} has a value that TOML cannot express; name another")
    return text


def toml_value(value: Any) -> str:
    """Formats a value as TOML. None becomes "none", which `overlay_settings` reads as None."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps("none" if value is None else str(value), ensure_ascii=False)
