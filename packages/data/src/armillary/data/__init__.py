"""Token rows for sharded sequences: each rank gets the tokens, labels and positions of its layout."""

from armillary.data.corpus import Document, python_corpus, read_documents, split_documents
from armillary.data.rows import IGNORE, Batch, PackedSequences
from armillary.data.tokens import ByteTokenizer, Tokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Document",
    "PackedSequences",
    "Tokenizer",
    "python_corpus",
    "read_documents",
    "split_documents",
]
