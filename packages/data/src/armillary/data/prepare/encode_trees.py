"""Tokenization of one chunk of trees, in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from armillary.data.prepare.encode import Counts, Encoder, encode_all
from armillary.data.prepare.sources import Invalid
from armillary.data.prepare.tree_records import Message, TreeNode, TreeRecord
from armillary.data.prepare.writer import Part
from armillary.data.shuffle import stable_hash
from armillary.data.store import Integers, token_dtype
from armillary.data.text.byte_tokenizer import Tokenizer
from armillary.data.text.chat_template import ChatTemplate
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import TextTokenizer
from armillary.data.trees import SEGMENT


class TextSegment(NamedTuple):
    """A segment before tokenization."""

    text: str
    parent: int
    trained: bool
    weight: float


class SegmentedTree(NamedTuple):
    """Segments of a record.

    Args:
        from_template: True if a chat template wrote the texts, so that names of special tokens in them are these
            tokens.
    """

    record: TreeRecord
    segments: list[TextSegment]
    from_template: bool


@dataclass(frozen=True)
class TreeEncoder(Encoder):
    """Tokenizes chunks of trees, each segment separately. A tree refused by `template_segments` is a broken record."""

    def encode(self, batch: Sequence[Document], tokenizer: Tokenizer, counts: Counts) -> Part:
        """Returns the tokens of some trees (`TreeRecord`). Each sequence ends with one end-of-document token."""
        template, trees = ChatTemplate.read(self.folder), list[SegmentedTree]()
        for record in cast(Sequence[TreeRecord], batch):
            has_messages = not isinstance(record.nodes[0].content, str)
            try:
                if has_messages:
                    segments = list(template_segments(record.nodes, tokenizer, template))
                else:
                    segments = [TextSegment(node.text, node.parent, node.train, node.weight) for node in record.nodes]
            except ValueError as error:
                self.skip(Invalid(record.name, str(error)), counts)
            else:
                trees.append(SegmentedTree(record, segments, has_messages))
        counts.documents += len(trees)
        counts.text_bytes += sum(len(tree.record.text) for tree in trees)
        tokens, dtype = segment_tokens(trees, tokenizer), token_dtype(tokenizer.vocab_size)
        # All trees may have been skipped, and `concatenate` needs a part.
        empty = Part(np.empty(0, dtype), np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, SEGMENT))
        tree_parts = [
            tree_part(tree, [next(tokens) for _ in tree.segments], tokenizer.end_of_document) for tree in trees
        ]
        return Part.concatenate([empty, *tree_parts])


def template_segments(
    nodes: Sequence[TreeNode], tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[TextSegment]:
    """Renders the messages of each node as segments, with separate segments for text that the assistant wrote.

    Raises:
        ValueError: no template, one that refuses the messages or writes nothing for them, a message that contains a
            special token, or text that is not valid UTF-8.
    """
    if template is None or not isinstance(tokenizer, TextTokenizer):
        raise ValueError("messages need a chat template, which the tokenizer's folder has not; give text, or another")
    # For each node: all messages from the root to its end, and the number of its last segment.
    paths, last_segments, count = list[tuple[Message, ...]](), list[int](), 0
    for node in nodes:
        messages = cast(tuple[Message, ...], node.content)
        for message in messages:
            if (name := tokenizer.special_in(str(message.get("content")))) is not None:
                raise ValueError(f"a message spells the special token {name!r}, which only the template may write")
        # A template may write a message depending on earlier ones, so all messages from the root on are rendered, and
        # the text of this node's messages is returned.
        ancestors, parent = (paths[node.parent], last_segments[node.parent]) if node.parent >= 0 else ((), -1)
        pieces = template.render((*ancestors, *messages), len(ancestors))
        if not pieces:
            raise ValueError("the chat template writes nothing for some messages")
        "".join(text for text, _ in pieces).encode()  # raises for half of a surrogate pair, which is not UTF-8
        # The pieces of a node are a chain of segments; the weight of its sequence belongs to the last one.
        for i, (text, is_assistant) in enumerate(pieces):
            weight = node.weight if i == len(pieces) - 1 else 0.0
            yield TextSegment(text, parent, node.train and is_assistant, weight)
            parent, count = count, count + 1
        paths.append((*ancestors, *messages))
        last_segments.append(parent)


def segment_tokens(trees: Sequence[SegmentedTree], tokenizer: Tokenizer) -> Iterator[Integers]:
    """Yields the tokens of each segment, tree by tree. Only roots begin with the begin-of-document token."""
    # Plain texts and texts of templates are encoded differently. Each kind is encoded as one batch, which is faster;
    # then the tokens are yielded in the order of the segments.
    texts = [s.text.encode() for tree in trees if not tree.from_template for s in tree.segments]
    template_texts = [s.text for tree in trees if tree.from_template for s in tree.segments]
    text_tokens, template_tokens, begin_count = iter(encode_all(texts, tokenizer)), iter(list[Integers]()), 0
    if isinstance(tokenizer, TextTokenizer):  # a byte tokenizer has no templates and no begin token
        template_tokens, begin_count = iter(tokenizer.encode_template(template_texts)), len(tokenizer.begin_ids)
    for tree in trees:
        for segment in tree.segments:
            if tree.from_template:
                yield next(template_tokens)
            else:
                yield next(text_tokens)[0 if segment.parent < 0 else begin_count :]


def tree_part(tree: SegmentedTree, tokens: list[Integers], end_of_document: int) -> Part:
    """Returns one tree as a part of a store.

    Raises:
        ValueError: a segment without tokens.
    """
    texts, parents, trained, weights = zip(*tree.segments, strict=True)
    dtype = tokens[0].dtype
    for s in {*range(len(tokens))} - {*parents}:  # leaves: each ends a sequence
        # Adds an end-of-document token, unless the template has written one already.
        if not (tree.from_template and len(tokens[s]) and int(tokens[s][-1]) == end_of_document):
            tokens[s] = np.append(tokens[s], np.array([end_of_document], dtype))
    for text, segment in zip(texts, tokens, strict=True):
        if not len(segment):
            raise ValueError(f"{tree.record.name}: the tokenizer makes no tokens of {text!r}")
    rows = np.zeros(len(tokens), SEGMENT)
    rows["end"], rows["parent"] = np.cumsum([len(segment) for segment in tokens]), parents
    rows["trained"], rows["weight"] = trained, weights
    # The hash of the prompt, not of all text, decides between training and validation: trees with equal prompts must be
    # in the same store.
    root_hash = stable_hash(tree.record.nodes[0].text.encode())
    lengths = np.array([rows["end"][-1]], np.int64)
    return Part(np.concatenate(tokens), lengths, np.array([root_hash], np.uint64), rows)
