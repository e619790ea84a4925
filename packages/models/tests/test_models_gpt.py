"""GPT compared with transformers' GPT-2, and under every checkpoint policy."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from armillary.attention import Local, UPipe
from armillary.core import SequenceLayout
from armillary.core.testing import relative_error
from armillary.models import GPT, Checkpointing, GPTConfig, linear_token_loss

SIZES = GPTConfig(vocab_size=40, dim=24, layers=2, heads=4, max_positions=32)
IDS = torch.arange(2 * 29).view(2, 29) % 40


def build(attention=None) -> GPT:
    model = GPT(SIZES, attention).double()
    for i, parameter in enumerate(model.parameters()):  # large: with uniform attention, dq is only rounding
        mean = 0.5 if parameter.ndim == 1 else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3, generator=torch.Generator().manual_seed(i))
    return model


def transformers_weights(model: GPT) -> dict[str, Tensor]:
    """Weights with transformers' names: fused query/key/value, linear layers as [inputs, outputs]."""
    weights = dict(model.state_dict())
    for i in range(SIZES.layers):
        for kind in ("weight", "bias"):
            qkv = [weights.pop(f"transformer.h.{i}.attn.{x}_proj.{kind}") for x in "qkv"]
            weights[f"transformer.h.{i}.attn.c_attn.{kind}"] = torch.cat(qkv)
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: weight.T if name.endswith(linear) else weight for name, weight in weights.items()}


def test_logits_match_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    reference = transformers.GPT2LMHeadModel(config).double().eval()
    model = build()
    missing, unexpected = reference.load_state_dict(transformers_weights(model), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    assert relative_error(model(IDS), reference(IDS).logits) < 1e-12


def test_a_shard_needs_only_its_positions():
    model, layout = build(), SequenceLayout.zigzag(29, 2)
    hidden = model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(29))
    model.transformer.h = torch.nn.ModuleList()
    shard = model.transformer(layout.take(IDS, 1), positions=layout.positions(1), layout=layout)
    assert torch.equal(shard, layout.take(model.transformer.ln_f(hidden), 1))


@pytest.mark.parametrize(
    "options", [Checkpointing("none", tiled=True, chunk=4), Checkpointing("layer", chunk=6)], ids=str
)
@pytest.mark.parametrize("stage", [None, 2])
def test_checkpoint_policies_change_no_gradient(options, stage):
    actual = []
    for chosen, attention in ((Checkpointing(), None), (options, stage and UPipe.for_method(Local(), stage))):
        model = build(attention)
        chosen.apply(model)
        total, _ = model(IDS, head=partial(linear_token_loss, labels=IDS.roll(1)))
        total.backward()
        actual.append([total.detach(), *(p.grad for p in model.parameters())])
    exact, result = actual
    # Key biases do not change attention: their gradients are only rounding.
    pairs = [(a, b) for a, b in zip(result, exact, strict=True) if b.norm() > 1e-9]
    assert max(itertools.starmap(relative_error, pairs)) < 1e-10


def test_parameter_count():
    assert SIZES.parameters() == sum(p.numel() for p in build().parameters())
    assert GPTConfig.wallfacer_7b().parameters() == 6_654_210_048
