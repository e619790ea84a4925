"""Sliding windows per layer: masks passed to attention, and gradients under every checkpoint policy."""

from dataclasses import replace

import torch
from dense_attention import DenseAttention

from armillary.attention import AttentionMask
from armillary.core.testing import relative_error
from armillary.models import Checkpointing, Llama, LlamaConfig, initialize

N = 12
SMALL = LlamaConfig(vocab_size=20, dim=16, layers=3, heads=2, kv_heads=1, hidden_dim=20, window=4, window_from=1)
IDS = torch.arange(2 * N).view(2, N) * 7 % 20


def build(config=SMALL, attention=None) -> Llama:
    model = Llama(config, attention).double()
    initialize(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def masks_of_layers(config: LlamaConfig, mask: AttentionMask) -> list[AttentionMask]:
    masks = []
    dense = DenseAttention(torch.arange(N))

    def spy(q, k, v, *, mask, layout):
        masks.append(mask)
        return dense(q, k, v, mask=mask, layout=layout)

    build(config, spy)(IDS, mask=mask)
    return masks


def test_each_layer_uses_the_smaller_of_its_window_and_the_masks():
    mask = AttentionMask(documents=[0, 5, N])
    wide, narrow = (AttentionMask(window=(left, None), documents=[0, 5, N]) for left in (3, 2))
    masks = masks_of_layers(SMALL, mask)
    assert masks == [mask, wide, wide] and masks[1] is masks[2]
    assert masks_of_layers(SMALL, narrow) == [narrow] * 3
    assert masks_of_layers(replace(SMALL, window=None, window_from=0), mask) == [mask] * 3
    assert masks_of_layers(replace(SMALL, window_from=0), mask) == [wide] * 3


def test_a_query_sees_window_many_keys():
    model = build(replace(SMALL, layers=1, window_from=0))
    changed = IDS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    moved = (model(IDS) - model(changed)).abs().amax(dim=(0, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_recomputed_layers_use_their_windows():
    actual = []
    for policy in ("none", "layer", "attention_output"):
        model = build()
        Checkpointing(policy).apply(model)
        logits = model(IDS)
        logits.logsumexp(-1).sum().backward()
        actual.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for result in actual[1:]:
        assert max(relative_error(a, b) for a, b in zip(result, actual[0], strict=True)) < 1e-10
    unwindowed = build(replace(SMALL, window=None, window_from=0))
    assert relative_error(unwindowed(IDS), actual[0][0]) > 1e-2
