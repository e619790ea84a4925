"""Prompts into tokens, and tokens into text as they come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from armillary.train.generate.source import KnownTokenizer

UNFINISHED = "\ufffd"


def encode(prompt: str, tokenizer: KnownTokenizer | None, vocabulary: int) -> list[int]:
    """The tokens of a prompt, whose numbers it has where there is no tokenizer.

    Raises:
        ValueError: no numbers, or tokens that the model does not know.
    """
    if tokenizer is not None:
        found = tokenizer.encode(prompt).tolist()
    else:
        try:
            found = [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError as error:
            raise ValueError(
                f'--prompt {prompt!r}: with --ids it must be numbers of tokens, such as "5 17 9"'
            ) from error
    if not found:
        raise ValueError(f"--prompt {prompt!r} has no tokens")
    if unknown := [token for token in found if not 0 <= token < vocabulary]:
        raise ValueError(f"--prompt has token {unknown[0]}, and the model knows 0..{vocabulary - 1}; see --tokenizer")
    return found


class Unfolding:
    """Text of tokens that come one by one: what is certain of it is shown at once.

    Args:
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
