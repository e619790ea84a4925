"""Trees as lines of JSON: prompts with completions, and texts or conversations that branch.

    {"prompt": "2 + 2 =", "completions": [" 4", {"text": " 5", "weight": 0.5}]}
    {"prompt": [{"role": "user", "content": "Hi"}], "completions": [{"role": "assistant", "content": "Hello"}]}
    {"text": "Once", "children": [{"text": " upon a time"}, {"text": " more", "children": [...]}]}
    {"messages": [...], "children": [{"messages": [...]}, ...]}

The line is the root of a tree, and each of its completions or children a node. "train" says if the tokens of a node are
labels: by default false for a prompt, and true for all other nodes. "weight", by default 1, is the weight of the
sequence that ends with a node, which must have no children. Other fields of nodes are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

from armillary.data.text.corpus import Document

Message = dict[str, Any]
"""A message with "role", "content", and any other field that the chat template reads."""


@dataclass(frozen=True)
class TreeNode:
    """A node of a tree: a text, or messages.

    Args:
        content: the text, or the messages.
        parent: number of the parent node, or -1.
        train: True if its tokens are labels; of messages, the assistant's tokens only.
        weight: weight of the sequence that ends with the node; 0 for nodes with children.
    """

    content: str | tuple[Message, ...]
    parent: int
    train: bool
    weight: float

    @property
    def text(self) -> str:
        """The text, or the contents of all messages without the template's text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(message.get("content") or "") for message in self.content)


@dataclass(frozen=True)
class TreeRecord(Document):
    """A tree before tokenization. `text` is the text of all nodes."""

    nodes: tuple[TreeNode, ...] = field(default=(), repr=False)


def tree_record(name: str, record: object) -> TreeRecord:
    """Returns the tree of a line's JSON value.

    Raises:
        ValueError: missing, empty or invalid fields; the message names them.
    """
    nodes: list[TreeNode] = []
    _add_nodes(nodes, record, "", -1)
    if len({isinstance(node.content, str) for node in nodes}) > 1:
        raise ValueError("the tree has both text and messages; use one of them")
    return TreeRecord(name, "".join(node.text for node in nodes).encode(), tuple(nodes))


def _add_nodes(nodes: list[TreeNode], value: object, path: str, parent: int) -> None:
    """Appends the node of a JSON value, then its descendants, depth first.

    Args:
        path: prefix of the node's field names in error messages, such as "completions[0]."; "" for the root.
        parent: number of the parent node, or -1.
    """
    fields = _fields(value, path)
    names = ", ".join(map(repr, fields)) or "none"
    kinds = [name for name in ("prompt", "text", "messages") if name in fields]
    if len(kinds) != 1:
        prefix = f"{path}: " if path else ""
        raise ValueError(f"{prefix}give one of 'prompt', 'text' and 'messages' as a field; the fields are {names}")
    kind = kinds[0]
    branches = "completions" if kind == "prompt" else "children"
    if kind == "prompt" and branches not in fields:
        raise ValueError(f"there is no field '{path}{branches}'; the fields are {names}")
    other = "children" if kind == "prompt" else "completions"
    if other in fields:
        raise ValueError(f"field '{path}{other}' beside '{kind}', whose branches are '{branches}'")
    content, children = _content(fields[kind], f"{path}{kind}"), fields.get(branches, [])
    if not isinstance(children, list) or (kind == "prompt" and not children):
        raise ValueError(f"field '{path}{branches}' must be a list of one or more; got {children!r}"[:200])
    # By default tokens of a prompt are context only, and tokens of all other nodes are labels.
    train, weight = fields.get("train", kind != "prompt"), fields.get("weight")
    if not isinstance(train, bool):
        raise ValueError(f"field '{path}train' is {train!r}; give true or false")
    if children and weight is not None:
        raise ValueError(f"field '{path}weight': {branches} follow; give weights to the last nodes")
    weight = 1.0 if weight is None else weight
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not isfinite(weight) or weight < 0:
        raise ValueError(f"field '{path}weight' is {weight!r}; give a number of at least 0")
    number = len(nodes)  # the parent of the children; appending before recursion gives depth-first order
    nodes.append(TreeNode(content, parent, train, 0.0 if children else float(weight)))
    for i, child in enumerate(cast(list[object], children)):
        _add_nodes(nodes, child, f"{path}{branches}[{i}].", number)


def _fields(value: object, path: str) -> dict[str, Any]:
    """Returns a node's fields. Below the root, a node may also be a text, a list of messages or a single message."""
    if path and isinstance(value, str):
        return {"text": value}
    if path and isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        subject = f"'{path.rstrip('.')}' is" if path else "the line is a"
        raise ValueError(f"{subject} {_type_name(value)}; give an object with a prompt, text or messages")
    fields = cast(dict[str, Any], value)
    # A single message: its fields stay, because "train" and "weight" may be among them.
    return {"messages": [fields], **fields} if path and "role" in fields and "messages" not in fields else fields


def _content(value: object, path: str) -> str | tuple[Message, ...]:
    """Checks and returns the content of a node, a text or messages. `path` is the field's name in error messages."""
    if not isinstance(value, str | list):
        raise ValueError(f"field '{path}' is {_type_name(value)}; give a string, or a list of messages")
    if not value:
        raise ValueError(f"field '{path}' is empty")
    if isinstance(value, str):
        return value
    messages = cast(list[object], value)
    for i, message in enumerate(messages):
        role = cast(dict[str, object], message).get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ValueError(f"field '{path}': message {i} has no role; give objects with a role and a content")
    return tuple(cast(list[Message], messages))


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
