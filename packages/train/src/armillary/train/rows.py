"""What a run reads: stores of tokens, and rows of them for training and for validation."""

from __future__ import annotations

from pathlib import Path

from armillary.attention import AttentionMask, Method
from armillary.core import SequenceLayout
from armillary.data import (
    ByteTokenizer,
    PackedSequences,
    TokenStore,
    best_fit,
    greedy,
    is_store,
    one_per_row,
    open_store,
    python_corpus,
    read_documents,
)
from armillary.train.config import Config, DataConfig

PACKED = {".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files that hold more than their text."""
PACKINGS = {"greedy": greedy, "best_fit": best_fit, "one_per_row": one_per_row}


def open_stores(config: DataConfig) -> list[TokenStore]:
    """The stores at the configured paths; text is made into bytes in memory.

    Raises:
        ValueError: something that cannot be read, is not finished, or holds no text.
    """
    if not config.path:
        return [TokenStore.of(python_corpus(), ByteTokenizer(), "Python's own text")]
    return [open_path(path) for path in config.path]


def open_path(path: Path) -> TokenStore:
    """A store, or text as bytes.

    Raises:
        ValueError: files that are neither, as far as their names tell.
    """
    if is_store(path):
        return open_store(path)
    if path.suffix in PACKED or (path / "tokens.bin").exists():
        raise ValueError(
            f"{path} is no text to be read as it is; make a token store of it with `armillary-data prepare`"
        )
    return TokenStore.of(read_documents(path), ByteTokenizer(), str(path))


def vocabulary_size(stores: list[TokenStore], asked: int | None) -> int:
    """Tokens that a model of these stores must know: as many as asked for, else as the stores say.

    Raises:
        ValueError: fewer were asked for than a store has, or neither says.
    """
    known = max((store.vocabulary.size for store in stores if store.vocabulary.size), default=None)
    if asked is None and known is None:
        raise ValueError(f"{stores[0].name} does not say how large its vocabulary is; set --model.vocab-size")
    if asked is not None and known is not None and asked < known:
        raise ValueError(
            f"--model.vocab-size {asked}: the tokens of the data go up to {known - 1}; give at least {known}"
        )
    return asked or known or 0


def load_rows(
    config: Config, stores: list[TokenStore], attention: Method, replica: int, replicas: int
) -> tuple[PackedSequences, PackedSequences]:
    """Rows for training and for validation, from documents that neither shares with the other.

    Raises:
        ValueError: documents that cannot be split, or mixed.
    """
    length, kind = config.data.sequence_length, config.data.layout

    def balanced(documents: tuple[tuple[int, ...], ...]) -> SequenceLayout:
        return attention.layout(length, "balanced", AttentionMask(documents=documents))

    def rows(part: list[TokenStore]) -> PackedSequences:
        return PackedSequences(
            part,
            layout=attention.layout(length, kind),
            shard=attention.shard,
            rows_per_batch=config.data.rows // (replicas * config.train.accumulation),
            packing=PACKINGS[config.data.packing],
            weights=config.data.weights or None,
            seed=config.train.seed,
            replica=replica,
            replicas=replicas,
            reset_positions=config.data.reset_positions,
            layout_for=balanced if kind == "balanced" and config.data.document_mask else None,
        )

    training, validation = zip(*(store.split(config.data.validation_fraction) for store in stores), strict=True)
    return rows(list(training)), rows(list(validation))
