"""Renders conversations as text with the Jinja chat template of a Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from armillary.core.files import read_file, read_json

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template that are names of special tokens, as entries of a tokenizer_config.json."""
STORE_NAMES = "chat_template_tokens"
"""Entry of a store's tokenizer_config.json with these names. Its entry "eos_token" is the end of document, which may be
another token than the template's `eos_token`."""
ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the names of special tokens that it may write.

    Templates cannot call `strftime_now`, which returns the date, so the same messages give the same text every day.

    Args:
        source: the template.
        names: value of each variable in `NAMES` that the tokenizer defines.
    """

    source: str
    names: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate | None:
        """Reads chat_template.jinja, or "chat_template" in tokenizer_config.json; None if the folder has neither.

        Raises:
            ValueError: a file that cannot be read, a template that is no text, or several without a "default".
        """
        config, file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
        try:
            values = read_json(config) if config.exists() else {}
            source = read_file(file).decode() if file.exists() else values.get("chat_template")
            if isinstance(source, list):
                source = {template["name"]: template["template"] for template in source}["default"]
            if not isinstance(source, str | None):
                raise TypeError(f"chat_template={source!r} is no text")
            tokens = values.get(STORE_NAMES, {name: values.get(name) for name in NAMES})
            names = {name: x["content"] if isinstance(x, dict) else x for name, x in tokens.items() if x}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the chat template in {folder} cannot be read ({error!r})") from error
        return None if source is None else cls(source, names)

    @property
    def config(self) -> dict[str, Any]:
        """Entries of a tokenizer_config.json from which `read` restores the template."""
        return {"chat_template": self.source, STORE_NAMES: dict(self.names)}

    def render(self, messages: Sequence[Mapping[str, Any]], start: int = 0) -> list[tuple[str, bool]]:
        """Returns the text of messages from number `start` on, as pieces (text, True if the assistant wrote it).

        Text of the assistant begins after the generation prompt, except in a first message, which has none. The joined
        pieces are the template's text for all messages, without its text for the messages before `start`.

        Raises:
            ValueError: the template refuses the messages or is invalid, or the text of a message depends on later ones.
        """
        # `before` is the text so far. Each rendering adds a message or a generation prompt; the text that is new in it
        # becomes a piece.
        pieces, before = list[tuple[str, bool]](), self._render(messages[:start], False) if start else ""
        for i in range(start, len(messages)):
            is_assistant = messages[i]["role"] == ASSISTANT
            # The generation prompt, such as "<|assistant|>", is not text of the assistant: it gets no labels.
            if is_assistant and i:
                before = _append(pieces, before, self._render(messages[:i], True), False)
            before = _append(pieces, before, self._render(messages[: i + 1], False), is_assistant)
        return pieces

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        jinja = import_module("jinja2")  # a dependency of torch
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.names
            )
        except (jinja.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages ({error})") from error

    @cached_property
    def _compiled(self) -> Any:
        jinja, sandbox = import_module("jinja2"), import_module("jinja2.sandbox")
        # The settings of transformers' `apply_chat_template`, for which published templates are written.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> NoReturn:
            raise ValueError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment.globals["raise_exception"] = raise_exception
        environment.filters["tojson"] = tojson  # Jinja's own filter escapes characters of HTML
        try:
            return environment.from_string(self.source)
        except jinja.TemplateError as error:
            raise ValueError(f"the chat template cannot be read ({error})") from error


def _append(pieces: list[tuple[str, bool]], before: str, text: str, is_assistant: bool) -> str:
    """Appends the part of `text` after `before` to the pieces, and returns `text`.

    It extends the last piece if both are by the assistant, or both not; otherwise it is a new piece.
    """
    if not text.startswith(before):
        raise ValueError(
            "the chat template changes what it wrote of a conversation when a message is added to it, so branches "
            "cannot share their beginning; take another template (chat_template.jinja)"
        )
    new_text = text[len(before) :]
    if new_text and pieces and pieces[-1][1] == is_assistant:
        pieces[-1] = (pieces[-1][0] + new_text, is_assistant)
    elif new_text:
        pieces.append((new_text, is_assistant))
    return text
