"""One chunk of trees as tokens: what a worker process does where lines are prompts with completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from armillary.data.prepare.encode import Counts, Encoded, Encoder, batches, encode_all, tokenizer_in
from armillary.data.prepare.sources import InputChunk, Invalid
from armillary.data.prepare.tree_records import Message, TextNode, TreeRecord
from armillary.data.prepare.writer import Part
from armillary.data.shuffle import stable_hash
from armillary.data.store import Integers
from armillary.data.text.byte_tokenizer import Tokenizer
from armillary.data.text.chat_template import ChatTemplate
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import TextTokenizer
from armillary.data.trees import SEGMENT, SegmentArray, segment_rows


class TextSegment(NamedTuple):
    """A segment before it is made into tokens."""

    text: str
    parent: int
    trained: bool
    weight: float


@dataclass(frozen=True)
class SegmentedRecord(Document):
    """A tree of text: the segments of its nodes, of which messages give several."""

    segments: tuple[TextSegment, ...] = ()
    root_text: bytes = b""
    written: bool = False
    """By a chat template, so that names of special tokens are these."""


@dataclass(frozen=True)
class TreeEncoder(Encoder):
    """Turns chunks of trees into tokens. Each segment is made into tokens by itself, as its own text."""

    def __call__(self, chunk: InputChunk) -> EncodedTrees:
        """As `Encoder`. A tree that the chat template refuses is one that gives no document."""
        tokenizer, template = tokenizer_in(self.folder), ChatTemplate.read(self.folder)
        found = EncodedTrees()
        for records in batches(self._segmented(chunk, tokenizer, template, found.counts)):
            found.add(cast(list[SegmentedRecord], records), tokenizer)
        return found

    def _segmented(
        self, chunk: InputChunk, tokenizer: Tokenizer, template: ChatTemplate | None, counts: Counts
    ) -> Iterator[SegmentedRecord]:
        for record in self.kept(chunk, tokenizer, counts):
            nodes = cast(TreeRecord, record).nodes
            written = not isinstance(nodes[0].content, str)
            try:
                segments = tuple(written_segments(nodes, tokenizer, template) if written else text_segments(nodes))
            except ValueError as error:
                self.skip(Invalid(record.name, str(error)), counts)
                counts.documents, counts.text_bytes = counts.documents - 1, counts.text_bytes - len(record.text)
                continue
            root = cast(TreeRecord, record).root_text
            yield SegmentedRecord(record.name, record.text, segments, root, written)


def text_segments(nodes: Sequence[TextNode]) -> list[TextSegment]:
    """A segment of each node of text."""
    return [TextSegment(cast(str, node.content), node.parent, node.train, node.weight) for node in nodes]


def written_segments(
    nodes: Sequence[TextNode], tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[TextSegment]:
    """What the template writes for each node behind those before it, what the assistant says apart.

    Raises:
        ValueError: no template, or one that refuses the messages; a message that spells a special token.
    """
    if template is None or not isinstance(tokenizer, TextTokenizer):
        raise ValueError("messages need a chat template, which the tokenizer's folder has not; give text, or another")
    paths, lasts, count = list[tuple[Message, ...]](), list[int](), 0
    for node in nodes:
        mine = cast(tuple[Message, ...], node.content)
        for message in mine:
            if (name := tokenizer.special_in(str(message.get("content")))) is not None:
                raise ValueError(f"a message spells the special token {name!r}, which only the template may write")
        known = paths[node.parent] if node.parent >= 0 else ()
        pieces = template.parts((*known, *mine), len(known))
        if not pieces:
            raise ValueError("the chat template writes nothing for some messages")
        for i, (text, own) in enumerate(pieces):
            last = i == len(pieces) - 1
            parent = count - 1 if i else lasts[node.parent] if node.parent >= 0 else -1
            yield TextSegment(text, parent, node.train and own, node.weight if last else 0.0)
            count += 1
        paths.append((*known, *mine))
        lasts.append(count - 1)


@dataclass
class EncodedTrees(Encoded):
    """Tokens of each tree, its end of document behind each sequence, and the segments that these are."""

    segments: list[SegmentArray] = field(default_factory=list[SegmentArray])

    def add(self, records: Sequence[SegmentedRecord], tokenizer: Tokenizer) -> None:
        tokens = iter(encoded_segments(records, tokenizer))
        for record in records:
            parts = [next(tokens) for _ in record.segments]
            inner = {segment.parent for segment in record.segments}
            for s in range(len(parts)):
                if s not in inner and not (record.written and ends_with(parts[s], tokenizer.end_of_document)):
                    parts[s] = np.append(parts[s].astype(np.int64), tokenizer.end_of_document)
                if not len(parts[s]):
                    raise ValueError(f"{record.name}: the tokenizer makes no tokens of {record.segments[s].text!r}")
            _, parents, trained, weights = zip(*record.segments, strict=True)
            self.tokens.append(np.concatenate(parts))
            self.segments.append(segment_rows([len(part) for part in parts], parents, trained, weights))
            self.hashes.append(stable_hash(record.root_text))

    def part(self, end_of_document: int, dtype: np.dtype[np.unsignedinteger]) -> Part:
        lengths = np.array([len(tokens) for tokens in self.tokens], np.int64)
        joined = np.concatenate([np.empty(0, dtype), *(tokens.astype(dtype) for tokens in self.tokens)])
        segments = np.concatenate([np.empty(0, SEGMENT), *self.segments])
        if len(lengths):
            first = np.cumsum(lengths) - lengths
            segments["end"] += np.repeat(first, [len(rows) for rows in self.segments])
        return Part(joined, lengths, np.array(self.hashes, np.uint64), segments)


def encoded_segments(records: Sequence[SegmentedRecord], tokenizer: Tokenizer) -> Iterator[Integers]:
    """The tokens of all segments; those that are put in front of a text stand in front of its first segment alone."""
    plain = [s.text.encode() for record in records if not record.written for s in record.segments]
    written = [s.text for record in records if record.written for s in record.segments]
    of_text = iter(encode_all(plain, tokenizer))
    of_template = iter(tokenizer.encode_written(written) if isinstance(tokenizer, TextTokenizer) and written else ())
    begins = tokenizer.begins if isinstance(tokenizer, TextTokenizer) else 0
    for record in records:
        for segment in record.segments:
            if record.written:
                yield next(of_template)
            else:
                yield next(of_text)[0 if segment.parent < 0 else begins :]


def ends_with(tokens: Integers, token: int) -> bool:
    return bool(len(tokens)) and int(tokens[-1]) == token
