"""`TextTokenizer`: a tokenizer defined by a tokenizer.json of the `tokenizers` library. `train_bpe` trains one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.core.files import read_file
from armillary.data.optional import optional
from armillary.data.text.byte_tokenizer import check_tokens
from armillary.data.text.splitting import Tokens, split_text
from armillary.data.text.tokenizer_json import BEGIN, build, check_name, choose_end, parse_definition, read_name

TRAINED_END = "<|endoftext|>"
"""End-of-document token of `train_bpe`."""
MAX_VOCAB_SIZE = 2**24
"""Maximum vocabulary of `train_bpe`. The library allocates it at once, and aborts the process if that fails."""

_BATCH = 16
"""Texts per call of the library, which encodes them in threads. Its result takes about 100 bytes per character."""


class TextTokenizer:
    """Tokenizer of a tokenizer.json.

    `encode` adds the begin of document, if one is given, and no other special token. The name of a special token in a
    text is encoded as ordinary text, never as the special token. Truncation, padding and dropout of the definition are
    disabled. A pickled tokenizer is built again from its definition.

    Args:
        definition: bytes of a tokenizer.json.
        end_of_document: name of the token after each document; by default a usual name that the vocabulary has, such as
            "<|endoftext|>".
        begin_of_document: name of a token before each text; by default none.
        part_size: texts with more characters are encoded in parts, at cuts that do not change their tokens.

    Raises:
        ValueError: not a tokenizer.json, a name that is not in the vocabulary, or part_size below 1.
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
        settings = parse_definition(definition)
        self.definition, self._part_size = definition, part_size
        self.end_name, self.begin_name = choose_end(settings, end_of_document), begin_of_document
        names = [self.end_name]
        if begin_of_document is not None:
            names.append(check_name(settings, "begin_of_document", begin_of_document))
        self._inner = build(settings, names)
        self.vocab_size = max(cast(dict[str, int], self._inner.get_vocab(with_added_tokens=True)).values()) + 1
        self.end_of_document = cast(int, self._inner.token_to_id(self.end_name))
        self._begin = [cast(int, self._inner.token_to_id(name)) for name in names[1:]]
        self._dtype = np.dtype(np.min_scalar_type(self.vocab_size - 1))
        added_tokens = cast(dict[int, Any], self._inner.get_added_tokens_decoder())
        self._special_names = sorted(token.content for token in added_tokens.values() if token.special)
        special_tokens = [token_id for token_id, token in added_tokens.items() if token.special]
        self._is_special = self._special_mask([*special_tokens, self.end_of_document, *self._begin], settings["model"])

    def _special_mask(self, special_tokens: list[int], model: dict[str, Any]) -> NDArray[np.bool_]:
        """Returns a mask [V], true for the special tokens, which `encode` must not produce from text."""
        mask = np.zeros(self.vocab_size, np.bool_)
        mask[special_tokens] = True
        # Text may produce the token for unknown words. Unigram models record its id, other models its name.
        unknown = model["unk_id"] if "unk_id" in model else self._inner.token_to_id(model.get("unk_token") or "")
        if unknown is not None:
            mask[unknown] = False
        return mask

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        end_of_document: str | None = None,
        begin_of_document: str | None = None,
    ) -> TextTokenizer:
        """Reads a tokenizer.json from its path or folder.

        By default both names are those of a tokenizer_config.json in the same folder, if it has them: `eos_token`, and
        in a store's folder `begin_of_document`.

        Raises:
            ValueError: as the constructor, or a file that cannot be read.
            ImportError: as the constructor.
        """
        file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
        try:
            config = file.with_name("tokenizer_config.json")
            end = end_of_document or read_name(config, "eos_token")
            begin = begin_of_document or read_name(config, BEGIN)
            return cls(read_file(file), end_of_document=end, begin_of_document=begin)
        except OSError as error:
            accepted_paths = "give a tokenizer.json, or a folder with one in it"
            raise ValueError(f"{error.filename} cannot be read ({error.strerror}); {accepted_paths}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"end_of_document": self.end_name, "begin_of_document": self.begin_name}
        # A partial, because the other arguments of the constructor are keywords.
        return partial(type(self), part_size=self._part_size, **names), (self.definition,)

    @property
    def identity(self) -> str:
        """Hash of the definition and both names. Tokenizers with equal identities encode alike."""
        names = json.dumps([self.begin_name, self.end_name]).encode()
        return f"sha256:{hashlib.sha256(names + self.definition).hexdigest()}"

    def encode(self, text: bytes | str) -> Tensor:
        """Returns a tensor [T] of uint8, int16 or int32, without the end of document. Invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: a str with half of a surrogate pair, which has no UTF-8 form.
        """
        tokens = self.encode_all([decode_utf8(text)[0] if isinstance(text, bytes) else text])[0]
        dtypes = (torch.uint8, torch.int16, torch.int32)
        dtype = next(dtype for dtype in dtypes if torch.iinfo(dtype).max >= self.vocab_size - 1)
        return torch.from_numpy(tokens.astype(np.int32)).to(dtype)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes several texts at once, as `encode`. Returns an array [T] of uint8, uint16 or uint32 for each text."""
        parts_by_text = [
            split_text(text, self._part_size, lambda part: next(self._encode_parts([part]))) for text in texts
        ]
        # Parts of all texts are encoded in common batches; then each text takes as many results as it has parts.
        tokens = self._encode_parts([part for parts in parts_by_text for part in parts])
        begin = np.array(self._begin, self._dtype)
        return [np.concatenate([begin, *islice(tokens, len(parts))]) for parts in parts_by_text]

    def encode_template(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes texts of a chat template: names of special tokens become these tokens, and no begin is added."""
        if not texts:  # saves the seconds that building the second tokenizer takes
            return []
        encodings = self._template_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.fromiter(text.ids, self._dtype) for text in encodings]

    @cached_property
    def _template_tokenizer(self) -> Any:
        """A tokenizer of the same definition that reads the names of special tokens as these tokens."""
        tokenizer = build(parse_definition(self.definition), [self.end_name])
        tokenizer.encode_special_tokens = False
        return tokenizer

    def special_in(self, text: str) -> str | None:
        """Returns the name of a special token that the text contains, or None."""
        return next((name for name in self._special_names if name in text), None)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Token ids that `encode` adds before each text."""
        return tuple(self._begin)

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of an integer tensor [T], with special tokens by name.

        Raises:
            ValueError: a token outside of the vocabulary.
        """
        values = cast(list[int], tokens.tolist())
        check_tokens(values, self.vocab_size)
        return self._inner.decode(values, skip_special_tokens=False)

    def _encode_parts(self, texts: Sequence[str]) -> Iterator[Tokens]:
        """Yields the tokens of each text, without a begin of document."""
        for start in range(0, len(texts), _BATCH):
            try:
                encodings = self._inner.encode_batch_fast(texts[start : start + _BATCH], add_special_tokens=False)
            except TypeError as error:
                raise ValueError(f"{error}; UTF-8 cannot encode half of a surrogate pair") from error
            for text in encodings:
                tokens = np.fromiter(text.ids, self._dtype)
                yield self._spell_specials(tokens) if self._is_special[tokens].any() else tokens

    def _spell_specials(self, tokens: Tokens) -> Tokens:
        """Replaces special tokens by the tokens of their names as ordinary text."""
        # The library's setting `encode_special_tokens` keeps text from becoming special tokens, with one exception: the
        # vocabulary of a Unigram model may have their names as ordinary words.
        token_ids: list[int] = []
        for token in tokens.tolist():
            if not self._is_special[token]:
                token_ids.append(token)
                continue
            name = cast(str, self._inner.id_to_token(token))
            # In two pieces, because the model would map the complete name to the special token again.
            for piece in (name[:1], name[1:]):
                if piece:
                    token_ids += [part.id for part in self._inner.model.tokenize(piece)]
        return np.array(token_ids, self._dtype)


def decode_utf8(text: bytes) -> tuple[str, bool]:
    """Returns (the text, with U+FFFD for invalid UTF-8; True if it was invalid)."""
    try:
        return text.decode(), False
    except UnicodeDecodeError:
        return text.decode(errors="replace"), True


def train_bpe(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
    """Trains a byte-level BPE tokenizer, which encodes any text without loss.

    The vocabulary consists of the end of document `<|endoftext|>`, the 256 bytes, and the most frequent merges. If the
    texts are too short for `vocab_size` tokens, it has fewer. Equal texts give equal definitions.

    Raises:
        ValueError: a vocab_size below 257 or above `MAX_VOCAB_SIZE`.
        ImportError: the `tokenizers` library is not installed.
    """
    check_vocab_size(vocab_size)
    library = optional("tokenizers", "tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[TRAINED_END],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str().encode())


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError for a vocabulary size that `train_bpe` refuses."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, for 256 bytes and an end of document; got {vocab_size}")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE:,}; got {vocab_size}")
