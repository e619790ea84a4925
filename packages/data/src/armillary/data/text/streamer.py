"""Shows the text of tokens while a model generates them one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from armillary.data.text.byte_tokenizer import ByteTokenizer
from armillary.data.text.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
TwoWayTokenizer = ByteTokenizer | TextTokenizer
"""Tokenizers that also decode."""


class TextStreamer:
    """Decodes a stream of tokens, and shows their text unless it ends with an incomplete character.

    Args:
        tokenizer: decodes the tokens; None shows their numbers.
        show: called with each new piece of text.
    """

    def __init__(self, tokenizer: TwoWayTokenizer | None, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.tokens: list[int] = []
        self.text = ""

    def put(self, token: int) -> None:
        """Adds a token. Text that ends with U+FFFD, as if bytes of a character are missing, is not shown yet."""
        self.tokens.append(token)
        text = self._decode()
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
