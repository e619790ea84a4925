# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Parts of data that the trainer and the planner are built from."""

from armillary.data.detection import has_tokenizer, open_tokens, read_tokenizer, tokenizer_of
from armillary.data.inspection import packed_rows
from armillary.data.loader.batches import Documents, Parents
from armillary.data.packing import PACKINGS
from armillary.data.text.tokenizer import BEGIN, TextStreamer, TwoWayTokenizer
