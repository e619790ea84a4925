# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""The kit of commands: flags, numbers with units, tables, pictures, progress, errors in one line with an exit code."""

from typing import TYPE_CHECKING

from armillary.core.internal import imported_at_first_use
from armillary.data.console.exit import (
    EXPLAINED,
    FAILED,
    PEER_ERRORS,
    exit_on_error,
    exit_with,
    flag_in_errors,
    is_out_of_memory,
    needs_no_traceback,
    one_line,
    print_lines,
    printable,
    report_failure,
    write_to_stderr,
)
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
    from armillary.data.console.output import Bar, Column, check_picture, picture, print_table, print_written
    from armillary.data.console.parsing import parse, parse_known, refuse_removed

_SLOW_MODULES = {
    "armillary.data.console.output": ("Bar", "Column", "check_picture", "picture", "print_table", "print_written"),
    "armillary.data.console.parsing": ("parse", "parse_known", "refuse_removed"),
}
"""Modules that need rich or tyro, which ranks of a run do not."""

__getattr__ = imported_at_first_use(__name__, _SLOW_MODULES)
