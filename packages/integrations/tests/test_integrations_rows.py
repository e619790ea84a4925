"""Rows as collators make them, and labels of other losses: results on shards equal transformers' on one rank."""

import json
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from armillary.attention import ContextParallel, Local, sequence
from armillary.attention.internal import documents_of_positions
from armillary.core.testing import mesh, relative_error
from armillary.integrations.transformers.outputs import predicts_next_token
from armillary.integrations.transformers.positions import repeats_positions
from armillary.integrations.whole_batches import shard_inputs

transformers = pytest.importorskip("transformers")

LENGTH, RANKS = 45, 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}
ENDS = [0, 20, LENGTH]
SKIPPING = torch.cat([torch.arange(20), torch.arange(57, 57 + LENGTH - 20)])
"""Position ids of a row whose second document is a later part of a longer one."""


def new_model(name: str, **changes):
    """A tiny model in float64 with reproducible random weights."""
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if "Bert" in name else {}
    options |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "classifier_dropout": 0.0}
    return kind(kind.config_class(**SIZES | options | changes)).double()


def tokens() -> torch.Tensor:
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(loss: torch.Tensor, model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def errors(actual, expected) -> list[float]:
    pairs = zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True)
    return [relative_error(a, b) for a, b in pairs if b.norm() > 1e-9]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- documents --------------------------------------------------------------------------------------------------------


def test_documents_of_position_ids_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(4, (6, 20), generator=generator)
    rows[0], rows[1], rows[2] = torch.arange(20), torch.arange(5, 25), torch.arange(20) % 7
    indices = transformers.masking_utils.find_packed_sequence_indices(rows)
    for row, expected in enumerate(indices):
        ends = documents_of_positions(rows[row : row + 1], None)
        assert torch.equal(torch.bucketize(torch.arange(20), torch.tensor(ends[1:]), right=True), expected)
    assert documents_of_positions(rows, None)[2] == (0, 7, 14, 20)
    assert documents_of_positions(rows[:2], torch.ones(2, 20)) == (0, 20)


PADDED = torch.tensor([*ENDS, LENGTH, LENGTH], dtype=torch.int32)
SKIPS = {"position_ids": SKIPPING[None]}
ROWS = {
    "positions that skip": SKIPS,
    "positions that skip in a masked row": SKIPS | {"attention_mask": torch.ones(2, LENGTH).long()},
    "boundaries": {"position_ids": torch.cat([torch.arange(20), torch.arange(25)])[None]},
}


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """Labels without one across documents, where `cp.shard` and transformers differ."""
    return ids.index_fill(1, torch.tensor([20, 33]), -100)


def results_of_rows() -> list[tuple[str, tuple]]:
    """Results of each of ROWS through `cp.shard` and through a collator's inputs, and with padded boundaries."""
    cp, ids, plain = ContextParallel("ring", mesh(ring=RANKS)), tokens(), new_model("LlamaForCausalLM")
    results = []

    def add_result(name: str, batch, inputs: dict, block=None) -> None:
        model = cp.prepare(deepcopy(plain))
        with block or batch:
            loss = cp.loss(model(**inputs).loss, batch)
        loss.backward()
        cp.reduce_gradients(model)
        results.append((name, (loss.detach(), [p.grad for p in model.parameters()])))

    for name, row in ROWS.items():
        batch = cp.shard(ids, labels_of(ids), **row)
        add_result(name, batch, batch.inputs)
        batch, inputs = shard_inputs(cp, {"input_ids": ids, "labels": labels_of(ids), **row})
        add_result(f"{name}, collator", batch, {**inputs, "num_items_in_batch": batch.labelled})
    row = ROWS["boundaries"]
    for documents in (PADDED, PADDED.numpy()):
        batch = cp.shard(ids, labels_of(ids), documents=documents, **row)
        add_result("boundaries, cp.shard", batch, batch.inputs)
    boundaries = {f"cu_seq_lens_{side}": PADDED for side in "qk"}
    add_result("boundaries, model", batch, {**batch.inputs, **boundaries}, sequence(layout=batch.layout))
    add_result("boundaries, block", batch, batch.inputs, sequence(layout=batch.layout, documents=PADDED))
    return results


def test_packed_rows_equal_one_rank(worlds):
    ids, expected = tokens(), {}
    for name, row in ROWS.items():
        model = new_model("LlamaForCausalLM")
        loss = model(input_ids=ids, labels=labels_of(ids), use_cache=False, **row).loss
        expected[name] = loss_and_gradients(loss, model)
    for rank in worlds(RANKS).run(results_of_rows):
        for name, actual in rank:
            # Angles of RoPE and transformers' loss are in float32.
            assert max(errors(actual, expected[name.split(",")[0]])) < 1e-5, name


def test_boundaries_may_repeat_and_position_ids_may_restart_beside_a_mask_with_documents():
    ids, cp = tokens(), ContextParallel(Local())
    for ends in (PADDED, PADDED.numpy()):
        batch, _ = shard_inputs(cp, {"input_ids": ids[:1], "cu_seq_lens_q": ends, "max_length_q": 25})
        assert batch.documents == tuple(ENDS)
    restarting = ROWS["boundaries"]["position_ids"]
    batch = cp.shard(ids, position_ids=restarting, attention_mask=torch.ones_like(ids), documents=ENDS)
    assert batch.documents == (tuple(ENDS),) * 2


def test_a_bidirectional_model_finds_no_documents_in_position_ids():
    """transformers does not either: the row is one document on one rank."""
    cp, ids = ContextParallel(Local()), tokens()
    model = cp.prepare(new_model("ModernBertForMaskedLM"))
    batch = cp.shard(ids, position_ids=SKIPPING[None])
    with pytest.raises(ValueError, match="documents="), batch:
        model(**batch.inputs)
    expected = new_model("ModernBertForMaskedLM")(ids, position_ids=SKIPPING[None]).logits
    with cp.shard(ids, position_ids=SKIPPING[None], documents=[0, LENGTH]) as batch:
        assert relative_error(model(**batch.inputs).logits, expected) < 1e-6


# -- labels -----------------------------------------------------------------------------------------------------------

OTHER_LOSSES = ("ModernBertForMaskedLM", "BertForMaskedLM", "MistralForTokenClassification")


def test_the_loss_of_a_model_is_read_from_it():
    own = (*OTHER_LOSSES, "GPT2ForTokenClassification", "BertForPreTraining", "LlamaForSequenceClassification")
    next_token = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "GPT2DoubleHeadsModel")
    actual = {name: predicts_next_token(new_model(name)) for name in (*own, *next_token)}
    assert actual == dict.fromkeys(own, False) | dict.fromkeys(next_token, True)


def masked_labels(ids: torch.Tensor) -> torch.Tensor:
    """Labels of some tokens, of few classes, with another number of them on each rank."""
    return (ids % 2).masked_fill(torch.arange(LENGTH) % 7 > 2, -100).index_fill(1, torch.arange(9), -100)


def results_of_other_losses() -> list[tuple[str, tuple]]:
    results = []
    for name in OTHER_LOSSES:
        cp, ids = ContextParallel("ring", mesh(ring=RANKS)), tokens()
        model = cp.prepare(new_model(name))
        for refused in ({"labels": ids}, {"labels": ids, "documents": ENDS}):
            with pytest.raises(ValueError, match="shift_labels="):
                cp.shard(ids, **refused)
        with cp.shard(ids) as batch:
            logits = model(**batch.inputs).logits
        with pytest.raises(ValueError, match="shift_labels="):
            cp.loss(logits, batch)
        with cp.shard(ids, shift_labels=masked_labels(ids)) as batch:
            output = model(**batch.inputs)
        with pytest.raises(ValueError, match="logits"):
            cp.loss(output.loss, batch)
        with pytest.raises(ValueError, match=r"batch\.labelled"):  # its inputs have no number of labels
            cp.loss(cross_entropy(output.logits, batch.labels), batch)
        loss = cp.loss(output.logits, batch)
        loss.backward()
        cp.reduce_gradients(model)
        results.append((name, (loss.detach(), [p.grad for p in model.parameters() if p.grad is not None])))
    return results


def test_losses_of_tokens_themselves_equal_one_rank(worlds):
    for results in zip(*worlds(RANKS).run(results_of_other_losses), strict=True):
        name, ids = results[0][0], tokens()
        model = new_model(name)
        logits = model(input_ids=ids).logits
        expected = loss_and_gradients(cross_entropy(logits, masked_labels(ids)), model)
        for _, actual in results:
            assert max(errors(actual, expected)) < 1e-5, name  # angles of RoPE are in float32


def test_a_context_parallel_of_two_models_shifts_no_labels_of_either():
    cp, ids = ContextParallel(Local()), tokens()
    assert cp.shifts_labels
    cp.prepare(new_model("BertForMaskedLM"))
    cp.prepare(new_model("LlamaForCausalLM"))
    with pytest.raises(ValueError, match="shift_labels="):
        cp.shard(ids, ids)
    with pytest.raises(ValueError, match="next token"):
        shard_inputs(cp, {"input_ids": ids, "labels": ids})
    inputs = shard_inputs(cp, {"input_ids": ids})[1]
    assert not {"labels", "shift_labels"} & set(inputs)


# -- caches, saved configs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertLMHeadModel"])
def test_a_prepared_model_makes_no_cache_and_is_saved_unchanged(name, tmp_path):
    plain, ids = new_model(name, **{"is_decoder": True} if "Bert" in name else {}).eval(), tokens()
    plain.save_pretrained(tmp_path / "plain")
    cp = ContextParallel(Local())
    model = cp.prepare(cp.prepare(deepcopy(plain)))  # twice: hooks are registered once
    model.save_pretrained(tmp_path / "prepared")
    for file in ("config.json", "generation_config.json"):
        saved = [json.loads((tmp_path / folder / file).read_text()) for folder in ("plain", "prepared")]
        assert saved[0] == saved[1]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "prepared").use_cache
    with cp.shard(ids) as batch:
        calls = [batch.inputs, {**batch.inputs, "use_cache": None}]
        assert not any(cache_of(model(**inputs)) for inputs in calls)
        if name == "LlamaForCausalLM":
            assert not cache_of(model(batch.ids, None, batch.position_ids))
            assert cache_of(model(batch.ids, None, batch.position_ids, None, None, None, True))
            assert not cache_of(model.model(batch.ids, position_ids=batch.position_ids))
    if name == "LlamaForCausalLM":
        model.set_attn_implementation("sdpa")
        assert cache_of(model(ids))


def cache_of(output) -> bool:
    return output.past_key_values is not None


# -- position ids of images -------------------------------------------------------------------------------------------


def test_models_with_several_position_ids_are_recognized():
    for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Glm4v", "Qwen2_5OmniThinker"):
        assert repeats_positions(getattr(transformers, f"{name}TextModel")), name
    assert not repeats_positions(transformers.LlamaModel)
