# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Attention masks: the keys that each query sees, in global positions."""

from armillary.attention.mask.attention_mask import AttentionMask, BoundedCache, Documents, layout_of
from armillary.attention.mask.patterns import Chunked, ImageSpans, Pattern, Prefix, RowMasks
from armillary.attention.mask.slices_trees_blocks import Blocks, Slice, SliceList, Tree
from armillary.core.internal import Window
