"""Byte-level tokens: encoding and decoding are exact for all bytes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.data import ByteTokenizer
from armillary.data.parts import TextStreamer

tokenizer = ByteTokenizer()


@given(st.binary())
def test_each_byte_is_its_own_token(data):
    tokens = tokenizer.encode(data)
    assert tokens.tolist() == list(data)
    assert tokens.dtype == torch.int16


@given(st.text())
def test_text_is_decoded_exactly(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_of_document_is_a_token_decoded_as_a_line_break():
    tokens = torch.tensor([104, 105, tokenizer.end_of_document, 33])
    assert tokenizer.vocab_size == tokenizer.end_of_document + 1 == 257
    assert tokenizer.decode(tokens) == "hi\n!"


def test_broken_utf8_is_shown_with_the_replacement_character():
    assert tokenizer.decode(tokenizer.encode(b"caf\xe9!")) == "caf\ufffd!"


def test_streamed_text_has_only_complete_characters():
    shown: list[str] = []
    streamer = TextStreamer(ByteTokenizer(), shown.append)
    for token in (*"aé".encode(), 0xC3):
        streamer.put(token)
    assert shown == ["a", "é"]
    streamer.end()
    assert shown == ["a", "é", "\ufffd"] and streamer.text == "aé\ufffd"
