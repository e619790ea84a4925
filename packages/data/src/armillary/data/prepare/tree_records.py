"""Trees from the lines of a JSONL file: prompts with completions, and texts or conversations that branch.

    {"prompt": "2 + 2 =", "completions": [" 4", {"text": " 5", "weight": 0.5}]}
    {"prompt": [{"role": "user", "content": "Hi"}], "completions": [{"role": "assistant", "content": "Hello"}]}
    {"text": "Once", "children": [{"text": " upon a time"}, {"text": " more", "children": [...]}]}
    {"messages": [...], "children": [{"messages": [...]}, ...]}

Tokens of a prompt are no labels unless it says "train": true; those of all else are, unless it says false. "weight" is
that of the sequence which ends with a node, 1 unless given. Other fields are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

from armillary.data.text.corpus import Document

Message = dict[str, Any]
"""A "role", its "content", and whatever else a chat template reads."""


@dataclass(frozen=True)
class TextNode:
    """A piece of text, or messages, and where it belongs.

    Args:
        content: text, or messages.
        parent: number of the node that it follows; -1: none.
        train: its tokens are labels; of messages, those of the assistant.
        weight: of the sequence that ends here; 0 where one goes on.
    """

    content: str | tuple[Message, ...]
    parent: int
    train: bool
    weight: float


@dataclass(frozen=True)
class TreeRecord(Document):
    """A tree before it is made into tokens. `text` is that of all nodes, joined, as a document has it."""

    nodes: tuple[TextNode, ...] = field(default=(), repr=False)

    @property
    def root_text(self) -> bytes:
        """That of the first node, by which trees are split into training and validation."""
        return text_of(self.nodes[0].content).encode()


def tree_record(name: str, record: object) -> TreeRecord:
    """The tree of a line.

    Raises:
        ValueError: no such fields, of other kinds, empty, or without completions.
    """
    nodes = tuple(_nodes(record, "", -1, 0))
    if len({isinstance(node.content, str) for node in nodes}) > 1:
        raise ValueError("some of the tree is text and some messages; give one or the other")
    return TreeRecord(name, "".join(text_of(node.content) for node in nodes).encode(), nodes)


def text_of(content: str | tuple[Message, ...]) -> str:
    """The text, or that of all messages."""
    return content if isinstance(content, str) else "".join(str(message.get("content") or "") for message in content)


def _nodes(given: object, place: str, parent: int, number: int) -> Iterator[TextNode]:
    """The node and all below it, depth first; it is number `number` of the tree. `place` names it."""
    fields = _fields(given, place)
    kind, below = _kind(fields, place)
    content, children = _content(fields[kind], f"{place}{kind}"), fields.get(below, [])
    if not isinstance(children, list) or (kind == "prompt" and not children):
        raise ValueError(f"field '{place}{below}' must be a list of one or more; got {children!r}"[:200])
    train, weight = fields.get("train", kind != "prompt"), fields.get("weight")
    if not isinstance(train, bool):
        raise ValueError(f"field '{place}train' is {train!r}; give true or false")
    if children and weight is not None:
        raise ValueError(f"field '{place}weight': {below} follow; give weights to those at the end")
    yield TextNode(content, parent, train, 0.0 if children else _weight(weight, place))
    at = number + 1
    for i, child in enumerate(cast(list[object], children)):
        for node in _nodes(child, f"{place}{below}[{i}].", number, at):
            yield node
            at += 1


def _fields(given: object, place: str) -> dict[str, Any]:
    """A node as an object with fields: a completion may be given as its text, its messages or a message alone."""
    if place and isinstance(given, str):
        return {"text": given}
    if place and isinstance(given, list):
        return {"messages": given}
    if not isinstance(given, dict):
        what = f"'{place.rstrip('.')}' is" if place else "the line is a"
        raise ValueError(f"{what} {_named(given)}; give an object with a prompt, text or messages")
    fields = cast(dict[str, Any], given)
    return {"messages": [fields], **fields} if place and "role" in fields and "messages" not in fields else fields


def _kind(fields: dict[str, Any], place: str) -> tuple[str, str]:
    """Which field has the content, and which what follows it."""
    found = [name for name in ("prompt", "text", "messages") if name in fields]
    if len(found) != 1:
        shown = ", ".join(map(repr, fields)) or "none"
        raise ValueError(
            f"{place + ': ' if place else ''}one of the fields 'prompt', 'text' and 'messages' is needed; the fields "
            f"are {shown}"
        )
    below = "completions" if found[0] == "prompt" else "children"
    if found[0] == "prompt" and below not in fields:
        raise ValueError(f"there is no field '{place}{below}'; the fields are {', '.join(map(repr, fields))}")
    return found[0], below


def _content(value: object, place: str) -> str | tuple[Message, ...]:
    if not isinstance(value, str | list):
        raise ValueError(f"field '{place}' is {_named(value)}; give a string, or a list of messages")
    if not value:
        raise ValueError(f"field '{place}' is empty")
    if isinstance(value, str):
        return value
    messages = cast(list[object], value)
    for i, message in enumerate(messages):
        role = cast(dict[str, object], message).get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ValueError(f"field '{place}': message {i} has no role; give objects with a role and a content")
    return tuple(cast(list[Message], messages))


def _weight(value: object, place: str) -> float:
    if value is None:
        return 1.0
    fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
    if not fits:
        raise ValueError(f"field '{place}weight' is {value!r}; give a number of at least 0")
    return float(cast(float, value))


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__
