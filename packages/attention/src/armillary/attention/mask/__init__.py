"""Attention masks: the keys that each query sees, in global positions."""

from armillary.attention.mask.attention_mask import AttentionMask
from armillary.attention.mask.blocks import Blocks
from armillary.attention.mask.chunked import Chunked
from armillary.attention.mask.image_spans import ImageSpans
from armillary.attention.mask.pattern import Pattern
from armillary.attention.mask.prefix import Prefix
from armillary.attention.mask.row_masks import RowMasks
from armillary.attention.mask.slice_list import Slice, SliceList
from armillary.attention.mask.tree import Tree
from armillary.core.parts import Window

__all__ = [
    "AttentionMask",
    "Blocks",
    "Chunked",
    "ImageSpans",
    "Pattern",
    "Prefix",
    "RowMasks",
    "Slice",
    "SliceList",
    "Tree",
    "Window",
]
