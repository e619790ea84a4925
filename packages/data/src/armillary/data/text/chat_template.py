"""Conversations as text, by the chat template of a tokenizer's folder (Jinja, as `transformers` has it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from armillary.core.files import parse_json

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may ask for."""
OF_STORE = "chat_template_tokens"
"""In a store's tokenizer_config.json: those names, since "eos_token" is its end of document there."""
ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the names of special tokens that it may write.

    It is told no date (`strftime_now`), so that the same messages give the same text every day.
    """

    source: str
    names: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate | None:
        """That of a folder: its chat_template.jinja, or "chat_template" in its tokenizer_config.json; None without.

        Raises:
            ValueError: a file that cannot be read, or several templates of which none is "default".
        """
        config, file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
        try:
            values = parse_json(config.read_bytes()) if config.exists() else {}
            source = file.read_text() if file.exists() else values.get("chat_template")
            if isinstance(source, list):
                source = {template["name"]: template["template"] for template in source}["default"]
            if not isinstance(source, str | None):
                raise TypeError(f"chat_template={source!r} is no text")
            given = values.get(OF_STORE) or {name: values.get(name) for name in NAMES}
            names = {name: x["content"] if isinstance(x, dict) else x for name, x in given.items() if x}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the chat template in {folder} cannot be read ({error!r})") from error
        return None if source is None else cls(source, names)

    @property
    def config(self) -> dict[str, Any]:
        """What a tokenizer_config.json has of it, for `read`."""
        return {"chat_template": self.source, OF_STORE: dict(self.names)}

    def parts(self, messages: Sequence[Mapping[str, Any]], known: int = 0) -> list[tuple[str, bool]]:
        """The text of messages from number `known` on, behind those before it, in pieces: (text, the assistant's own).

        What the assistant says begins behind what the template writes to have it answer. Joined, the pieces are what
        the template makes of all messages less what it makes of the known ones.

        Raises:
            ValueError: the template refuses the messages, or does not write one message after the other.
        """
        pieces, before = list[tuple[str, bool]](), self._render(messages[:known], False) if known else ""
        for i in range(known, len(messages)):
            if messages[i]["role"] == ASSISTANT:
                before = self._add(pieces, before, self._render(messages[:i], True), False) if i else before
            whole = self._render(messages[: i + 1], False)
            before = self._add(pieces, before, whole, messages[i]["role"] == ASSISTANT)
        return pieces

    def _add(self, pieces: list[tuple[str, bool]], before: str, text: str, own: bool) -> str:
        if not text.startswith(before):
            raise ValueError(
                "the chat template changes what it wrote of a conversation when a message is added to it, so branches "
                "cannot share their beginning; take another template (chat_template.jinja)"
            )
        if text != before:
            if pieces and pieces[-1][1] == own:
                pieces[-1] = (pieces[-1][0] + text[len(before) :], own)
            else:
                pieces.append((text[len(before) :], own))
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
        jinja = _jinja()
        try:
            return self._compiled.render(messages=list(messages), add_generation_prompt=answer, **self.names)
        except (jinja.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages ({error})") from error

    @cached_property
    def _compiled(self) -> Any:
        jinja, sandbox = _jinja(), import_module("jinja2.sandbox")
        extensions = ["jinja2.ext.loopcontrols"]
        made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        made.globals["raise_exception"] = _refuse
        try:
            return made.from_string(self.source)
        except jinja.TemplateError as error:
            raise ValueError(f"the chat template cannot be read ({error})") from error


def _jinja() -> Any:
    """torch depends on it, and so it is there."""
    return import_module("jinja2")


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
