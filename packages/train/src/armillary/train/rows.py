"""Token stores of a run, and the rows packed from them for training and for validation."""

from __future__ import annotations

from pathlib import Path

from armillary.attention import Method
from armillary.core import SequenceLayout
from armillary.data import Batch, PackedSequences, TokenStore, check_length, python_corpus
from armillary.data.console import flag_in_errors
from armillary.data.parts import PACKINGS, Documents, open_tokens, read_tokenizer
from armillary.models import pretrained_config
from armillary.train.config.sections import Config, DataConfig, ModelConfig
from armillary.train.run import batch_mask


def open_stores(config: DataConfig, pretrained: Path | None = None) -> list[TokenStore]:
    """Returns the stores at the configured paths; text is tokenized in memory.

    Args:
        pretrained: folder of the model; its tokenizer reads text, if it has one.

    Raises:
        ValueError: a path is unreadable, incomplete or without text, or its tokens are not the pretrained model's.
    """
    if not config.path:
        return [TokenStore.of(python_corpus(), read_tokenizer(pretrained), "Python's own text")]
    return [open_tokens(path, pretrained) for path in config.path]


def vocabulary_size(stores: list[TokenStore], model: ModelConfig) -> int:
    """Returns the vocabulary size of the model: from the pretrained folder or the flag, else from the stores.

    Raises:
        ValueError: the model's vocabulary is smaller than a store's, or neither flag, folder nor store states a size.
    """
    store_size = max((store.vocabulary.size for store in stores if store.vocabulary.size), default=None)
    size = model.vocab_size if model.pretrained is None else pretrained_config(model.pretrained).vocab_size
    if size is None and store_size is None:
        raise ValueError(f"{stores[0].name} does not record the size of its vocabulary; set --model.vocab-size")
    if size is not None and store_size is not None and size < store_size:
        tokens = f"the tokens of the data go up to {store_size - 1}"
        if model.pretrained is not None:
            raise ValueError(f"--model.pretrained {model.pretrained}: its vocabulary has {size} tokens, but {tokens}")
        raise ValueError(f"--model.vocab-size {size}: {tokens}; give at least {store_size}")
    return size or store_size or 0


def load_rows(
    config: Config, stores: list[TokenStore], attention: Method, replica: int
) -> tuple[PackedSequences, PackedSequences]:
    """Returns packed rows for training and for validation, from disjoint sets of documents.

    Args:
        attention: method whose layout and shard decide which tokens of a row this rank reads.
        replica: this rank's data-parallel index.

    Raises:
        ValueError: the stores' documents cannot be split or mixed, or have fewer tokens in total than a row.
    """
    length, kind = config.data.sequence_length, config.data.layout
    with flag_in_errors("--data.sequence-length"):  # fewer tokens than shards, or more than the stores have
        check_length(stores, length)
        layout = attention.layout(length, kind)

    # A balanced layout gives ranks nearly equal numbers of visible pairs, which depend on the batch's documents.
    def balanced_layout(documents: Documents) -> SequenceLayout:
        return attention.layout(length, "balanced", batch_mask(documents, None, config.data.documents))

    # The loader's thread plans attention (tiles and sends) for the next batch, while the current one trains.
    def plan(batch: Batch) -> None:
        mask = batch_mask(batch.documents, None, config.data.documents)
        attention.plan_ahead(mask, batch.layout, len(batch.documents))

    def rows(stores_subset: list[TokenStore]) -> PackedSequences:
        return PackedSequences(
            stores_subset,
            layout=layout,
            shard=attention.shard,
            rows_per_batch=config.rows_per_batch,
            packing=PACKINGS[config.data.packing],
            weights=config.data.weights or None,
            seed=config.train.seed,
            replica=replica,
            replicas=config.replicas,
            reset_positions=config.data.reset_positions,
            layout_for=balanced_layout if kind == "balanced" and config.data.documents else None,
            # Without documents every batch has the same mask and layout: the first call's plan serves all.
            plan=plan if config.data.documents else None,
        )

    training, validation = zip(*(store.split(config.data.validation_fraction) for store in stores), strict=True)
    return rows(list(training)), rows(list(validation))
