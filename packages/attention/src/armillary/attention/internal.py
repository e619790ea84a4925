# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""What our own packages take of attention beyond its face. It changes without notice."""

from armillary.attention.call.calls import sent_projections
from armillary.attention.call.qkv_sources import ProjectionParts, head_slices, select_heads, update_heads
from armillary.attention.call.recompute import (
    GradientSums,
    RNGReplay,
    autocast_enabled,
    capture_autocast,
    outside_autocast,
)
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import check_call, over_all_ranks
from armillary.attention.context_parallel.batch import IGNORED, ContextParallelBatch, documents_of_positions
from armillary.attention.context_parallel.communication import (
    TensorCache,
    find_axes,
    gather_integers,
    gather_tokens,
    method_axes,
    sequence_axis,
    sum_over_axes,
)
from armillary.attention.context_parallel.rank_comparison import RankComparison, describe_unequal, digests_of
from armillary.attention.context_parallel.sdpa import (
    Registries,
    Routing,
    ShardedImplementation,
    in_backward,
    method_of_implementation,
    unbound,
)
from armillary.attention.context_parallel.sequence import SequenceContext, check_method, check_tokens, current_sequence
from armillary.attention.context_parallel.verification import VERIFIERS, observe_shard
from armillary.attention.kernels import (
    FAMILIES,
    MULTIPROCESSORS,
    PERSISTENT,
    BackwardTensors,
    Cudnn,
    Flash,
    FlashAttn3,
    FlashCall,
    Inputs,
    Kernel,
    check_kernel_name,
    choose_kernel,
    default_margin,
    efficiency,
    is_installed,
    kernel_candidates,
)
from armillary.attention.mask import Documents
from armillary.attention.method_registry import (
    ALIASES,
    HEAD_METHODS,
    SEQUENCE_METHODS,
    MethodOptions,
    NamedMethod,
    methods_without_plan,
    named_method,
    names,
    variants,
)
from armillary.attention.methods.base import check_rank_grid
from armillary.attention.methods.wallfacer import Placement
from armillary.attention.post_training import segment_sum
