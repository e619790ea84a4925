"""Tokens of text, by a tokenizer.json such as the `tokenizers` library reads and writes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.data.optional import optional
from armillary.data.text.long_texts import Tokens, parts
from armillary.data.text.tokenizer_json import BEGIN, build, check_name, choose_end, configured, settings_of

TRAINED_END = "<|endoftext|>"
"""Name of the end of document in tokenizers that are trained here."""

_AT_ONCE = 16
"""Texts handed to the library at a time, which encodes them in threads; encoded, a character takes about 100 bytes."""


class TextTokenizer:
    """Tokens of a tokenizer.json, of the text alone.

    No token is added but the begin that was asked for. Text that spells a special token gives the tokens of its
    letters, never the special token. Truncation, padding and random merges that the definition asks for are off.
    Copies in other processes (pickle) are built from `definition` anew.

    Args:
        definition: the bytes of a tokenizer.json; kept as they are.
        end_of_document: name of the token that follows each document; by default the first of the usual names that
            the vocabulary has.
        begin_of_document: name of a token to put in front of each text; by default none.
        part_size: longer texts (in characters) are encoded in parts, where that gives the same tokens.

    Raises:
        ValueError: not a tokenizer.json, a name that the vocabulary lacks, part_size below 1.
        ImportError: the `tokenizers` library is not installed.
    """

    def __init__(
        self,
        definition: bytes,
        *,
        end_of_document: str | None = None,
        begin_of_document: str | None = None,
        part_size: int = 1 << 18,
    ) -> None:
        if part_size < 1:
            raise ValueError(f"part_size must be at least 1 character; got {part_size}")
        settings = settings_of(definition)
        self.definition, self._part_size = definition, part_size
        self.end_name, self.begin_name = choose_end(settings, end_of_document), begin_of_document
        begins = [] if begin_of_document is None else [check_name(settings, "begin_of_document", begin_of_document)]
        self._inner = build(settings, [self.end_name, *begins])
        self.vocab_size = max(cast(dict[str, int], self._inner.get_vocab(with_added_tokens=True)).values()) + 1
        self.end_of_document = cast(int, self._inner.token_to_id(self.end_name))
        self._begin = [cast(int, self._inner.token_to_id(name)) for name in begins]
        self._is_special = self._find_special(settings["model"])
        added = cast(dict[int, Any], self._inner.get_added_tokens_decoder()).values()
        self._special_names = sorted(token.content for token in added if token.special)
        self._of_templates: Any = None

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        end_of_document: str | None = None,
        begin_of_document: str | None = None,
    ) -> TextTokenizer:
        """From a tokenizer.json, or a folder with one in it.

        The end of document is by default the `eos_token` of a tokenizer_config.json beside it, if there is one.

        Raises:
            ValueError: as the constructor does, or a file that cannot be read.
        """
        file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
        try:
            config = file.with_name("tokenizer_config.json")
            end = end_of_document or configured(config, "eos_token")
            begin = begin_of_document or configured(config, BEGIN)
            return cls(file.read_bytes(), end_of_document=end, begin_of_document=begin)
        except OSError as error:
            accepted = "give a tokenizer.json, or a folder with one in it"
            raise ValueError(f"{error.filename} cannot be read ({error.strerror}); {accepted}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"end_of_document": self.end_name, "begin_of_document": self.begin_name}
        return partial(type(self), part_size=self._part_size, **names), (self.definition,)

    @property
    def identity(self) -> str:
        """The same for tokenizers that give the same tokens: a hash of the definition and of both names."""
        names = json.dumps([self.begin_name, self.end_name]).encode()
        return f"sha256:{hashlib.sha256(names + self.definition).hexdigest()}"

    def encode(self, text: bytes | str) -> Tensor:
        """A tensor [T] of uint8, int16 or int32, without the end of document. Broken UTF-8 is read as U+FFFD.

        Raises:
            ValueError: a str that no UTF-8 can hold (half of a surrogate pair).
        """
        tokens = self.encode_all([decoded(text)[0] if isinstance(text, bytes) else text])[0]
        kinds = (torch.uint8, torch.int16, torch.int32)
        kind = next(kind for kind in kinds if torch.iinfo(kind).max >= self.vocab_size - 1)
        return torch.from_numpy(tokens.astype(np.int32)).to(kind)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """An array [T] of uint8, uint16 or uint32 for each text, all in one go; otherwise as `encode`."""
        cut = [parts(text, self._part_size, lambda part: next(self._encode_parts([part]))) for text in texts]
        tokens = self._encode_parts([part for text in cut for part in text])
        begin = np.array(self._begin, self._dtype)
        return [np.concatenate([begin, *islice(tokens, len(text))]) for text in cut]

    def encode_written(self, texts: Sequence[str]) -> list[Tokens]:
        """As `encode_all` for what a chat template has written: there the names of special tokens are these tokens, and
        none is put in front."""
        if self._of_templates is None:
            self._of_templates = build(settings_of(self.definition), [self.end_name])
            self._of_templates.encode_special_tokens = False
        encoded = self._of_templates.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.fromiter(text.ids, self._dtype) for text in encoded]

    def special_in(self, text: str) -> str | None:
        """The name of a special token that the text spells, if there is one."""
        return next((name for name in self._special_names if name in text), None)

    @property
    def begins(self) -> int:
        """Tokens in front of each text."""
        return len(self._begin)

    def decode(self, tokens: Tensor) -> str:
        """The text of an integer tensor [T]; special tokens are shown by name.

        Raises:
            ValueError: a token that is not one of the vocabulary.
        """
        values = cast(list[int], tokens.tolist())
        unknown = [value for value in values if not 0 <= value < self.vocab_size]
        if unknown:
            raise ValueError(f"token {unknown[0]} is not one of the {self.vocab_size} tokens 0..{self.vocab_size - 1}")
        return self._inner.decode(values, skip_special_tokens=False)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.min_scalar_type(self.vocab_size - 1))

    def _encode_parts(self, texts: Sequence[str]) -> Iterator[Tokens]:
        for start in range(0, len(texts), _AT_ONCE):
            try:
                encoded = self._inner.encode_batch_fast(texts[start : start + _AT_ONCE], add_special_tokens=False)
            except TypeError as error:
                raise ValueError(f"{error}, and one that UTF-8 can hold: no half of a surrogate pair") from error
            yield from (self._spelled(np.fromiter(text.ids, self._dtype)) for text in encoded)

    def _spelled(self, tokens: Tokens) -> Tokens:
        """Where a special token came out of text, the tokens of its letters: Unigram models have it as a word."""
        if not self._is_special[tokens].any():
            return tokens
        spelled = ([token] if not self._is_special[token] else self._letters(token) for token in tokens.tolist())
        return np.array([token for some in spelled for token in some], self._dtype)

    def _letters(self, token: int) -> list[int]:
        name = cast(str, self._inner.id_to_token(token))
        halves = filter(None, (name[:1], name[1:]))
        return [part.id for half in halves for part in self._inner.model.tokenize(half)]

    def _find_special(self, model: dict[str, Any]) -> NDArray[np.bool_]:
        """Which tokens [V] text must not give. The token for what is unknown is one of those that it may give."""
        added = cast(dict[int, Any], self._inner.get_added_tokens_decoder())
        tokens = [token for token, content in added.items() if content.special]
        special = np.zeros(self.vocab_size, np.bool_)
        special[[*tokens, self.end_of_document, *self._begin]] = True
        unknown = model["unk_id"] if "unk_id" in model else self._inner.token_to_id(model.get("unk_token") or "")
        if unknown is not None:
            special[unknown] = False
        return special


def decoded(text: bytes) -> tuple[str, bool]:
    """`text` with U+FFFD for what is not UTF-8, and whether anything was not."""
    try:
        return text.decode(), False
    except UnicodeDecodeError:
        return text.decode(errors="replace"), True


LARGEST = 2**24
"""Of trained vocabularies: the library asks for the room at once, and ends the process where there is none."""


def train_bpe(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE from scratch: any bytes have tokens, and text comes back as it went in.

    Tokens are the end of document `<|endoftext|>`, the 256 bytes, and what they are merged to most often; fewer than
    `vocab_size` where there is too little text. The same texts give the same definition every time.

    Raises:
        ValueError: a vocab_size below 257.
        ImportError: the `tokenizers` library is not installed.
    """
    check_vocab_size(vocab_size)
    library = optional("tokenizers", "tokenizers")
    by_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = by_bytes, library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[TRAINED_END],
        initial_alphabet=sorted(by_bytes.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str().encode())


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a size that `train_bpe` cannot have.

    Raises:
        ValueError: it is below 257, or more than the library can make room for.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, for 256 bytes and an end of document; got {vocab_size}")
    if vocab_size > LARGEST:
        raise ValueError(f"vocab_size must be at most {LARGEST:,}; got {vocab_size}")
