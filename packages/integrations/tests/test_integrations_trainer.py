"""Hugging Face's Trainer on shards: logs, predictions, checkpoints and weights equal one rank's."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from armillary.attention import ContextParallel, Local, Ring, Ulysses
from armillary.core.testing import mesh, relative_error
from armillary.integrations import ContextParallelTrainer, register_transformers
from armillary.integrations.testing import accelerated
from armillary.integrations.trainer import attention_method
from armillary.integrations.whole_batches import shard_inputs

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
MEASURED = ("runtime", "per_second", "flos")
FSDP2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"transformer_layer_cls_to_wrap": ["MistralDecoderLayer"]}


class LongTrainer(ContextParallelTrainer, transformers.Trainer):
    pass


def model(implementation: str, family: str = "MistralForCausalLM", **options):
    torch.manual_seed(0)
    model_class = getattr(transformers, family)
    settings = {"sliding_window": 9, **options, "attn_implementation": implementation}
    built = model_class(model_class.config_class(**SIZES, **HEADS, **settings)).double()
    with torch.no_grad():
        for parameter in built.parameters():  # nonzero key biases: relative errors divide by their norm
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return built


def rows(count: int, seed: int = 1):
    """Rows of 11 to 37 tokens that begin with a prompt without labels."""
    draw = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(count):
        length, prompt = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((11, 38), (0, 6)))
        ids = torch.randint(1, VOCABULARY, (length,), generator=draw)
        results.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < prompt, -100)})
    return results


def padded(batch):
    """Pads rows on the right, like a tokenizer's collator."""
    masked = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in batch]
    fill = {name: -100 if name == "labels" else 0 for name in masked[0]}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([row[name] for row in masked], batch_first=True, padding_value=fill[name]) for name in fill}


def packed(batch):
    lists = [{name: x.tolist() for name, x in row.items()} for row in batch]
    return transformers.DataCollatorWithFlattening()(lists)


def arguments(folder, **changes):
    """Arguments of a run of 4 steps of two micro-batches; with 14 rows the last step of an epoch has only one."""
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_steps": 2, "save_steps": 2, "logging_steps": 1}
    settings |= {"eval_strategy": "steps", "save_strategy": "steps", "report_to": [], "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    settings |= {"include_num_input_tokens_seen": "non_padding", "use_cpu": True, "dataloader_pin_memory": False}
    return transformers.TrainingArguments(str(folder), **settings | changes)


def trainer(kind: type, implementation: str, folder, collator=padded, data=None, family=None, **changes):
    built = model(implementation, **family or {})
    return kind(built, arguments(folder, **changes), collator, data or rows(14), eval_dataset=rows(4, seed=2))


def train(run, checkpoint=None):
    """Logs and parameters after training, from a checkpoint if there is one."""
    run.train(resume_from_checkpoint=checkpoint)
    return run.state.log_history, [getattr(p, "full_tensor", p.clone)().detach() for p in run.model.parameters()]


def train_predict_and_resume(kind: type, implementation: str, folder, **changes):
    """Results of `train`, predictions of five rows with and without labels, and results of a resumed run."""
    run = trainer(kind, implementation, folder, **changes)
    trained, predictions = train(run), run.predict(rows(5, seed=3))
    run.args.include_num_input_tokens_seen = "no"
    unlabelled = run.predict([{"input_ids": row["input_ids"]} for row in rows(5, seed=3)]).predictions
    resumed = train(trainer(kind, implementation, folder, **changes), str(folder / "checkpoint-2"))
    return trained, predictions, unlabelled, resumed


SHORT = {"max_steps": 2, "eval_steps": 2, "save_strategy": "no"}
ROBERTA = {"family": "RobertaForCausalLM", "is_decoder": True, "hidden_dropout_prob": 0.0}
ROBERTA |= {"attention_probs_dropout_prob": 0.0}
VARIANTS = {
    # AdamW would amplify gradients that are only rounding.
    "position ids from padding_idx": {"family": ROBERTA, "optim": "sgd"},
    "packed": {"collator": packed, "include_num_input_tokens_seen": "all"},
    "smoothed": {"label_smoothing_factor": 0.1},
}


def variants(kind: type, implementation: str, folder):
    return {
        name: train(trainer(kind, implementation, folder / name, **SHORT | changes))
        for name, changes in VARIANTS.items()
    }


def on_ranks(folder):
    """Results of runs under DDP and under FSDP2 in two groups, of resumed runs and variants, and refusals."""
    usp = Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"]))
    register_transformers(usp)
    register_transformers(Ring(mesh(shard=2, ring=2)["ring"]), "in groups")
    with accelerated():
        results = variants(LongTrainer, "armillary", folder)
        results["ddp"] = train_predict_and_resume(LongTrainer, "armillary", folder / "ddp")
        results["refused"] = refusals_on_ranks(folder)
    with accelerated():
        halves = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
        sharded = {"fsdp": True, "fsdp_config": FSDP2, **halves}
        results["fsdp2"] = train_predict_and_resume(LongTrainer, "in groups", folder / "fsdp2", **sharded)
    return results


def refusals_on_ranks(folder):
    """Errors for rows that differ between ranks, and for a loss that does not predict the next token."""
    run = trainer(LongTrainer, "armillary", folder / "refused", data=rows(14, seed=dist.get_rank() // 3), **SHORT)
    tagger = model("armillary", "MistralForTokenClassification")
    batch = run.cp.shard(torch.ones(2, 16, dtype=torch.long))
    with pytest.raises(ValueError) as of_rows:
        run.train()
    with pytest.raises(ValueError) as of_loss, batch:
        tagger(**batch.inputs)
    return [str(of_rows.value), str(of_loss.value)]


@pytest.fixture(scope="module")
def runs(worlds, tmp_path_factory):
    """Results of one rank, and of each of four ranks."""
    folder = tmp_path_factory.mktemp("trainer")
    ranks = worlds(4).run(on_ranks, folder)
    with accelerated():
        one = variants(transformers.Trainer, "sdpa", folder / "one")
        one["whole"] = train_predict_and_resume(transformers.Trainer, "sdpa", folder / "one")
    return one, ranks


def check_logs(actual, expected):
    for sharded, full in zip(actual, expected, strict=True):
        for name in full:
            if not any(word in name for word in MEASURED):
                assert sharded[name] == pytest.approx(full[name], rel=1e-6), name  # logged losses are float32


def check_parameters(actual, expected):
    assert max(relative_error(a, b) for a, b in zip(actual, expected, strict=True)) < 1e-12


@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_steps_and_predictions_equal_one_rank_and_resume_from_a_checkpoint(runs, run):
    one, ranks = runs
    (full_logs, learned), full, full_unlabelled, (full_resumed_logs, _) = one["whole"]
    for rank in ranks:
        (logs, parameters), actual, unlabelled, (resumed_logs, resumed_parameters) = rank[run]
        check_logs(logs, full_logs)
        check_logs(resumed_logs, full_resumed_logs)
        check_parameters(parameters, learned)
        check_parameters(resumed_parameters, learned)
        # Predictions, in sequence order.
        assert np.array_equal(actual.label_ids, full.label_ids)
        label_indices = (full.label_ids != -100).nonzero()
        for sharded, expected in ((actual.predictions, full.predictions), (unlabelled, full_unlabelled)):
            assert sharded.shape == expected.shape
            assert relative_error(torch.tensor(sharded[label_indices]), torch.tensor(expected[label_indices])) < 1e-12
        if run == "ddp":  # of a last batch that some groups lack, Trainer's loss is another on several ranks
            assert actual.metrics["test_loss"] == pytest.approx(full.metrics["test_loss"], rel=1e-6)


def test_variants_equal_one_rank(runs):
    one, ranks = runs
    for variant in VARIANTS:
        check_logs(ranks[0][variant][0], one[variant][0])
        check_parameters(ranks[0][variant][1], one[variant][1])


def test_unequal_rows_and_other_losses_are_refused_by_all_ranks(runs):
    _, ranks = runs
    for messages in zip(*(rank["refused"] for rank in ranks), strict=True):
        assert len(set(messages)) == 1
    assert re.search("input_ids .*ranks .*3", ranks[0]["refused"][0])
    assert re.search("ForTokenClassification .*shift_labels", ranks[0]["refused"][1])


def test_a_model_whose_parts_attend_by_different_methods_is_refused():
    for name in ("armillary-text", "armillary-image"):
        register_transformers(Local(), name)
    parts = {"text": "armillary-text", "image": "armillary-image"}
    configs = {name: SimpleNamespace(_attn_implementation=implementation) for name, implementation in parts.items()}
    config = SimpleNamespace(sub_configs=parts, **configs)
    with pytest.raises(ValueError, match="Local, Local"):
        attention_method(SimpleNamespace(config=config))
    config.image = config.text
    assert isinstance(attention_method(SimpleNamespace(config=config)), Local)


# -- padding ----------------------------------------------------------------------------------------------------------


def test_padding_on_both_sides_is_masked():
    attend = Local()
    register_transformers(attend)
    ids = torch.stack([torch.arange(1, 13), torch.arange(21, 33)])
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[0, 10:] = mask[1, 9:] = 0
    positions = torch.arange(12)[None]
    position_ids = positions * mask  # collators pad with 0
    batch = ContextParallel(attend).shard(ids, attention_mask=mask, position_ids=position_ids)
    with batch:
        output = model("armillary")(**batch.inputs, use_cache=False)
    full = model("sdpa")(ids, attention_mask=mask, position_ids=positions, labels=ids.masked_fill(mask == 0, -100))
    is_token = mask.bool()
    assert relative_error(output.logits[is_token], full.logits[is_token]) < 1e-12
    assert batch.labelled == 6 + 8
    assert float(output.loss.detach()) == pytest.approx(loss_without_the_first(full.logits, ids, mask), rel=1e-6)


def loss_without_the_first(logits, ids, mask):
    """The mean loss of tokens with a predecessor: in transformers' loss padding predicts the first token."""
    has_predecessor = (mask[:, 1:] * mask[:, :-1]).bool()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1][has_predecessor], ids[:, 1:][has_predecessor])
    return float(losses.detach())


def test_boundaries_without_position_ids_count_from_padding_idx():
    ids, ends = torch.arange(5, 17)[None], torch.tensor([0, 7, 12])
    cp = ContextParallel(Local())
    cp.padding_idx = 3
    batch, model_inputs = shard_inputs(cp, {"input_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends})
    assert batch.documents == (0, 7, 12)
    assert model_inputs["position_ids"].tolist() == [list(range(4, 16))]


def test_position_ids_that_restart_are_packed_rows():
    ids = torch.arange(1, 7)[None]
    rows_of_two = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    batch, _ = shard_inputs(ContextParallel(Local()), rows_of_two)
    assert batch.documents == (0, 3, 6)
    assert batch.labels.tolist() == [[2, 3, 4, 5, 6, -100]]  # transformers' labels, which predict the next document
