"""Tokenizers: bytes as tokens, any tokenizer.json, BPE training; and the text of token streams."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.core.internal import parse_object, read_file, read_json
from armillary.data.errors import optional, readable


class Tokenizer(Protocol):
    """Interface of tokenizers for stores and models."""

    @property
    def identity(self) -> str:
        """Identifier that is equal for tokenizers that give the same tokens for every text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V, including `end_of_document`: tokens are 0..V - 1."""
        ...

    @property
    def end_of_document(self) -> int:
        """Token after each document."""
        ...

    def encode(self, text: bytes | str) -> Tensor:
        """Returns a tensor [T] of uint8, int16 or int32 that can hold every token, without `end_of_document`."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokens 0 to 255 are bytes; token 256 ends a document."""

    @property
    def identity(self) -> str:
        return "bytes"

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def end_of_document(self) -> int:
        return 256

    def encode(self, text: bytes | str) -> Tensor:
        """Returns the bytes of `text`, in UTF-8 for a str: an int16 tensor [T]."""
        data = bytearray(text.encode() if isinstance(text, str) else text)
        # `frombuffer` warns about read-only buffers such as bytes, hence the bytearray, and refuses an empty one.
        return torch.frombuffer(data, dtype=torch.uint8).short() if data else torch.empty(0, dtype=torch.int16)

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of tokens [T], with U+FFFD for broken UTF-8 and line breaks for ends of documents.

        Raises:
            ValueError: a token outside of 0..256.
        """
        values = cast(list[int], tokens.tolist())
        check_tokens(values, self.vocab_size)
        data = bytes(ord("\n") if value == self.end_of_document else value for value in values)
        return data.decode(errors="replace")


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is not one of the {vocab_size} tokens 0..{vocab_size - 1}")


# -- tokenizer.json ---------------------------------------------------------------------------------------------------


Tokens = NDArray[np.unsignedinteger[Any]]

BEGIN = "begin_of_document"
"""Entry of a store's tokenizer_config.json: the name of the token before each document."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")  # noqa: RUF001
"""Names of the end of document in published tokenizers. [SEP] is not one: it also occurs within documents."""
TRAINED_END = "<|endoftext|>"
"""End-of-document token of `train_bpe`."""
MAX_VOCAB_SIZE = 2**24
"""Maximum vocabulary of `train_bpe`. The library allocates it at once, and aborts the process if that fails."""

_BATCH = 16
"""Texts per call of the library, which encodes them in threads. Its result takes about 100 bytes per character."""


class TextTokenizer:
    """Tokenizer of a tokenizer.json.

    `encode` adds the begin of document, if one is given, and no other special token: a name of one in a text is
    ordinary text. Truncation, padding and dropout of the definition are disabled. Encoding a text takes about 100 bytes
    of memory per character.

    Args:
        definition: bytes of a tokenizer.json.
        end_of_document: name of the token after each document; by default a usual name that the vocabulary has, such as
            "<|endoftext|>".
        begin_of_document: name of a token before each text; by default none.

    Raises:
        ValueError: not a tokenizer.json, or a name that is not in the vocabulary.
        ImportError: the `tokenizers` library is not installed.
    """

    def __init__(
        self,
        definition: bytes,
        *,
        end_of_document: str | None = None,
        begin_of_document: str | None = None,
    ) -> None:
        settings = parse_definition(definition)
        self.definition = definition
        # 1. The names of the tokens around each text.
        vocabulary = _vocabulary(settings)
        if end_of_document is None:
            usual_ends = [name for name in _ENDS if name in vocabulary]
            if not usual_ends:
                choices = _special_tokens(settings)
                raise ValueError(f"no token has a usual name for an end of document; give end_of_document, {choices}")
            end_of_document = usual_ends[0]
        for argument, name in {"end_of_document": end_of_document, "begin_of_document": begin_of_document}.items():
            if name is not None and name not in vocabulary:
                choices = _special_tokens(settings)
                raise ValueError(f"{argument}={name!r} is not a token of the vocabulary; give {choices}")
        self.end_name: str = end_of_document
        self.begin_name: str | None = begin_of_document
        names = [self.end_name] if begin_of_document is None else [self.end_name, begin_of_document]
        # 2. The library's tokenizer.
        self._inner = build(settings, names)
        self.vocab_size: int = max(cast(dict[str, int], self._inner.get_vocab(with_added_tokens=True)).values()) + 1
        ids = [cast(int, self._inner.token_to_id(name)) for name in names]
        self.end_of_document: int = ids[0]
        self._begin = ids[1:]
        self._dtype = np.dtype(np.min_scalar_type(self.vocab_size - 1))
        # 3. A mask [V] of the special tokens, which `encode` must not produce from text. Text may produce the token for
        # unknown words; Unigram models record its id, other models its name.
        added_tokens = cast(dict[int, Any], self._inner.get_added_tokens_decoder())
        special_tokens = [token_id for token_id, token in added_tokens.items() if token.special]
        self._is_special = np.zeros(self.vocab_size, np.bool_)
        self._is_special[[*special_tokens, self.end_of_document, *self._begin]] = True
        model = settings["model"]
        unknown = model["unk_id"] if "unk_id" in model else self._inner.token_to_id(model.get("unk_token") or "")
        if unknown is not None:
            self._is_special[unknown] = False

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        end_of_document: str | None = None,
        begin_of_document: str | None = None,
    ) -> TextTokenizer:
        """Reads a tokenizer.json from its path or folder. Raises as the constructor.

        By default both names are those of a tokenizer_config.json in the same folder, if it has them: `eos_token`, and
        in a store's folder `begin_of_document`.
        """
        file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
        config = file.with_name("tokenizer_config.json")
        with readable(file, "give a tokenizer.json, or a folder with one in it"):
            definition = read_file(file)
            end = end_of_document or read_name(config, "eos_token")
            begin = begin_of_document or read_name(config, BEGIN)
        try:
            return cls(definition, end_of_document=end, begin_of_document=begin)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"end_of_document": self.end_name, "begin_of_document": self.begin_name}
        # A copy is built again from the definition: by a partial, because the other arguments are keywords.
        return partial(type(self), **names), (self.definition,)

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
        begin, token_arrays = np.array(self._begin, self._dtype), list[Tokens]()
        for start in range(0, len(texts), _BATCH):
            try:
                encodings = self._inner.encode_batch_fast(texts[start : start + _BATCH], add_special_tokens=False)
            except TypeError as error:
                raise ValueError(f"{error}; UTF-8 cannot encode half of a surrogate pair") from error
            for text in encodings:
                tokens = np.fromiter(text.ids, self._dtype)
                tokens = self._spell_specials(tokens) if self._is_special[tokens].any() else tokens
                token_arrays.append(np.concatenate([begin, tokens]))
        return token_arrays

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


def parse_definition(definition: bytes) -> dict[str, Any]:
    """Returns the content of a tokenizer.json. Raises ValueError if it is that of another file."""
    try:
        fields = parse_object(definition)
    except ValueError as error:
        raise ValueError(f"this is not a tokenizer.json ({error})") from error
    if not isinstance(fields.get("model"), dict) or "vocab" not in fields["model"]:
        raise ValueError("this is not a tokenizer.json: it has no model with a vocabulary")
    try:
        # Reads every field that later functions read, so that they cannot fail.
        _vocabulary(fields)
        _special_tokens(fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError("this is not a tokenizer.json: its vocabulary or added tokens have another form") from error
    return fields


def build(settings: dict[str, Any], special: list[str]) -> Any:
    """Builds a `tokenizers.Tokenizer` that reads names of special tokens, and those in `special`, as ordinary text."""
    # BPE dropout would make encoding random.
    model = {**settings["model"], **({"dropout": None} if settings["model"].get("dropout") else {})}
    # `encode_special_tokens` below has an effect only on tokens that are marked as special.
    added_tokens = [
        {**token, "special": token["special"] or token["content"] in special} for token in _added_tokens(settings)
    ]
    library = optional("tokenizers", "tokenizers")
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps({**settings, "model": model, "added_tokens": added_tokens}))
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"tokenizers {library.__version__} cannot read this tokenizer.json ({error})") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_name(file: Path, key: str) -> str | None:
    """Returns the name of a token in a tokenizer_config.json; None without the key or the file."""
    if not file.exists():
        return None
    token: Any = read_json(file).get(key)
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{file}: {key}={name!r} is not the name of a token")
    return name


def _added_tokens(settings: dict[str, Any]) -> list[dict[str, Any]]:
    # Special tokens and others, each with "content" and "special".
    return cast(list[dict[str, Any]], settings.get("added_tokens") or [])


def _vocabulary(settings: dict[str, Any]) -> set[str]:
    # Unigram models have pairs of a name and its score.
    words: dict[str, int] | list[tuple[str, float]] = settings["model"]["vocab"]
    names = words if isinstance(words, dict) else (name for name, _ in words)
    return {*names, *(token["content"] for token in _added_tokens(settings))}


def _special_tokens(settings: dict[str, Any]) -> str:
    """Returns the names of at most 16 special tokens as a phrase for messages: "one of ..."."""
    names = [repr(token["content"]) for token in _added_tokens(settings) if token["special"]]
    suffix = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return f"one of {', '.join(names[:16])}{suffix}" if names else "the name of a token (it has no special ones)"


# -- training ---------------------------------------------------------------------------------------------------------


def train_bpe(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
    """Trains a byte-level BPE tokenizer, which encodes any text without loss. Equal texts give equal definitions.

    The vocabulary has `<|endoftext|>`, the 256 bytes, and the most frequent merges: fewer tokens than `vocab_size` if
    the texts are short.
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
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, for 256 bytes and an end of document; got {vocab_size}")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE:,}; got {vocab_size}")


# -- streams ----------------------------------------------------------------------------------------------------------


REPLACEMENT = "\ufffd"
TwoWayTokenizer = ByteTokenizer | TextTokenizer
"""Tokenizers that also decode."""


class TextStreamer:
    """Decodes a stream of tokens, and calls `show` with each new piece of text. Without tokenizer it shows numbers."""

    def __init__(self, tokenizer: TwoWayTokenizer | None, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.tokens: list[int] = []
        self.text = ""

    def put(self, token: int) -> None:
        self.tokens.append(token)
        text = self._decode()
        # U+FFFD at the end: the next tokens may have the missing bytes of a character.
        if not text.endswith(REPLACEMENT):
            self._show(text)

    def end(self) -> None:
        """Shows the remaining text, after the last token."""
        self._show(self._decode())

    def _decode(self) -> str:
        if self.tokenizer is None:
            return "".join(f" {token}" for token in self.tokens)
        size = self.tokenizer.vocab_size  # a model may have more tokens than its tokenizer; these have no text
        return self.tokenizer.decode(torch.tensor([token for token in self.tokens if token < size], dtype=torch.long))

    def _show(self, text: str) -> None:
        self.show(text[len(self.text) :])
        self.text = text
