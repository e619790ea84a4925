"""The interface of tokenizers, and bytes as tokens: no vocabulary to train, ship or download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor


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
        """Returns the bytes of `text`, in UTF-8 for a str: an int16 tensor [T].

        Raises:
            ValueError: a str with half of a surrogate pair, which has no UTF-8 form.
        """
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
    """Raises ValueError for a token outside of the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is not one of the {vocab_size} tokens 0..{vocab_size - 1}")
