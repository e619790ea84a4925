"""Tokens of bytes are exact; tokens of a tokenizer.json equal the library's without special tokens."""

import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from armillary.data import ByteTokenizer, TextTokenizer
from armillary.data.internal import TextStreamer
from armillary.data.text.tokenizer import decode_utf8, train_bpe

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROSE = [
    "def walk(self):\n    return 12345 + self.x  # it's done\n\n\nThe end.\r\nOne two three!\n",
    "été\n漢字\nnaïve café\n",
]


def trained(model, trainer, **attributes):
    tokenizer = Tokenizer(model)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    tokenizer.train_from_iterator(PROSE * 3, trainer)
    return tokenizer


def bpe(pre_tokenizer, **options):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=322, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    return trained(models.BPE(**options), trainer, pre_tokenizer=pre_tokenizer, decoder=decoders.ByteLevel())


def gpt_2():
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama_3():
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return bpe(pre_tokenizers.Sequence([split, by_bytes]), ignore_merges=True)


def roberta():
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def sentence_piece():
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=names, unk_token="<unk>", show_progress=False)
    marks = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    return trained(models.Unigram(), trainer, **marks)


def llama_2():
    """BPE over the full text without a pre-tokenizer; blanks become marks, and the text begins with one."""
    names = ["<unk>", "<s>", "</s>"]
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, normalizer=marks)


def bert():
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    words = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, decoder=decoders.WordPiece(), **words)


MAKERS = {maker.__name__: maker for maker in (gpt_2, llama_3, roberta, sentence_piece, llama_2, bert)}
ENDS = {"bert": "[SEP]"}
TOKENIZERS = {name: maker() for name, maker in MAKERS.items()}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
lines = st.lists(st.sampled_from([*"ab Z9é漢_.<'", "\n", "\n", "\r\n", "The", "12345", "it's", "</s>", "[SEP]", "́"]))
texts = lines.map("".join) | st.text()


def definition_of(tokenizer):
    return tokenizer.to_str().encode()


def text_tokenizer(name, **options):
    return TextTokenizer(definition_of(TOKENIZERS[name]), end_of_document=ENDS.get(name), **options)


def edited(tokenizer, **fields):
    return json.dumps({**json.loads(tokenizer.to_str()), **fields}).encode()


def write(folder, name="gpt_2", **config):
    (folder / "tokenizer.json").write_bytes(definition_of(TOKENIZERS[name]))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# -- tokens -----------------------------------------------------------------------------------------------------------


@every_tokenizer
def test_tokens_equal_transformers_without_special_tokens(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, name)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = text_tokenizer(name)
    for text in [*PROSE, "", "\n", "a b  c", "def\twalk\n\nThe 漢字 ☃"]:
        assert tokenizer.encode(text).tolist() == oracle.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )


@every_tokenizer
@given(texts=st.lists(texts, max_size=40))
@settings(max_examples=8, deadline=None)
def test_batched_texts_give_the_tokens_of_single_ones(name, texts):
    tokenizer = text_tokenizer(name)
    batch = tokenizer.encode_all(texts)
    assert [tokens.tolist() for tokens in batch] == [tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("name", ["gpt_2", "llama_3"])
@given(text=texts)
@settings(max_examples=25, deadline=None)
def test_byte_level_text_is_decoded_exactly(name, text):
    tokenizer = text_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "words, kind, array",
    [
        (256, torch.uint8, "uint8"),
        (257, torch.int16, "uint16"),
        (2**15, torch.int16, "uint16"),
        (2**15 + 1, torch.int32, "uint16"),
        (2**16 + 1, torch.int32, "uint32"),
    ],
)
def test_tokens_have_the_smallest_sufficient_dtype(words, kind, array):
    vocabulary = {"</s>": 0, **{f"w{i}": i for i in range(1, words)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer = TextTokenizer(definition_of(inner))
    assert tokenizer.vocab_size == words
    assert tokenizer.encode(f"w{words - 1}").equal(torch.tensor([words - 1], dtype=kind))
    assert tokenizer.encode_all([f"w{words - 1}", ""])[0].dtype == np.dtype(array)


def test_the_vocabulary_counts_added_tokens():
    inner = gpt_2()
    assert TextTokenizer(definition_of(inner)).vocab_size == inner.get_vocab_size(with_added_tokens=True)
    inner.add_tokens(["walkabout"])
    tokenizer = TextTokenizer(definition_of(inner))
    assert tokenizer.encode("walkabout").tolist() == [tokenizer.vocab_size - 1]


# -- special tokens in text -------------------------------------------------------------------------------------------


@every_tokenizer
@given(text=texts)
@example(text="a <|endoftext|><|pad|> b</s></s>\n<s> [SEP] [CLS][PAD]</s>")
@settings(max_examples=15, deadline=None)
def test_text_is_never_encoded_as_special_tokens(name, text):
    tokenizer, inner = text_tokenizer(name), TOKENIZERS[name]
    allowed = {inner.token_to_id(unknown) for unknown in ("<unk>", "[UNK]")}
    special = {token for token, added in inner.get_added_tokens_decoder().items() if added.special} - allowed
    assert not special & set(tokenizer.encode(text).tolist())


def test_special_tokens_of_a_word_vocabulary_are_spelled():
    tokenizer = text_tokenizer("sentence_piece")
    inner = Tokenizer.from_str(TOKENIZERS["sentence_piece"].to_str())
    inner.encode_special_tokens = True
    assert inner.token_to_id("</s>") in inner.encode("a </s> b").ids
    spelled = [piece.id for half in ("<", "/s>") for piece in inner.model.tokenize(half)]
    before, after = (inner.encode(text, add_special_tokens=False).ids for text in ("a ", "b"))
    assert tokenizer.encode("a </s> b").tolist() == [*before, *spelled, *after]


def test_end_of_document_without_special_mark_is_not_read_from_text():
    inner = gpt_2()
    inner.add_tokens(["«end»"])
    tokenizer = TextTokenizer(definition_of(inner), end_of_document="«end»")
    assert tokenizer.end_of_document == inner.token_to_id("«end»")
    tokens = tokenizer.encode("the «end»")
    assert tokenizer.end_of_document not in tokens.tolist()
    assert tokenizer.decode(tokens) == "the «end»"


def test_templates_truncation_padding_and_dropout_are_disabled():
    inner = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), dropout=0.9)
    inner.post_processor = processors.TemplateProcessing("<|pad|> $A", None, [("<|pad|>", 1)])
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    text = PROSE[0] * 5
    assert TextTokenizer(definition_of(inner)).encode(text).equal(text_tokenizer("gpt_2").encode(text))


def test_a_begin_token_precedes_each_text_on_request():
    plain, tokenizer = text_tokenizer("gpt_2"), text_tokenizer("gpt_2", begin_of_document="<|pad|>")
    begin = TOKENIZERS["gpt_2"].token_to_id("<|pad|>")
    for text, tokens in zip(PROSE, tokenizer.encode_all(PROSE), strict=True):
        assert tokens.tolist() == tokenizer.encode(text).tolist() == [begin, *plain.encode(text).tolist()]
    assert tokenizer.encode("").tolist() == [begin]


def test_invalid_utf8_is_read_as_the_replacement_character():
    tokenizer = text_tokenizer("gpt_2")
    assert decode_utf8(b"caf\xe9!") == ("caf\ufffd!", True)
    assert decode_utf8("café".encode()) == ("café", False)
    assert tokenizer.encode(b"caf\xe9!").equal(tokenizer.encode("caf\ufffd!"))


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"eos_token": "<|pad|>"}, {"eos_token": {"content": "<|pad|>", "special": True}}])
def test_the_end_of_document_is_requested_or_configured_or_known(tmp_path, config):
    write(tmp_path, **config)
    assert TextTokenizer.read(tmp_path, "<|endoftext|>").end_name == "<|endoftext|>"
    assert TextTokenizer.read(str(tmp_path / "tokenizer.json")).end_name == "<|pad|>"
    write(tmp_path, eos_token=None)
    tokenizer = TextTokenizer.read(tmp_path)
    assert tokenizer.end_of_document == TOKENIZERS["gpt_2"].token_to_id("<|endoftext|>")
    assert tokenizer.definition == (tmp_path / "tokenizer.json").read_bytes()


def test_the_identity_depends_only_on_the_definition_and_both_names(tmp_path):
    first = TextTokenizer.read(write(tmp_path))
    different = [
        text_tokenizer("llama_3"),
        TextTokenizer.read(tmp_path, "<|pad|>"),
        TextTokenizer.read(tmp_path, begin_of_document="<|pad|>"),
    ]
    assert re.fullmatch("sha256:[0-9a-f]{64}", first.identity)
    assert first.identity == text_tokenizer("gpt_2").identity
    assert len({first.identity, *(other.identity for other in different)}) == 4


def test_a_copy_in_another_process_is_the_same():
    tokenizer = text_tokenizer("gpt_2", begin_of_document="<|pad|>")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.identity == tokenizer.identity
    assert copy.encode("a <|endoftext|>").equal(tokenizer.encode("a <|endoftext|>"))


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_is_reproducible():
    first, second = (train_bpe(iter(PROSE * 2), 300) for _ in range(2))
    assert first.vocab_size == 300
    assert first.definition == second.definition
    assert first.end_name == "<|endoftext|>"


def test_little_text_gives_fewer_tokens_than_requested():
    bare, small = train_bpe(iter([]), 257), train_bpe(iter(["ab ab"]), 1000)
    assert (bare.vocab_size, small.vocab_size) == (257, 258)
    assert small.encode("ab").tolist() == [257]


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
@settings(deadline=None, max_examples=25)
def test_text_absent_from_training_has_tokens(text):
    tokenizer = train_bpe(iter([]), 257)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(ByteTokenizer().encode(text))


# -- bytes ------------------------------------------------------------------------------------------------------------

BYTES = ByteTokenizer()


@given(st.text())
def test_each_byte_is_its_own_token_and_broken_utf8_is_shown_with_the_replacement_character(text):
    tokens = BYTES.encode(text)
    assert tokens.tolist() == list(text.encode()) and tokens.dtype == torch.int16
    assert BYTES.decode(tokens) == text
    tokens = BYTES.encode(b"caf\xe9!")
    assert tokens.tolist() == [*b"caf\xe9!"] and BYTES.decode(tokens) == "caf\ufffd!"
    assert BYTES.decode(torch.tensor([104, 105, 256, 33])) == "hi\n!"
    assert BYTES.vocab_size == BYTES.end_of_document + 1 == 257


def test_streamed_text_has_only_complete_characters():
    shown: list[str] = []
    streamer = TextStreamer(ByteTokenizer(), shown.append)
    for token in (*"aé".encode(), 0xC3):
        streamer.put(token)
    assert shown == ["a", "é"]
    streamer.end()
    assert shown == ["a", "é", "\ufffd"] and streamer.text == "aé\ufffd"
