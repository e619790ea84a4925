"""transformers models that compute position ids by their own rule: equal to one rank, or refused."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from armillary.attention import ContextParallel, Local, Ring, Ulysses
from armillary.core.testing import mesh, relative_error
from armillary.integrations import register_transformers
from armillary.integrations.transformers.models import padding_idx_of

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY, PADDING = 50, 64, 3
DOCUMENTS = ((0, 11, 33, LENGTH), (0, LENGTH))
VISIBLE = (LENGTH, 37)
"""Tokens of each row before its padding."""
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 96, "pad_token_id": PADDING}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PROTEIN = {"mask_token_id": 1, "token_dropout": False}
FAMILIES = {
    "RobertaForMaskedLM": {},
    "RobertaForCausalLM": {"is_decoder": True},
    "CamembertForCausalLM": {"is_decoder": True},
    "XLMRobertaForMaskedLM": {},
    "XLMRobertaXLForMaskedLM": {},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "RobertaPreLayerNormForMaskedLM": {},
    "Data2VecTextForMaskedLM": {},
    "EsmForMaskedLM": PROTEIN,
    "EsmForMaskedLM, rotary": PROTEIN | {"position_embedding_type": "rotary"},
    "BertForMaskedLM": {},
}
COUNTING_FROM_0 = ("EsmForMaskedLM, rotary", "BertForMaskedLM")


class InFloat64(TorchFunctionMode):
    """Keeps float64 where models convert to float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if func is not F.softmax or k != "dtype"})


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def usp():
    return Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"]))


def model(family: str, implementation: str, **changes):
    kind = getattr(transformers, family.split(",")[0])
    config = kind.config_class(**SIZES | FAMILIES.get(family, {}) | changes, attn_implementation=implementation)
    torch.manual_seed(0)
    built = kind(config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return built


def tokens(padded: bool):
    """Returns ids [2, LENGTH], their attention mask, and the gradient of the logits, 0 for padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(PADDING + 1, VOCABULARY, (2, LENGTH), generator=generator)
    dout = torch.randn(2, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    mask = torch.ones_like(ids)
    if padded:
        for row, count in enumerate(VISIBLE):
            mask[row, count:] = 0
    return ids.masked_fill(mask == 0, PADDING), mask, dout * mask[..., None]


def on_a_shard(family: str, padding: str):
    """Returns local logits (0 for padding), local gradients and the positions of local tokens."""
    attend = usp()
    register_transformers(attend)
    built, (ids, mask, dout) = model(family, "armillary"), tokens(padding == "padded")
    arguments = (
        {"documents": DOCUMENTS} if padding == "packed" else {"attention_mask": mask} if padding == "padded" else {}
    )
    cp = ContextParallel(attend)
    cp.padding_idx = padding_idx_of(built)
    batch = cp.shard(ids, **arguments)
    inputs = {"input_ids": batch.ids, "position_ids": batch.position_ids, "attention_mask": batch.attention_mask}
    with batch, InFloat64():
        logits = built(**inputs).logits
    logits.backward(batch.layout.take(dout, attend.shard))
    is_token = batch.layout.take(mask, attend.shard)[..., None]
    return logits.detach() * is_token, [p.grad for p in built.parameters()], batch.layout.positions(attend.shard)


def on_one_rank(family: str, padding: str):
    """Logits and gradients with the model's position ids, one document at a time."""
    built, (ids, mask, dout) = model(family, "eager"), tokens(padding == "padded")
    logits = []
    with InFloat64():
        for row in range(2):
            for low, high in pairwise(DOCUMENTS[row] if padding == "packed" else (0, LENGTH)):
                document = slice(row, row + 1), slice(low, high)
                logits.append(built(ids[document], attention_mask=mask[document]).logits)
    full = torch.cat(logits, 1).view(2, LENGTH, VOCABULARY)
    full.backward(dout)
    return full.detach() * mask[..., None], [p.grad for p in built.parameters()]


CASES = [("RobertaForMaskedLM", padding) for padding in ("packed", "whole", "padded")]
CASES += [("RobertaForCausalLM", "padded"), ("EsmForMaskedLM", "packed")]
CASES += [(family, "packed") for family in COUNTING_FROM_0]
"""One model of each rule: the other families have RoBERTa's, by `test_the_rule_is_read_from_the_model`."""
LONG_CASES = [(family, "packed") for family in FAMILIES if (family, "packed") not in CASES]


def results_on_a_shard(cases: list[tuple[str, str]]):
    transformers.logging.set_verbosity_error()
    return [on_a_shard(*case) for case in cases]


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG_CASES, marks=pytest.mark.long)], ids=["each rule", "all"])
def test_shards_have_the_position_ids_of_full_rows(worlds, cases):
    for case, *answers in zip(cases, *worlds(4).run(results_on_a_shard, cases), strict=True):
        logits, gradients = on_one_rank(*case)
        full = torch.zeros_like(logits)
        for shard, _, positions in answers:
            full[:, positions] = shard
        assert relative_error(full, logits) < 1e-12, case
        for gradient, *local_gradients in zip(gradients, *(answer[1] for answer in answers), strict=True):
            if gradient is not None and gradient.norm() > 1e-9:
                total = sum(x for x in local_gradients if x is not None)
                assert relative_error(total, gradient) < 1e-12, case


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_is_read_from_the_model(family):
    register_transformers(Local())
    expected = None if family in COUNTING_FROM_0 else PADDING
    assert padding_idx_of(model(family, "armillary")) == expected


def test_an_unknown_rule_is_refused(monkeypatch):
    register_transformers(Local())
    built = model("RobertaForMaskedLM", "armillary")
    embeddings = type(built.roberta.embeddings)
    monkeypatch.setattr(embeddings, "create_position_ids_from_input_ids", staticmethod(lambda ids, padding_idx: ids))
    with pytest.raises(ValueError, match=r"RobertaEmbeddings\.create_position_ids_from_input_ids"):
        padding_idx_of(built)


def test_position_ids_of_a_batch_count_from_padding_idx():
    ids, mask, _ = tokens(padded=True)
    cp = ContextParallel(Local())
    cp.padding_idx = PADDING
    batch = cp.shard(ids, attention_mask=mask)
    rule = transformers.models.roberta.modeling_roberta.RobertaEmbeddings.create_position_ids_from_input_ids
    assert torch.equal(batch.position_ids * mask, rule(ids, PADDING) * mask)
    documents = cp.shard(tokens(False)[0], documents=DOCUMENTS)
    resharded = cp.shard(tokens(False)[0], position_ids=documents.position_ids)
    assert resharded.documents == documents.documents == DOCUMENTS
    assert int(documents.position_ids.min()) == PADDING + 1


def test_models_that_count_from_different_numbers_need_two_context_parallels():
    roberta, bert = (model(family, "eager") for family in ("RobertaForMaskedLM", "BertForMaskedLM"))
    for first, second in ((roberta, bert), (bert, roberta)):
        cp = ContextParallel(Local())
        cp.prepare(cp.prepare(first))  # a model counts as itself
        padding_idx = cp.padding_idx
        with pytest.raises(ValueError, match=rf"padding_idx={PADDING}"):
            cp.prepare(second)
        assert cp.padding_idx == padding_idx == (PADDING if first is roberta else None)
        ContextParallel(Local()).prepare(second)
