"""`ContextParallel` with an unmodified transformers model under FSDP2: loss and gradients equal one rank's."""

import pytest
import torch
from tiny_models import build
from torch.distributed.fsdp import fully_shard

from armillary.attention import AttentionMask, ContextParallel
from armillary.core.testing import mesh, relative_error


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, 64, (1, 45), generator=torch.Generator().manual_seed(seed))


def sharded_step():
    """Loss and gradients of a step in two groups, and the error of a model of which FSDP2 leaves out parameters."""
    axes = mesh(shard=2, ring=2)
    every, cp = axes._flatten("every"), ContextParallel("ring", axes, data="shard")
    model, left_out = (cp.prepare(build("mistral, narrow", "eager")) for _ in range(2))
    model.gradient_checkpointing_enable()
    # Reentrant checkpointing hides the parameters of layers from autograd's graph.
    left_out.gradient_checkpointing_enable({"use_reentrant": True})
    for part in (*model.model.layers, model, *left_out.model.layers):
        fully_shard(part, mesh=every)
    group = axes["shard"].get_local_rank()
    with cp.shard(tokens(group)) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)
    cp.shard(tokens(group + 5), documents=[0, 20, 45])  # another batch, before backward recomputes the layers
    loss.backward()
    with cp.shard(tokens(0)) as batch, pytest.raises(ValueError) as raised:
        cp.loss(left_out(**batch.inputs).loss, batch)
    return float(loss.detach()), [p.grad.full_tensor() for p in model.parameters()], str(raised.value)


def test_loss_and_gradients_equal_one_rank_and_parameters_left_out_are_named(worlds):
    model = build("mistral, narrow", "eager")
    expected = sum(model(ids, labels=ids, use_cache=False).loss for ids in map(tokens, range(2))) / 2
    expected.backward()
    for loss, gradients, refusal in worlds(4).run(sharded_step):
        assert abs(loss - float(expected.detach())) < 1e-6 * loss  # Mistral computes norms and loss in float32
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert relative_error(gradient, parameter.grad) < 1e-5
        assert "lm_head.weight" in refusal


def errors_of_layer_dropout() -> list[str]:
    """Errors of a forward with layerdrop in training, in evaluation, and without it in training."""
    cp, errors = ContextParallel("ring", mesh(ring=2)), list[str]()
    for rate, training in ((0.5, True), (0.5, False), (0.0, True)):
        model = cp.prepare(build("bart", "eager", decoder_layerdrop=rate)).train(training)
        try:
            with cp.shard(tokens(0)) as batch:
                model(**batch.inputs)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_dropping_whole_layers_is_refused_in_training(worlds):
    for dropping, *others in worlds(2).run(errors_of_layer_dropout):
        assert "layerdrop=0.5" in dropping
        assert others == ["", ""]


def leave_mask_out(layer, args, kwargs):
    """A pre-forward hook of attention, as accelerate and NeMo add for their own context parallelism."""
    return args, {**kwargs, "attention_mask": None, "is_causal": True}


def logits_without_masks() -> tuple[float, str]:
    """The relative error of logits, with hooks and a mask of the batch, and the refusal without that mask."""
    cp, mask = ContextParallel("ring", mesh(ring=2)), AttentionMask(causal=True, documents=(0, 20, 45))
    model = cp.prepare(build("llama", "eager"))
    with torch.no_grad():
        with cp.shard(tokens(0), mask=mask) as batch:
            expected = model(**batch.inputs).logits
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(leave_mask_out, with_kwargs=True)
        with cp.shard(tokens(0), mask=mask) as batch:
            logits = model(**batch.inputs).logits
        with pytest.raises(ValueError) as raised, cp.shard(tokens(0)) as batch:
            model(**batch.inputs)
    return relative_error(logits, expected), str(raised.value)


def test_the_mask_of_a_batch_replaces_one_that_hooks_leave_out(worlds):
    for error, refusal in worlds(2).run(logits_without_masks):
        assert error < 1e-12 and "LlamaAttention" in refusal
