"""Parsing of tokenizer.json, and the `tokenizers.Tokenizer` built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from armillary.core.files import parse_object, read_json
from armillary.data.optional import optional

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")  # noqa: RUF001
"""Names of the end of document in published tokenizers. [SEP] is not one: it also occurs within documents."""
BEGIN = "begin_of_document"
"""Entry of a store's tokenizer_config.json: the name of the token before each document."""


def parse_definition(definition: bytes) -> dict[str, Any]:
    """Parses a tokenizer.json.

    Raises:
        ValueError: the content is not that of a tokenizer.json.
    """
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


def choose_end(settings: dict[str, Any], end: str | None) -> str:
    """Returns the name of the end of document: `end`, or the first of the usual names that the vocabulary has.

    Raises:
        ValueError: the vocabulary has no such token.
    """
    if end is not None:
        return check_name(settings, "end_of_document", end)
    vocabulary = _vocabulary(settings)
    names = [name for name in _ENDS if name in vocabulary]
    if not names:
        raise ValueError(
            f"no token has a usual name for an end of document; give end_of_document, {_special_tokens(settings)}"
        )
    return names[0]


def check_name(settings: dict[str, Any], argument: str, name: str) -> str:
    """Returns `name`, if it is the name of a token.

    Raises:
        ValueError: the vocabulary has no such token; the message names `argument`.
    """
    if name not in _vocabulary(settings):
        raise ValueError(f"{argument}={name!r} is not a token of the vocabulary; give {_special_tokens(settings)}")
    return name


def build(settings: dict[str, Any], special: list[str]) -> Any:
    """Builds a `tokenizers.Tokenizer` that reads names of special tokens as ordinary text.

    Args:
        special: names of tokens that count as special, in addition to those that the definition marks.

    Raises:
        ValueError: the library cannot read the definition.
        ImportError: the library is not installed.
    """
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
    """Returns the name of a token in a tokenizer_config.json; None without the key or the file.

    Raises:
        ValueError: the file cannot be read, or is not a tokenizer_config.json.
    """
    if not file.exists():
        return None
    token: Any = read_json(file).get(key)
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{file}: {key}={name!r} is not the name of a token")
    return name


def _added_tokens(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tokens added to the model's vocabulary, special or not, each with "content" and "special"."""
    return cast(list[dict[str, Any]], settings.get("added_tokens") or [])


def _vocabulary(settings: dict[str, Any]) -> set[str]:
    """Returns the names of all tokens."""
    # Unigram models have pairs of a name and its score.
    words: dict[str, int] | list[tuple[str, float]] = settings["model"]["vocab"]
    names = words if isinstance(words, dict) else (name for name, _ in words)
    return {*names, *(token["content"] for token in _added_tokens(settings))}


def _special_tokens(settings: dict[str, Any]) -> str:
    """Returns the names of at most 16 special tokens as a phrase for messages: "one of ..."."""
    names = [repr(token["content"]) for token in _added_tokens(settings) if token["special"]]
    suffix = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return f"one of {', '.join(names[:16])}{suffix}" if names else "the name of a token (it has no special ones)"
