"""Attention methods by name. To add a method, name it in a line of `table.py`."""

from armillary.attention.registry.entry import DEFAULT_OPTIONS, HeadEntry, MethodOptions, SequenceEntry
from armillary.attention.registry.named import (
    NamedMethod,
    build_attention,
    build_comm_plan,
    methods_without_plan,
    named_method,
    names,
    variants,
)
from armillary.attention.registry.table import ALIASES, HEAD_METHODS, LOCAL, SEQUENCE_METHODS

__all__ = [
    "ALIASES",
    "DEFAULT_OPTIONS",
    "HEAD_METHODS",
    "LOCAL",
    "SEQUENCE_METHODS",
    "HeadEntry",
    "MethodOptions",
    "NamedMethod",
    "SequenceEntry",
    "build_attention",
    "build_comm_plan",
    "methods_without_plan",
    "named_method",
    "names",
    "variants",
]
