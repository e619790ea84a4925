"""Token rows for sharded sequences: each rank gets the tokens, labels and positions of its layout."""

from importlib.metadata import version

from armillary.core import LabelTriples
from armillary.data.detection import is_store, open_store
from armillary.data.formats.store_folder import verify_folder
from armillary.data.loader.batches import Batch, Batches
from armillary.data.loader.packed_sequences import PackedSequences, check_length
from armillary.data.packing import best_fit, greedy, one_per_row
from armillary.data.store import IGNORE, TokenStore, Vocabulary
from armillary.data.text.corpus import Document, binary, python_corpus, read_documents
from armillary.data.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from armillary.data.trees import PrefixTree, prefix_tree, tree_batch

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Document",
    "LabelTriples",
    "PackedSequences",
    "PrefixTree",
    "TextTokenizer",
    "TokenStore",
    "Tokenizer",
    "Vocabulary",
    "__version__",
    "best_fit",
    "binary",
    "check_length",
    "greedy",
    "is_store",
    "one_per_row",
    "open_store",
    "prefix_tree",
    "python_corpus",
    "read_documents",
    "tree_batch",
    "verify_folder",
]

__version__ = version("armillary-data")
