"""Tokens from bytes, with no vocabulary to train, ship or download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor


class Tokenizer(Protocol):
    """What stores and models need to know of a tokenizer."""

    @property
    def identity(self) -> str:
        """Tells this tokenizer from others: equal where the same text gives the same tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, `end_of_document` included: every token is smaller."""
        ...

    @property
    def end_of_document(self) -> int:
        """The token that follows each document."""
        ...

    def encode(self, text: bytes | str) -> Tensor:
        """An integer tensor [T] of the smallest dtype that holds every token; `end_of_document` is not added."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte is a token, 0 to 255; token 256 ends a document."""

    @property
    def identity(self) -> str:
        return "bytes"

    @property
    def vocab_size(self) -> int:
        """V, `end_of_document` included."""
        return 257

    @property
    def end_of_document(self) -> int:
        return 256

    def encode(self, text: bytes | str) -> Tensor:
        """The bytes of `text`, those of its UTF-8 form where it is a str: an int16 tensor [T]."""
        data = bytearray(text.encode() if isinstance(text, str) else text)
        # An empty buffer is refused by frombuffer, and read-only bytes draw a warning: hence the copy.
        return torch.frombuffer(data, dtype=torch.uint8).short() if data else torch.empty(0, dtype=torch.int16)

    def decode(self, tokens: Tensor) -> str:
        """The text of an integer tensor [T]: an end of document is shown as a line break, broken UTF-8 as U+FFFD.

        Raises:
            ValueError: a token that is not one of 0..256.
        """
        values = cast(list[int], tokens.tolist())
        unknown = [value for value in values if not 0 <= value < self.vocab_size]
        if unknown:
            raise ValueError(f"token {unknown[0]} is not one of the {self.vocab_size} tokens 0..{self.vocab_size - 1}")
        data = bytes(ord("\n") if value == self.end_of_document else value for value in values)
        return data.decode(errors="replace")
