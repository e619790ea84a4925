"""Models of transformers with one output per row: right on every rank, or refused by the output's name."""

import re
from contextlib import nullcontext
from copy import deepcopy
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from armillary.attention import ContextParallel, sequence
from armillary.core.testing import mesh, relative_error

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = SIZES | {"attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
MODERN = SIZES | {"pad_token_id": 0, "num_labels": 3} | dict.fromkeys(("bos_token_id", "cls_token_id"), 1)
MODERN |= dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
LENGTH, LABELS = 50, torch.tensor([0, 2, 1])
CLASSIFIERS = {
    "Llama": SIZES | {"num_key_value_heads": 2, "pad_token_id": 0},
    "Qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "GPT2": GPT2,
    "ModernBertDecoder": MODERN,
}


def build(name: str, head: str, **settings):
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{head}")(config).double()


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 50, 30 and 10 tokens: on zigzag shards, their last tokens are on different ranks."""
    ids = torch.randint(1, 64, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    attention_mask = (torch.arange(LENGTH) < torch.tensor([[50], [30], [10]])).long()
    return ids * attention_mask, attention_mask


def step(model, *inputs, **options):
    """The scores, the loss, and the gradients of both: the loss of the model and one of the scores."""
    out = model(*inputs, **options, labels=LABELS)
    (out.loss + out.logits.square().mean()).backward()
    return out.logits.detach(), out.loss.detach()


def gradients(model) -> list[torch.Tensor]:
    return [p.grad for name, p in sorted(model.named_parameters()) if "k_proj.bias" not in name]


def errors_of_classifiers() -> dict[str, float]:
    """For each classifier: relative errors of scores and loss, and the largest one of a gradient."""
    cp, errors = ContextParallel("usp", mesh(ring=2, ulysses=2)), {}
    ids, attention_mask = padded_rows()
    for name, settings in CLASSIFIERS.items():
        plain = build(name, "ForSequenceClassification", **settings | {"num_labels": 3})
        model = cp.prepare(deepcopy(plain))
        expected = step(plain, ids, attention_mask=attention_mask)
        with cp.shard(ids, attention_mask=attention_mask) as batch:
            inputs = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
            actual = step(model, batch.ids, **inputs)
        cp.reduce_gradients(model)
        pairs = [*zip(actual, expected, strict=True), *zip(gradients(model), gradients(plain), strict=True)]
        errors[name] = max(relative_error(a, b) for a, b in pairs)
    return errors


def test_scores_of_padded_rows_equal_one_rank(worlds):
    for errors in worlds(4).run(errors_of_classifiers):
        assert all(error < 1e-6 for error in errors.values()), errors  # norms are in float32


def score_of_packed_row():
    """Scores of a row of two documents, on shards and on one rank; and of embeddings, without an id of padding."""
    cp = ContextParallel("ring", mesh(ring=2))
    ids, positions = padded_rows()[0][:1], torch.cat([torch.arange(20), torch.arange(30)])[None]
    plain = build("Llama", "ForSequenceClassification", **CLASSIFIERS["Llama"])
    model = cp.prepare(deepcopy(plain))
    plain.config.use_cache = False
    with torch.no_grad(), cp.shard(ids, position_ids=positions) as batch:
        packed = model(input_ids=batch.ids, position_ids=batch.position_ids).logits
        embeddings = model.model.embed_tokens(batch.ids)
        embedded = model(inputs_embeds=embeddings, position_ids=batch.position_ids, return_dict=False)[0]
    return packed, embedded, plain(input_ids=ids, position_ids=positions).logits.detach()


def test_score_of_a_packed_row_is_that_of_its_last_document(worlds):
    for packed, embedded, expected in worlds(2).run(score_of_packed_row):
        assert relative_error(packed, expected) < 1e-6 and relative_error(embedded, expected) < 1e-6


def scores_without_an_id_of_padding() -> tuple[list[float], list[str]]:
    """Relative errors of a padded row's score, from ids and from embeddings, and the errors of calls without a mask."""
    cp = ContextParallel("ring", mesh(ring=dist.get_world_size()))
    ids, attention_mask = (x[1:2] for x in padded_rows())
    plain = build("Llama", "ForSequenceClassification", **SIZES)
    model, scores, refusals = cp.prepare(deepcopy(plain)), [], []
    with torch.no_grad():
        alone = plain(ids[:, attention_mask[0] == 1]).logits
        batch = cp.shard(ids, attention_mask=attention_mask)
        with_mask = {"input_ids": batch.ids, "attention_mask": batch.attention_mask}
        without = {"input_ids": batch.ids}, {"inputs_embeds": model.model.embed_tokens(batch.ids)}
        for inputs in (with_mask, *without):
            with batch:
                scores.append(model(**inputs, position_ids=batch.position_ids).logits)
            # The layout and documents do not tell padding.
            block = sequence(layout=batch.layout, documents=batch.documents, padded=True)
            with pytest.raises(ValueError) as raised, block:
                model(**{k: x for k, x in inputs.items() if k != "attention_mask"}, position_ids=batch.position_ids)
            refusals.append(str(raised.value))
        several = cp.shard(torch.cat([ids, ids]))
        with pytest.raises(ValueError) as raised, several:  # transformers' own refusal
            model(input_ids=several.ids, position_ids=several.position_ids)
    return [relative_error(score, alone) for score in scores], [*refusals, str(raised.value)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_score_of_a_padded_row_without_an_id_of_padding_is_that_of_the_row_alone(worlds, ranks):
    for errors, refusals in worlds(ranks).run(scores_without_an_id_of_padding):
        assert max(errors) < 1e-6
        assert all("attention_mask" in refusal for refusal in refusals[:3]) and "batch sizes > 1" in refusals[3]


POSITIONS = {"start_positions": LABELS, "end_positions": LABELS}
REFUSED = {  # name: (model, head, settings, inputs of the call, output or argument in the error)
    "pooler": ("Bert", "Model", BERT, {}, "pooler_output"),
    "pooler as wide as the shard is long": ("Bert", "Model", BERT | {"hidden_size": 24}, {}, "pooler_output"),
    "tuple": ("Bert", "Model", BERT, {"return_dict": False}, r"output\[1\]"),
    "cls": ("Bert", "ForSequenceClassification", BERT, {}, "logits"),
    "cls of another model": ("ModernBert", "ForSequenceClassification", MODERN, {}, "logits"),
    "mean": ("ModernBert", "ForSequenceClassification", MODERN | {"classifier_pooling": "mean"}, {}, "logits"),
    "answers, own loss": ("Bert", "ForQuestionAnswering", BERT, POSITIONS, "loss"),
    "answers": ("Llama", "ForQuestionAnswering", SIZES, POSITIONS, "shift_labels"),
    "answers to a question": ("Splinter", "ForQuestionAnswering", BERT, {}, "SplinterForQuestionAnswering selects"),
    "one logit": ("Llama", "ForCausalLM", SIZES, {"logits_to_keep": 1}, "logits_to_keep=1.* 25 .* 50 "),
    "chosen logits": ("Llama", "ForCausalLM", SIZES, {"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
    "text tower": ("CLIPText", "ModelWithProjection", SIZES | {"eos_token_id": 2}, {}, "text_embeds|pooler_output"),
}


def first_output(model, args, output):
    return output[:1]


MOE = SIZES | {"num_key_value_heads": 2, "experts_implementation": "eager"}
ACCEPTED = {
    "answers": ("Llama", "ForQuestionAnswering", SIZES, {}),
    "answers as wide as the shard is long": ("Bert", "ForQuestionAnswering", BERT | {"hidden_size": 24}, {}),
    "tokens": ("Llama", "ForTokenClassification", SIZES, {"output_hidden_states": True}),
    "pooled by the model itself, left out": ("CLIPText", "Model", SIZES | {"eos_token_id": 2}, {}, first_output),
    "routers": ("Mixtral", "Model", MOE, {"output_router_logits": True}),
}


def prepared_call(name: str, head: str, settings: dict, inputs: dict, hook=None) -> str:
    """The error of a call with these inputs, or "" without one."""
    cp = ContextParallel("ring", mesh(ring=2))
    length = 48 if settings.get("hidden_size") == 24 else LENGTH  # shards as long as the model is wide
    ids = padded_rows()[0][:, :length]
    try:
        model = cp.prepare(build(name, head, **settings))
        if hook is not None:
            model.register_forward_hook(hook, prepend=True)
        with cp.shard(ids, documents=[0, length]) as batch:
            model(input_ids=batch.ids, position_ids=batch.position_ids, **inputs)
    except ValueError as error:
        return str(error)
    return ""


def calls(cases: list) -> list[str]:
    return [prepared_call(*case) for case in cases]


def test_outputs_of_one_shard_are_refused_by_name_and_those_of_tokens_accepted(worlds):
    refused, accepted = [case[:4] for case in REFUSED.values()], list(ACCEPTED.values())
    for errors in worlds(2).run(calls, refused + accepted):
        for (name, case), error in zip(REFUSED.items(), errors, strict=False):
            assert re.search(case[4], error), (name, error)
        assert not any(errors[len(REFUSED) :]), errors


ENCODER = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "dim_head": 8, "feedforward_mult": 2, "input_dim": 8}
ENCODER |= {"output_dim": 8, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3, "conv_expansion_factor": 2}
PROJECTOR = {"model_type": "blip_2_qformer", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
PROJECTOR |= {"num_attention_heads": 2, "encoder_hidden_size": 16}
SPEECH = {"text_config": {"model_type": "granite"} | SIZES, "encoder_config": ENCODER, "projector_config": PROJECTOR}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}


class WithPenalty(transformers.LlamaForCausalLM):
    def forward(self, **inputs):
        out = super().forward(**inputs)
        out.loss += out.logits.square().mean()
        return out


def own_losses() -> list[str]:
    """The errors of models, wholly or partly prepared, with other losses than transformers' loss functions return."""
    cp, errors = ContextParallel("ring", mesh(ring=2)), []
    speech = [build("GraniteSpeech", "ForConditionalGeneration", **SPEECH, has_lora_adapter=False) for _ in range(2)]
    bamba = build("Bamba", "ForCausalLM", **SIZES, **MAMBA, num_key_value_heads=2, z_loss_coefficient=0.3)
    penalty = WithPenalty(transformers.LlamaConfig(**SIZES)).double()
    wrapped = deepcopy(penalty)
    wrapped.forward = wraps(wrapped.forward)(partial(wrapped.forward))  # as accelerate does for mixed precision
    whole = [(model, model) for model in (speech[0], bamba, penalty, wrapped)]
    for model, prepared in (*whole, (speech[1], speech[1].model.language_model)):
        cp.prepare(prepared)
        for context in (nullcontext(), torch.inference_mode()):
            with pytest.raises(ValueError) as raised, cp.shard(padded_rows()[0]) as batch, context:
                model(**batch.inputs)
            errors.append(str(raised.value))
    return errors


def test_losses_that_a_model_computes_or_adds_to_are_refused_by_name(worlds):
    speech = "GraniteSpeechForConditionalGeneration"
    expected = (
        f"{speech} returns",
        "z_loss_coefficient=0.3",
        "WithPenalty",
        "WithPenalty",
        rf"{speech} was given labels",
    )
    for errors in worlds(2).run(own_losses):
        for i, pattern in enumerate(expected):
            assert all(re.search(pattern, error) and "loss" in error for error in errors[2 * i : 2 * i + 2]), errors


class WithImages(transformers.LlamaModel):
    """Returns features of images, which ranks share, and the mean of the tokens of the shard."""

    def forward(self, pixel_values=None, returns=("image",), **inputs):
        out = super().forward(**inputs)
        rows = {"image": pixel_values.mean((2, 3)), "mean": out.last_hidden_state.mean(1)}
        return {name: rows[name] for name in returns}


def outputs_beside_images() -> tuple[list[str], str]:
    cp = ContextParallel("ring", mesh(ring=2))
    model = cp.prepare(WithImages(transformers.LlamaConfig(**SIZES)))
    with cp.shard(padded_rows()[0]) as batch:
        inputs = {"input_ids": batch.ids, "position_ids": batch.position_ids, "pixel_values": torch.ones(3, 3, 8, 8)}
        accepted = list(model(**inputs))
        with pytest.raises(ValueError) as raised:
            model(**inputs, returns=("image", "mean"))
    return accepted, str(raised.value)


def test_outputs_of_images_are_accepted_if_ranks_agree(worlds):
    for accepted, error in worlds(2).run(outputs_beside_images):
        assert accepted == ["image"] and "mean [3, 32]" in error


# -- averages of gradients --------------------------------------------------------------------------------------------


def classifier_step(cp: ContextParallel, model, block=None) -> torch.Tensor:
    """A step of a prepared classifier inside its batch, or inside another block; returns its loss."""
    ids, attention_mask = padded_rows()
    with cp.shard(ids, attention_mask=attention_mask) as batch, block(batch) if block else nullcontext():
        inputs = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        return step(model, batch.ids, **inputs)[1]


def averaged_classifiers() -> tuple[float, list[str]]:
    """The largest relative error under FSDP2 over all ranks, and the errors of averages over other ranks."""
    axes = mesh(shard=2, ring=2)
    every, cp = axes._flatten("every"), ContextParallel("ring", axes, data="shard")
    plain = build("Llama", "ForSequenceClassification", **CLASSIFIERS["Llama"] | {"num_labels": 3})

    def sharded(ranks, root=True):
        model = cp.prepare(deepcopy(plain))
        for part in (*model.model.layers, *([model] if root else [])):
            fully_shard(part, mesh=ranks)
        return model

    def block(batch):
        return sequence(layout=batch.layout, padded=True, documents=batch.documents)

    model, refusals = sharded(every), []
    ids, attention_mask = padded_rows()
    expected, actual = step(plain, ids, attention_mask=attention_mask)[1], classifier_step(cp, model)
    pairs = [(a.full_tensor(), b) for a, b in zip(gradients(model), gradients(plain), strict=True)]
    errors = [relative_error(a, b) for a, b in [*pairs, (actual, expected)]]
    ddp = DistributedDataParallel(cp.prepare(deepcopy(plain)), process_group=axes["shard"].get_group())
    wrong = [(sharded(axes["shard"]), None), (sharded(axes["shard"]), block), (sharded(every, root=False), None)]
    for model, opened in (*wrong, (ddp, None)):
        with pytest.raises(ValueError) as raised:
            classifier_step(cp, model, opened)
        refusals.append(str(raised.value))
    return max(errors), refusals


def test_gradients_of_scores_averaged_over_other_ranks_are_refused(worlds):
    for error, (fsdp, fsdp_in_sequence, left_out, ddp) in worlds(4).run(averaged_classifiers):
        assert error < 1e-6
        for refusal in (fsdp, fsdp_in_sequence):
            assert "model.layers.0.self_attn.q_proj.weight" in refusal
        assert "[0, 1, 2, 3]" in fsdp
        assert "score.weight" in left_out or "embed_tokens.weight" in left_out
        assert "embed_tokens.weight" in ddp and "[0, 1, 2, 3]" in ddp
