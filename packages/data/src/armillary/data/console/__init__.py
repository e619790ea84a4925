"""Building blocks of commands: numbers with units, tables, pictures, and errors as one line with an exit code."""

from typing import TYPE_CHECKING

from armillary.core.parts import imported_at_first_use
from armillary.data.console.exit import (
    EXPLAINED,
    FAILED,
    PEER_ERRORS,
    REFUSALS,
    exit_on_error,
    exit_with,
    flag_in_errors,
    one_line,
    print_lines,
    printable,
    report_failure,
    write_to_stderr,
)
from armillary.data.console.pictures import check_picture, picture, print_written
from armillary.data.console.table import Column, print_table
from armillary.data.console.units import (
    BYTES_SUCH_AS,
    LARGEST,
    SUCH_AS,
    byte_quantity,
    gib,
    quantity,
    short,
    whole_number,
)

if TYPE_CHECKING:
    from armillary.data.parsing import parse, parse_known, refuse_removed
    from armillary.data.progress import Bar

__all__ = [
    "BYTES_SUCH_AS",
    "EXPLAINED",
    "FAILED",
    "LARGEST",
    "PEER_ERRORS",
    "REFUSALS",
    "SUCH_AS",
    "Bar",
    "Column",
    "byte_quantity",
    "check_picture",
    "exit_on_error",
    "exit_with",
    "flag_in_errors",
    "gib",
    "one_line",
    "parse",
    "parse_known",
    "picture",
    "print_lines",
    "print_table",
    "print_written",
    "printable",
    "quantity",
    "refuse_removed",
    "report_failure",
    "short",
    "whole_number",
    "write_to_stderr",
]

_SLOW_MODULES = {
    "armillary.data.parsing": (
        "parse",
        "parse_known",
        "refuse_removed",
    ),
    "armillary.data.progress": ("Bar",),
}
"""Modules that need rich or tyro, which only commands do."""

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
