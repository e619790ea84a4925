"""Tokens that come one by one, into text as it comes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from armillary.data.text.byte_tokenizer import ByteTokenizer
from armillary.data.text.tokenizer import TextTokenizer

UNFINISHED = "\ufffd"
KnownTokenizer = ByteTokenizer | TextTokenizer
"""Those that give text back too."""


class Unfolding:
    """Text of tokens that come one by one: what is certain of it is shown at once.

    Args:
        tokenizer: None: the text is the numbers of the tokens.
        show: called with what is new.
    """

    def __init__(self, tokenizer: KnownTokenizer | None, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.tokens: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        """One token more. Half of a character waits for the rest."""
        self.tokens.append(token)
        text = self._text()
        if not text.endswith(UNFINISHED):
            self._show(text)

    def close(self) -> None:
        """Shows what has waited."""
        self._show(self._text())

    def _text(self) -> str:
        if self.tokenizer is None:
            return "".join(f" {token}" for token in self.tokens)
        known = [token for token in self.tokens if token < self.tokenizer.vocab_size]  # a model may have more
        return self.tokenizer.decode(torch.tensor(known, dtype=torch.long))

    def _show(self, text: str) -> None:
        self.show(text[len(self.text) :])
        self.text = text
