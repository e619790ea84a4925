"""Building blocks of commands: numbers with units, tables, pictures, and errors as one line with an exit code."""

from armillary.data.console.exit import (
    EXPLAINED,
    FAILED,
    PEER_ERRORS,
    REFUSALS,
    exit_on_error,
    exit_with,
    one_line,
    print_lines,
)
from armillary.data.console.failure import printable, report_failure, write_to_stderr
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
from armillary.data.parsing import parse, parse_known, refuse_removed
from armillary.data.progress import Bar

__all__ = [
    "BYTES_SUCH_AS",
    "Bar",
    "Column",
    "EXPLAINED",
    "FAILED",
    "LARGEST",
    "PEER_ERRORS",
    "REFUSALS",
    "SUCH_AS",
    "byte_quantity",
    "check_picture",
    "exit_on_error",
    "exit_with",
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
