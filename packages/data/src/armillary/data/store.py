"""`TokenStore`: tokenized documents, in mapped files or in memory, and their split into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.data.errors import DamagedInput
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import Tokenizer

Integers = npt.NDArray[np.integer[Any]]
Index = npt.NDArray[np.int64]
"""Indices of documents, tokens or positions."""
IGNORE = -100
"""Label of tokens without one; `torch.nn.functional.cross_entropy` ignores it by default."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a store's tokens. A field is None if the files of the store do not record it.

    Args:
        tokenizer: `identity` of the tokenizer, equal for tokenizers that encode alike.
        size: number of tokens in the vocabulary, V; tokens are 0..V - 1.
        end_of_document: the token at the end of each document.
    """

    tokenizer: str | None = None
    size: int | None = None
    end_of_document: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        return cls(tokenizer.identity, tokenizer.vocab_size, tokenizer.end_of_document)


@dataclass(eq=False, repr=False)
class TokenStore:
    """Tokenized documents, read on demand.

    `open_store` maps files into memory; `TokenStore.of` tokenizes a few documents in memory.

    Args:
        name: name in error messages; usually a path.
        arrays: 1-D arrays of integers, whose concatenation is the sequence of all tokens. No document continues from
            one array into the next.
        starts, stops: int64 [D], first token of each document in this sequence, and its last token + 1. In stores of
            `armillary-data prepare` and of `TokenStore.of` the last token is the end of document.
        vocabulary: vocabulary of the tokens.
        content: identity of the tokens: stores with equal `content` count as equal.
        hashes: uint64 [D], hash of each document's text, by which `split` chooses training or validation; by default
            the hash of the document's index.
        labels: for each token of `arrays` the label of the token before it, or `IGNORE`; by default the tokens.
    """

    name: str
    arrays: Sequence[Integers]
    starts: Index
    stops: Index
    vocabulary: Vocabulary
    content: str
    hashes: npt.NDArray[np.uint64] | None = None
    labels: Sequence[Integers] | None = None
    bytes_read: int = field(default=0, init=False)
    """Bytes of tokens that `read` has copied."""

    def __post_init__(self) -> None:
        self._array_starts = np.cumsum([0, *map(len, self.arrays)])
        self._plain_arrays = [np.asarray(array) for array in self.arrays]  # indexing a np.memmap takes much longer
        self._label_arrays = None if self.labels is None else [np.asarray(array) for array in self.labels]
        decreasing = np.flatnonzero(self.stops < self.starts)
        if len(decreasing):
            i = int(decreasing[0])
            raise ValueError(
                f"{self.name}: document {i} of {len(self)} ends at token {self.stops[i]}, before its start "
                f"{self.starts[i]} (byte {8 * (i + 1)} of the index); prepare the store again"
            )

    @classmethod
    def of(cls, documents: Iterable[Document], tokenizer: Tokenizer, name: str = "documents") -> TokenStore:
        """Tokenizes documents in memory. Raises ValueError if no document has text; those without are left out."""
        documents = [document for document in documents if document.text]
        if not documents:
            raise ValueError(f"{name}: all documents are empty; give at least one with text")
        token_arrays = [tokenizer.encode(document.text).numpy() for document in documents]
        lengths = np.array([len(tokens) + 1 for tokens in token_arrays])
        stops = np.cumsum(lengths)
        tokens = np.empty(stops[-1], token_dtype(tokenizer.vocab_size))
        for token_array, start in zip(token_arrays, stops - lengths, strict=True):
            tokens[start : start + len(token_array)] = token_array
        tokens[stops - 1] = tokenizer.end_of_document
        hashes = np.array([stable_hash(document.text) for document in documents], np.uint64)
        content = f"{crc32(tokens.data):08x}-{crc32(stops.data):08x}"
        return cls(name, [tokens], stops - lengths, stops, Vocabulary.of(tokenizer), content, hashes)

    def __repr__(self) -> str:
        dtypes = "/".join(dict.fromkeys(str(array.dtype) for array in self.arrays)) or "none"
        vocabulary = "" if self.vocabulary.size is None else f", vocabulary={self.vocabulary.size}"
        return f"TokenStore({self.name!r}, tokens={self.tokens}, documents={len(self)}, dtype={dtypes}{vocabulary})"

    def __len__(self) -> int:
        """Number of documents, D."""
        return len(self.starts)

    @property
    def lengths(self) -> Index:
        """Number of tokens in each document: int64 [D]."""
        return self.stops - self.starts

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.lengths.sum())

    def read(self, document: int, start: int, stop: int, step: int = 1) -> Integers:
        """Returns a copy of tokens `start`, `start + step`, ... before `stop` of a document, in the dtype of the files.

        Raises:
            IndexError: the range is not inside the document.
            DamagedInput: a token is not in the vocabulary, because the files were changed or have another tokenizer.
                The message names the token and the document.
        """
        return self._read(self._plain_arrays, document, start, stop, step)

    def read_labels(self, document: int, start: int, stop: int, step: int = 1) -> Integers:
        """Returns, as `read`, the labels that tokens `start`, `start + step`, ... are for the tokens before them."""
        if self._label_arrays is None:
            return self.read(document, start, stop, step)
        return self._read(self._label_arrays, document, start, stop, step, ignored=IGNORE)

    def _read(
        self,
        arrays: Sequence[Integers],
        document: int,
        start: int,
        stop: int,
        step: int,
        ignored: int | None = None,
    ) -> Integers:
        # Values other than `ignored` must be tokens of the vocabulary.
        first, end = int(self.starts[document]), int(self.stops[document])
        if not 0 <= start <= stop <= end - first:
            raise IndexError(
                f"{self.name}: document {document} has {end - first} tokens; {start}:{stop} is out of range"
            )
        # The last array that starts at or before the document. `min`, because an empty document may start at the end of
        # all arrays, where no array starts.
        i = min(int(np.searchsorted(self._array_starts, first, "right")), len(self.arrays)) - 1
        offset = first - int(self._array_starts[i])
        values = np.array(arrays[i][offset + start : offset + stop : step])
        self.bytes_read += values.nbytes
        size = self.vocabulary.size
        if size is None or not len(values) or (values.max() < size and values.min() >= 0):
            return values
        outside = (values >= size) | (values < 0)
        if ignored is not None:
            outside &= values != ignored
        if outside.any():
            j = int(np.argmax(outside))
            position = start + j * step
            raise DamagedInput(
                f"{self.name}: token {position} of document {document} (token {first + position} of the store) is "
                f"{values[j]}, outside of the vocabulary of {size}; the files were changed (see `armillary-data info "
                "--verify`) or have another tokenizer"
            )
        return values

    def with_vocabulary(self, size: int) -> TokenStore:
        """Returns the store with a vocabulary of `size` tokens, or unchanged if its files record a size."""
        if self.vocabulary.size is not None:
            return self
        return replace(self, vocabulary=replace(self.vocabulary, size=size))

    def select(self, keep: npt.NDArray[np.bool_]) -> TokenStore:
        """Returns a store with the documents for which `keep` [D] is true, in order. Copies no tokens."""
        hashes = None if self.hashes is None else self.hashes[keep]
        return self._with_ranges(self.starts[keep], self.stops[keep], hashes)

    def split(self, validation_fraction: float = 0.05) -> tuple[TokenStore, TokenStore]:
        """Splits documents into (training, validation), deterministically. Both stores have at least one document.

        The choice does not depend on other documents, on their order or on the tokenizer. Copies of a text are in the
        same store, unless all documents are copies of one text. In Megatron's files and `datasets` folders the choice
        depends on the number of the document. Empty documents are left out. The fraction counts documents, not tokens.
        If the store has a single document, its last `validation_fraction` of tokens is the validation document.

        Raises:
            ValueError: a fraction that is not between 0 and 1; less than 2 tokens to split.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1, both excluded")
        if not self.lengths.all():  # some documents are empty
            return self.select(self.lengths > 0).split(validation_fraction)
        if len(self) < 2:  # cuts the only document; both parts have at least one token
            if (size := self.tokens) < 2:
                raise ValueError(f"{self.name} has {size} tokens to split; give at least 2")
            cut = self.stops - min(max(round(size * validation_fraction), 1), size - 1)
            return self._with_ranges(self.starts, cut, self.hashes), self._with_ranges(cut, self.stops, self.hashes)
        # A document is for validation if the hash of its text is below a threshold. If all hashes are, or none, the
        # nearest ones change sides.
        hashes = random_bits("documents", np.arange(len(self))) if self.hashes is None else self.hashes
        # Hashes are uniform in 0..2^64 - 1, so this fraction of them is below the threshold.
        validation = hashes < np.uint64(int(validation_fraction * 2.0**64))
        if not validation.any():
            validation = hashes == hashes.min()
        if validation.all():
            validation = hashes < hashes.max()
        if not validation.any():  # all documents are copies of one text
            validation[0] = True
        return self.select(~validation), self.select(validation)

    def _with_ranges(self, starts: Index, stops: Index, hashes: npt.NDArray[np.uint64] | None) -> TokenStore:
        # A selection of documents has another `content`, so that a loader refuses the state of another selection.
        checksum = crc32(np.ascontiguousarray(stops).data, crc32(np.ascontiguousarray(starts).data))
        return replace(self, starts=starts, stops=stops, hashes=hashes, content=f"{self.content}/{checksum:08x}")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the smallest unsigned dtype that holds every token of a vocabulary."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


# -- hashes and random bits that are equal in every process and release -----------------------------------------------


def stable_hash(key: bytes | str) -> int:
    """Returns a 64-bit hash of `key` that is equal in every process, which Python's own `hash` is not."""
    # Surrogate escapes are in file names that are not valid UTF-8.
    data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def random_bits(key: str, indices: Index) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each index i, uint64: splitmix64's output at i steps after the hash of `key`."""
    # The constants of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
    x = indices.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap around, as the generator requires
    x += np.uint64(stable_hash(key))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
