"""What a tokenizer.json says, and a tokenizer of the `tokenizers` library built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from armillary.core.files import parse_json
from armillary.data.optional import optional

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")  # noqa: RUF001
"""Names that published tokenizers give to the end of a document. [SEP] is not one: it also stands inside of them."""


def settings_of(definition: bytes) -> dict[str, Any]:
    """The parsed tokenizer.json.

    Raises:
        ValueError: it is not one.
    """
    try:
        settings: object = parse_json(definition)
    except ValueError as error:
        raise ValueError(f"this is not a tokenizer.json ({error})") from error
    fields = cast(dict[str, Any], settings) if isinstance(settings, dict) else {}
    if not isinstance(fields.get("model"), dict) or "vocab" not in fields["model"]:
        raise ValueError("this is not a tokenizer.json: it has no model with a vocabulary")
    try:
        for read in (_vocabulary, _choices):  # all that is read of it here
            read(fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError("this is not a tokenizer.json: its vocabulary or added tokens have another form") from error
    return fields


def choose_end(settings: dict[str, Any], end: str | None) -> str:
    """The name of the token that ends a document: `end`, or the first of the usual names that the vocabulary has.

    Raises:
        ValueError: there is none.
    """
    if end is not None:
        return check_name(settings, "end_of_document", end)
    vocabulary = _vocabulary(settings)
    found = [name for name in _ENDS if name in vocabulary]
    if not found:
        raise ValueError(
            f"no token has a usual name for an end of document; give end_of_document, {_choices(settings)}"
        )
    return found[0]


def check_name(settings: dict[str, Any], argument: str, name: str) -> str:
    """`name`, which the argument `argument` gave.

    Raises:
        ValueError: the vocabulary has no such token.
    """
    if name not in _vocabulary(settings):
        raise ValueError(f"{argument}={name!r} is not a token of the vocabulary; give {_choices(settings)}")
    return name


def build(settings: dict[str, Any], special: list[str]) -> Any:
    """A `tokenizers.Tokenizer` that reads special tokens, and those named in `special`, as text like any other.

    Raises:
        ValueError: the library cannot read the definition.
        ImportError: it is not installed.
    """
    model = {**settings["model"], **({"dropout": None} if settings["model"].get("dropout") else {})}
    added = [{**token, "special": token["special"] or token["content"] in special} for token in _added(settings)]
    library = optional("tokenizers", "tokenizers")
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps({**settings, "model": model, "added_tokens": added}))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"tokenizers {library.__version__} cannot read this tokenizer.json ({error})") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


BEGIN = "begin_of_document"
"""In a tokenizer_config.json that a store has: the name of the token in front of each document."""


def configured(file: Path, name: str) -> str | None:
    """A token's name in a tokenizer_config.json; None without it or without such a file.

    Raises:
        ValueError: the file is broken.
        OSError: it cannot be read.
    """
    if not file.exists():
        return None
    try:
        token = parse_json(file.read_bytes()).get(name)
        return cast(str | None, token["content"] if isinstance(token, dict) else token)
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{file.name} is broken ({error}); repair it, or give end_of_document") from error


def _added(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], settings.get("added_tokens") or [])


def _vocabulary(settings: dict[str, Any]) -> set[str]:
    words: dict[str, int] | list[tuple[str, float]] = settings["model"]["vocab"]
    names = words if isinstance(words, dict) else (name for name, _ in words)
    return {*names, *(token["content"] for token in _added(settings))}


def _choices(settings: dict[str, Any]) -> str:
    """The special tokens, in words; the first of them where there are many."""
    names = [repr(token["content"]) for token in _added(settings) if token["special"]]
    shown = ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")
    return f"one of {shown}" if names else "the name of a token (it has no special ones)"
