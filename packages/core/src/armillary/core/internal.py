# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""What our own packages take of core beyond its face. It changes without notice."""

from importlib import import_module
from typing import TYPE_CHECKING

from armillary.core import compat
from armillary.core.argument_checks import (
    MAX_COUNT,
    Window,
    boundaries_of,
    check_bool,
    check_choice,
    check_local,
    check_tensor,
    count,
    documents_of,
    integer,
    number,
    window_of,
)
from armillary.core.balance import uncut_spans
from armillary.core.collectives.collective import PackedHeads, start_head_to_parts, start_packed_to_head
from armillary.core.collectives.merge import pivot
from armillary.core.compat import imported_at_first_use
from armillary.core.files import (
    file_size,
    is_file_name,
    open_file,
    parse_json,
    parse_object,
    parse_toml,
    read_file,
    read_json,
    write_synced,
    write_whole,
    writing,
)
from armillary.core.gradients import mesh_ranks, parameters_outside_fsdp
from armillary.core.graph_ops import (
    OpArguments,
    define_op,
    define_pair,
    object_of,
    own_memory,
    pack,
    pack_registered,
    register,
    register_as_tensor,
    traced_axis,
    unpack,
)
from armillary.core.layout import Side
from armillary.core.ledger import KINDS, PHASES, phase
from armillary.core.mesh import binds_device, check_axes, divide_axis
from armillary.core.slices import (
    FAR,
    MISSING,
    Integers,
    Slices,
    band,
    count_pairs,
    document_slices,
    mask_slices,
    misplaced_segment,
    path_depths,
    segments_of,
    slice_array,
    trim,
    widen,
    within_band,
)
from armillary.core.spans import Spans, cut
from armillary.core.token_chunks import at_tokens, chunks, is_simulating, simulating
from armillary.core.token_move_tables import Owners
from armillary.core.trace import NO_SPAN, current_label

if TYPE_CHECKING:
    from armillary.core import dtensor


def __getattr__(name: str) -> object:
    if name == "dtensor":  # its import of torch's DTensor takes seconds
        return import_module("armillary.core.dtensor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
