"""Documents as tokens that stay where they are: on disk behind a memory map, or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.commands import DamagedInput
from armillary.data.shuffle import Index, bits, stable_hash
from armillary.data.text.byte_tokenizer import Tokenizer
from armillary.data.text.corpus import Document
from armillary.data.trees import SegmentTable, SegmentTree

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a store mean; None where its files do not say.

    Args:
        tokenizer: `identity` of the tokenizer that made them.
        size: V; every token is smaller.
        end_of_document: the token that each document ends with.
    """

    tokenizer: str | None = None
    size: int | None = None
    end_of_document: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        return cls(tokenizer.identity, tokenizer.vocab_size, tokenizer.end_of_document)


@dataclass(eq=False)
class TokenStore:
    """Documents as tokens, of which only what is asked for is read.

    `open_store` maps files into memory; `TokenStore.of` makes a store of a few documents without files. Both are the
    same from then on. What a store costs in memory is 16 bytes a document at most, and what is read.

    Args:
        name: for messages; mostly a path.
        segments: all tokens, 1-D arrays of integers, addressed as if joined. No document lies in two of them.
        starts, stops: int64 [D], where each document begins and ends, its end of document included.
        vocabulary: what the tokens mean.
        content: tells these tokens from others; of two stores with the same `content` each document is the same.
        hashes: uint64 [D] of the documents' text, by which they are split; by default, of their numbers.
        trees: the segments of documents that are trees, such as prompts with several completions; by default none is.
    """

    name: str
    segments: Sequence[Integers]
    starts: Index
    stops: Index
    vocabulary: Vocabulary
    content: str
    hashes: npt.NDArray[np.uint64] | None = None
    trees: SegmentTable | None = None
    bytes_read: int = field(default=0, init=False)
    """Bytes of tokens that `read` has copied out."""

    def __post_init__(self) -> None:
        self._bases = np.cumsum([0, *map(len, self.segments)])
        self._plain = [np.asarray(segment) for segment in self.segments]  # a memmap is slow to take parts of
        falling = np.flatnonzero(self.stops < self.starts)
        if len(falling):
            i = int(falling[0])
            raise ValueError(
                f"{self.name}: document {i} of {len(self)} ends at token {self.stops[i]}, before its start "
                f"{self.starts[i]} (byte {8 * (i + 1)} of the index); prepare the store again"
            )

    @classmethod
    def of(cls, documents: Iterable[Document], tokenizer: Tokenizer, name: str = "documents") -> TokenStore:
        """The documents, kept in memory as tokens; empty ones are left out.

        Raises:
            ValueError: nothing but empty documents.
        """
        kept = [document for document in documents if document.text]
        if not kept:
            raise ValueError(f"{name}: there is no text in these documents; give at least one that is not empty")
        encoded = [tokenizer.encode(document.text).numpy() for document in kept]
        lengths = np.array([len(tokens) + 1 for tokens in encoded])
        stops = np.cumsum(lengths)
        tokens = np.empty(stops[-1], np.min_scalar_type(tokenizer.vocab_size - 1))
        for part, start in zip(encoded, stops - lengths, strict=True):
            tokens[start : start + len(part)] = part
        tokens[stops - 1] = tokenizer.end_of_document
        hashes = np.array([stable_hash(document.text) for document in kept], np.uint64)
        content = f"{crc32(tokens.data):08x}-{crc32(stops.data):08x}"
        return cls(name, [tokens], stops - lengths, stops, Vocabulary.of(tokenizer), content, hashes)

    def __len__(self) -> int:
        """Documents, D."""
        return len(self.starts)

    @property
    def lengths(self) -> Index:
        """Tokens of each document: int64 [D]."""
        return self.stops - self.starts

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def read(self, document: int, start: int, stop: int, step: int = 1) -> Integers:
        """Tokens `start`, `start + step`, ... before `stop` of a document: a copy, in the dtype of the files.

        Raises:
            IndexError: a part that the document does not have.
            DamagedInput: a token outside of the vocabulary, as of files that were changed; names document and place.
        """
        first, end = int(self.starts[document]), int(self.stops[document])
        if not 0 <= start <= stop <= end - first:
            raise IndexError(
                f"{self.name}: document {document} has {end - first} tokens; {start}:{stop} were asked for"
            )
        segment = min(int(np.searchsorted(self._bases, first, "right")), len(self.segments)) - 1
        base = first - int(self._bases[segment])
        found = np.array(self._plain[segment][base + start : base + stop : step])
        self.bytes_read += found.nbytes
        self._check_tokens(found, document, start, step)
        return found

    def tree(self, document: int) -> SegmentTree:
        """The segments of a document; one if the store has no trees."""
        start, stop = int(self.starts[document]), int(self.stops[document])
        if self.trees is not None:
            return self.trees.tree(start, stop)
        return SegmentTree(np.zeros(1, np.int64), np.array([stop - start]), (-1,), np.ones(1, np.bool_), np.ones(1))

    def _check_tokens(self, found: Integers, document: int, start: int, step: int) -> None:
        size = self.vocabulary.size
        if size is None or not len(found) or (found.max() < size and found.min() >= 0):
            return
        i = int(np.argmax((found >= size) | (found < 0)))
        at = start + i * step
        raise DamagedInput(
            f"{self.name}: token {at} of document {document} (token {int(self.starts[document]) + at} of the store) is "
            f"{found[i]}, and the vocabulary has {size}; the files were changed, see `armillary-data info --verify`"
        )

    # -- parts ----------------------------------------------------------------------------------------------------

    def bounded(self, size: int) -> TokenStore:
        """The store with a vocabulary of `size` tokens, if its files do not say how large theirs is."""
        if self.vocabulary.size is not None:
            return self
        return replace(self, vocabulary=replace(self.vocabulary, size=size))

    def select(self, keep: npt.NDArray[np.bool_]) -> TokenStore:
        """The documents for which `keep` [D] is true, in the same order. No token is copied."""
        hashes = None if self.hashes is None else self.hashes[keep]
        return self._with(self.starts[keep], self.stops[keep], hashes)

    def split(self, validation_fraction: float = 0.05) -> tuple[TokenStore, TokenStore]:
        """Training and validation documents, neither side empty; each is whole, on the same side every time.

        The hash of a document's text alone decides, so other documents, their order and the tokenizer do not matter,
        and copies of one text are on the same side, unless there is no other text; where one side would be empty, it
        gets the nearest document. Stores that keep no hashes go by the numbers of documents. Empty documents are left
        out. The fraction counts documents, not tokens. A single document is cut instead: its last `validation_fraction`
        tokens are the validation document.

        Raises:
            ValueError: nothing to split, or a fraction that is not between 0 and 1.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1, both excluded")
        if not self.lengths.all():
            return self.select(self.lengths > 0).split(validation_fraction)
        if len(self) < 2:
            return self._split_tokens(validation_fraction)
        hashes = bits("documents", np.arange(len(self))) if self.hashes is None else self.hashes
        validation = hashes < np.uint64(int(validation_fraction * 2.0**64))
        if not validation.any():
            validation = hashes == hashes.min()
        if validation.all():
            validation = hashes < hashes.max()
        if not validation.any():  # all are copies of one text
            validation[0] = True
        return self.select(~validation), self.select(validation)

    def _split_tokens(self, fraction: float) -> tuple[TokenStore, TokenStore]:
        size = self.tokens
        if self.trees is not None:
            raise ValueError(f"{self.name} has one tree, which cannot be split; give at least 2")
        if size < 2:
            raise ValueError(f"{self.name} has {size} tokens to split; give at least 2")
        cut = self.stops - min(max(round(size * fraction), 1), size - 1)
        return self._with(self.starts, cut, self.hashes), self._with(cut, self.stops, self.hashes)

    def _with(self, starts: Index, stops: Index, hashes: npt.NDArray[np.uint64] | None) -> TokenStore:
        part = crc32(np.ascontiguousarray(stops).data, crc32(np.ascontiguousarray(starts).data))
        return replace(self, starts=starts, stops=stops, hashes=hashes, content=f"{self.content}/{part:08x}")


def check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    """Refuses a store that was not made by this tokenizer, as far as its files say."""
    found, asked = store.vocabulary, Vocabulary.of(tokenizer)
    if found.tokenizer is not None and found.tokenizer != asked.tokenizer:
        raise ValueError(
            f"{store.name} holds tokens of tokenizer {found.tokenizer}, not of {asked.tokenizer}; prepare it again or "
            "use the tokenizer that it was made with"
        )
