"""Unmodified transformers models: losses, batches, position ids, caches, and layers with attention of their own."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tiny_models import LENGTH, MODELS, PADDING, VOCABULARY, build, draw, in_float64, tokens, transformers, usp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import ContextParallel, Local, Ring, sdpa_parallel, sequence
from armillary.core.testing import relative_error
from armillary.integrations import register_transformers
from armillary.integrations.transformers.models import padding_idx_of

# -- losses and batches -----------------------------------------------------------------------------------------------

ENDS = (0, 3, 20, LENGTH)


def labels_with_gaps():
    """ids and labels [1, LENGTH] with gaps; the first shard of a contiguous layout has no labels."""
    ids = tokens()[:1]
    return ids, ids.masked_fill(torch.arange(LENGTH) % 5 == 3, -100).index_fill(1, torch.arange(14), -100)


def losses_on_a_shard():
    """Returns (local loss, global loss, gradients averaged over ranks) in training and in evaluation."""
    attend = usp()
    register_transformers(attend)
    cp, (ids, labels), results = ContextParallel(attend), labels_with_gaps(), []
    for training in (True, False):
        batch = cp.shard(ids, labels, documents=ENDS, layout=attend.layout(LENGTH, "contiguous"))
        model = build("llama").train(training)
        with batch, torch.set_grad_enabled(training), in_float64():
            local_loss = model(**batch.inputs, use_cache=False).loss
        loss = cp.loss(local_loss, batch)
        if training:
            loss.backward()
            cp.reduce_gradients(model)
        results.append((local_loss.detach(), loss.detach(), [p.grad for p in model.parameters()]))
    return results


def test_the_loss_of_a_sharded_batch_equals_one_rank(worlds):
    ids, labels = labels_with_gaps()
    labels[:, list(ENDS[:-1])] = -100  # transformers' collator excludes the first token of a document
    model = build("llama", "eager")
    with in_float64():
        logits = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in pairwise(ENDS)], 1)
        expected = model.loss_function(logits, labels, VOCABULARY)
    expected.backward()
    trained, evaluated = zip(*worlds(4).run(losses_on_a_shard), strict=True)
    local_losses, losses, gradients = zip(*trained, strict=True)
    assert local_losses[0] == 0  # not NaN
    assert relative_error(sum(local_losses), expected.detach()) < 1e-12
    assert relative_error(losses[0], expected.detach()) < 1e-12
    assert all(torch.equal(loss, losses[0]) for loss in (*losses, *(loss for _, loss, _ in evaluated)))
    for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
        assert all(relative_error(each, parameter.grad) < 1e-9 for each in of_ranks)


def test_on_one_rank_the_loss_equals_the_models_loss():
    register_transformers(Local())
    ids = tokens()
    losses = [build("llama", name)(ids, labels=ids).loss for name in ("armillary", "eager")]
    assert relative_error(*losses) < 1e-6
    with ContextParallel(Local()).shard(ids) as batch:
        assert relative_error(build("llama")(**batch.inputs).loss, losses[1]) < 1e-6


def test_a_batch_is_shifted_before_it_is_sharded():
    ids = torch.arange(1, 13).reshape(2, 6)
    cp = ContextParallel(Local())
    batch = cp.shard(ids, documents=[[0, 2, 6], [0, 6]])
    assert batch.labels.tolist() == [[2, -100, 4, 5, 6, -100], [8, 9, 10, 11, 12, -100]] and batch.labelled == 9
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3], list(range(6))]
    sharded = cp.shard(ids, position_ids=batch.position_ids)
    assert sharded.documents == batch.documents == ((0, 2, 6), (0, 6)) and torch.equal(sharded.labels, batch.labels)
    late = cp.shard(ids, ids.fill_(-100), position_ids=torch.arange(7, 13)[None], labelled=40)
    assert (late.documents, late.labelled) == ((0, 6), 40) and bool((late.labels == -100).all())
    assert cp.shard(ids, ids).labelled == 1  # a loss of 0 / 1


def test_a_loss_that_is_not_finite_is_returned_unchanged():
    cp = ContextParallel(Local())
    batch = cp.shard(torch.zeros(2, 6, dtype=torch.long))
    assert batch.inputs
    for value in (float("inf"), -float("inf"), float("nan"), 2.0):
        local_loss = torch.tensor(value, requires_grad=True)
        loss = cp.loss(local_loss, batch)
        torch.testing.assert_close(loss.detach(), torch.tensor(value), equal_nan=True, rtol=0, atol=0)
        assert float(torch.autograd.grad(loss, local_loss)[0]) == 1


def loss_over_a_group_of_several_backends() -> float:
    group = dist.new_group(backend="cpu:gloo")  # like init_device_mesh, which starts groups with several backends
    cp = ContextParallel(Ring(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ring",))))
    batch = cp.shard(torch.zeros(2, 6, dtype=torch.long))
    assert batch.inputs
    return float(cp.loss(torch.tensor(1.0), batch))


def test_a_loss_is_summed_over_a_group_with_several_backends(worlds):
    assert worlds(2).run(loss_over_a_group_of_several_backends) == [2, 2]


# -- position ids by a model's own rule -------------------------------------------------------------------------------

COUNTING = [name for name in MODELS if MODELS[name][1].get("pad_token_id") == PADDING]


def test_the_rule_of_position_ids_is_read_from_the_model(monkeypatch):
    register_transformers(Local())
    models = {name: build(name) for name in COUNTING}
    rules = {name: padding_idx_of(model) for name, model in models.items()}
    from_zero = ("esm, rotary", "bert", "megatron-bert", "roformer", "mvp", "bart")
    assert rules == dict.fromkeys(COUNTING, PADDING) | dict.fromkeys(from_zero) and len(rules) == 15
    embeddings = type(models["roberta"].roberta.embeddings)
    monkeypatch.setattr(embeddings, "create_position_ids_from_input_ids", staticmethod(lambda ids, padding_idx: ids))
    with pytest.raises(ValueError, match=r"RobertaEmbeddings\.create_position_ids_from_input_ids"):
        padding_idx_of(models["roberta"])


def test_position_ids_of_a_batch_count_from_padding_idx():
    ids, documents = tokens(), ((0, 11, 33, LENGTH), (0, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [37]])).long()
    cp = ContextParallel(Local())
    cp.padding_idx = PADDING
    padded = ids.where(mask == 1, PADDING)
    batch = cp.shard(padded, attention_mask=mask)
    rule = transformers.models.roberta.modeling_roberta.RobertaEmbeddings.create_position_ids_from_input_ids
    assert torch.equal(batch.position_ids * mask, rule(padded, PADDING) * mask)
    packed = cp.shard(ids, documents=documents)
    resharded = cp.shard(ids, position_ids=packed.position_ids)
    assert resharded.documents == packed.documents == documents
    assert int(packed.position_ids.min()) == PADDING + 1


def test_models_that_count_from_different_numbers_need_two_context_parallels():
    roberta, bert = (build(name, "eager") for name in ("roberta", "bert"))
    for first, second in ((roberta, bert), (bert, roberta)):
        cp = ContextParallel(Local())
        cp.prepare(cp.prepare(first))  # a model counts as itself
        padding_idx = cp.padding_idx
        with pytest.raises(ValueError, match=rf"padding_idx={PADDING}"):
            cp.prepare(second)
        assert cp.padding_idx == padding_idx == (PADDING if first is roberta else None)
        ContextParallel(Local()).prepare(second)


# -- layers and the attention interface -------------------------------------------------------------------------------


def test_a_layer_may_have_several_sinks_a_head():
    """Two sinks equal one if their exponentials add up to its exponential."""
    register_transformers(Local())
    results = []
    for several in (False, True):
        model = build("gpt-oss")
        for layer in model.model.layers if several else ():
            sinks = layer.self_attn.sinks.detach()
            layer.self_attn.sinks = nn.Parameter(torch.stack([sinks + math.log(0.3), sinks + math.log(0.7)]))
        with sequence(layout=Local().layout(LENGTH)), in_float64():
            logits = model(tokens(), use_cache=False).logits
        logits.backward(draw(2, LENGTH, VOCABULARY))
        results.append((logits.detach(), torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers])))
    (logits, gradient), (same, sink_gradients) = results
    shares = torch.tensor([0.3, 0.7], dtype=torch.float64)[:, None]
    assert relative_error(same, logits) < 1e-12
    assert relative_error(sink_gradients, gradient[:, None] * shares) < 1e-10


def test_only_a_filled_cache_is_refused():
    register_transformers(Local())
    model, ids = build("llama").eval(), tokens()
    with torch.no_grad():
        first = model(ids, use_cache=True)
        assert relative_error(first.logits, build("llama", "sdpa").eval()(ids).logits) < 1e-9
        with pytest.raises(ValueError, match="KV cache"):
            model(ids[:, :1], past_key_values=first.past_key_values)


def test_a_mask_of_ones_means_no_padding():
    register_transformers(Local())
    ids = tokens()
    logits = [
        build("gpt-oss", name)(ids, attention_mask=torch.ones_like(ids)).logits for name in ("armillary", "eager")
    ]
    assert relative_error(*logits) < 1e-9


def attend_by_interface(module, q, k, v, mask):
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    return attend(module, q, k, v, mask)


class HelpedAttention(nn.Module):
    """Has a softmax of its own, and calls the interface in a function of its file."""

    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, True

    def forward(self, hidden_states, attention_mask=None, **_):
        x = hidden_states[:, None]
        return attend_by_interface(self, x, x, x, attention_mask)[0][:, :, 0], None

    def weights(self, x):
        return torch.softmax(x @ x.transpose(1, 2), -1)


def test_layers_without_attention_of_their_own_are_accepted():
    model = build("llama", "eager")
    for layer in model.model.layers:
        layer.self_attn = HelpedAttention(model.config)
    model.model.layers[1].mixer = nn.Conv1d(32, 32, 1)  # of one token
    cp = ContextParallel(Local())
    cp.prepare(model)
    with cp.shard(tokens()) as batch:
        assert model(batch.ids, position_ids=batch.position_ids).logits.isfinite().all()
    with torch.device("meta"):  # its image tower computes attention itself
        images = transformers.AutoModelForImageTextToText.from_config(transformers.GotOcr2Config())
    assert ContextParallel(Local()).prepare(images) is images


def test_a_mask_used_by_the_models_code_is_refused():
    register_transformers(Local())
    calls = []

    def change(_module, args, kwargs):
        mask = kwargs["attention_mask"]
        assert not hasattr(mask, "shape") and getattr(mask, "dtype", None) is None
        for use in (lambda: mask[:, :, :1], lambda: torch.zeros(1) + mask, lambda: mask.dtype, lambda: mask.to("cpu")):
            with pytest.raises(ValueError, match="no tensor"):
                use()
            calls.append(use)

    model = build("llama")
    model.model.layers[0].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    model(tokens())
    assert len(calls) == 4


def test_sdpa_parallel_refuses_layers_without_a_mask_and_may_surround_a_registered_model():
    model, ids = build("mistral, wider than a shard", "sdpa"), tokens()
    alone, q = model(ids).logits, torch.zeros(1, 4, 8, 8, dtype=torch.float64)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    attention = functions["sdpa"]
    with pytest.raises(ValueError, match="MistralAttention"), sdpa_parallel(Local()):
        functions["sdpa"](model.model.layers[0].self_attn, q, q, q, None)
    assert functions["sdpa"] is attention
    assert torch.equal(model(ids).logits, alone)
    register_transformers(Local())
    with sdpa_parallel(Local()):
        nn.functional.scaled_dot_product_attention(q, q, q)
        logits = build("mistral, wider than a shard")(ids).logits
    assert relative_error(logits, alone) < 1e-5


def test_importing_the_package_imports_neither_hosts_nor_the_compiler():
    check = "import sys, armillary.attention.context_parallel, armillary.integrations; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in imported
    heavy = {"diffusers", "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
    assert not heavy & set(imported)
