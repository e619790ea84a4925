"""Weighted labels, several per position, compared with logits rows repeated for each label."""

import pytest
import torch
import torch.nn.functional as F
from test_models_linear_loss import TokensOfLogits
from test_models_vocabulary import axis_of, rows_of

from armillary.core.testing import relative_error
from armillary.models import LabelTriples, interleaved_shard, linear_token_loss, token_loss

B, T, V, E = 2, 7, 11, 6
UPSTREAM = 1 / 17.3


def triples_of(count=20, seed=0, tokens=T):
    """Triples in random order: positions without labels, with several, and one label twice with other weights."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(1, B * tokens - 2, (count,), generator=generator)
    labels = torch.randint(V, (count,), generator=generator)
    positions[1], labels[1] = positions[0], labels[0]
    return positions, labels, torch.rand(count, generator=generator, dtype=torch.float64) * 3


def inputs(tokens=T):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, tokens, E), (V, E), (V,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def expected(leaves, positions, labels, weights, z_loss):
    """Loss and gradients from full logits with repeated rows."""
    hidden, weight, bias = leaves
    logits = F.linear(hidden, weight, bias).flatten(0, 1)[positions]
    each = F.cross_entropy(logits, labels, reduction="none") + z_loss * logits.logsumexp(1).square()
    return (weights * each).sum()


def gradients(total, leaves):
    return total.detach(), *torch.autograd.grad(total, leaves, torch.full_like(total, UPSTREAM))


def largest_error(actual, expected):
    return max(relative_error(g, e) for g, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("z_loss", [0.0, 0.03])
def test_losses_of_labels_at_one_position_add_up(z_loss):
    label_triples = triples_of()
    leaves = inputs()
    exact = gradients(expected(leaves, *label_triples, z_loss), leaves)
    triples = LabelTriples(*label_triples, (B, T))
    for chunk in (None, 1, 3, 100):
        total, count = linear_token_loss(*leaves[:2], triples, bias=leaves[2], chunk=chunk, z_loss=z_loss)
        assert largest_error(gradients(total, leaves), exact) < 1e-12, chunk
        assert count.item() == pytest.approx(label_triples[2].sum().item(), rel=1e-12)
    logits = F.linear(*leaves)
    total, count = token_loss(logits, triples, z_loss=z_loss)
    assert largest_error(gradients(total, leaves), exact) < 1e-12 and count.dtype == torch.float64


def test_logits_may_have_any_strides():
    triples, logits = LabelTriples(*triples_of(), (B, T)), torch.randn(B, T, V, dtype=torch.float64)
    transposed = logits.flatten(0, 1).T.contiguous().T.view(B, T, V)
    assert not transposed.is_contiguous() and torch.equal(
        token_loss(transposed, triples)[0], token_loss(logits, triples)[0]
    )


def test_row_losses_add_up_and_no_labels_give_zero():
    positions, labels, weights = triples_of()
    triples = LabelTriples(positions, labels, weights, (B, T))
    leaves = inputs()
    each = [linear_token_loss(leaves[0][i : i + 1], leaves[1], triples.row(i)) for i in range(B)]
    full = linear_token_loss(leaves[0], leaves[1], triples)
    assert all(torch.allclose(sum(row_sums), total, rtol=1e-13) for *row_sums, total in zip(*each, full, strict=True))
    none = LabelTriples(positions[:0], labels[:0], weights[:0], (B, T))
    total, count = linear_token_loss(leaves[0], leaves[1], none)
    assert (total.item(), count.item()) == (0, 0)
    assert not any(x.any() for x in torch.autograd.grad(total, leaves[:2]))


def test_chunks_without_labels_are_skipped():
    triples = LabelTriples(torch.tensor([9, 9]), torch.tensor([1, 2]), torch.ones(2), (B, T))
    hidden, weight, _ = inputs()
    with TokensOfLogits() as mode:
        total, _ = linear_token_loss(hidden, weight, triples, chunk=4)
    total.backward()
    assert mode.calls == [(4, hidden.flatten(0, 1)[8, 0].item())]
    assert hidden.grad.flatten(0, 1).any(1).nonzero().tolist() == [[9]]


def test_half_precision_is_as_exact_as_half_precision_logits():
    leaves = inputs()
    half = [x.detach().bfloat16().requires_grad_() for x in leaves]
    triples = triples_of()
    wide = [x.detach().double().requires_grad_() for x in half]
    exact = gradients(expected(wide, *triples, 0.0), wide)
    total, _ = linear_token_loss(*half[:2], LabelTriples(*triples, (B, T)), bias=half[2])
    assert total.dtype == torch.float32
    assert largest_error([x.double() for x in gradients(total, half)], exact) < 1e-2


def on_vocabulary_shard(tokens, chunk, z_loss):
    """Loss and gradients of a rank with a vocabulary shard and every R-th token."""
    axis, leaves = axis_of(), [x.detach() for x in inputs(tokens)]
    cut = [rows_of(x) for x in leaves[1:]]
    local = [x.clone().requires_grad_() for x in (interleaved_shard(leaves[0], axis), *cut)]
    triples = LabelTriples(*triples_of(tokens=tokens), (B, tokens))
    options = {"bias": local[2], "chunk": chunk, "z_loss": z_loss, "axis": axis, "vocabulary": V}
    total, count = linear_token_loss(*local[:2], triples, **options)
    logits = F.linear(leaves[0], *cut).requires_grad_()
    of_logits = token_loss(logits, triples, z_loss=z_loss, axis=axis, vocabulary=V)[0]
    return *gradients(total, local), count, of_logits.detach(), torch.autograd.grad(of_logits, logits)[0]


def on_vocabulary_shards(cases):
    return [on_vocabulary_shard(*case) for case in cases]


def test_vocabulary_shards_equal_one_rank(worlds):
    cases = [(8, None, 0.0), (7, 4, 0.02), (5, 8, 0.0)]
    results = worlds(4).run(on_vocabulary_shards, cases)
    for i, (tokens, _, z_loss) in enumerate(cases):
        totals, hiddens, weights, biases, counts, logits_losses, logits_gradients = zip(
            *(rank[i] for rank in results), strict=True
        )
        assert all(torch.equal(total, totals[0]) for total in totals)
        hidden = torch.stack(hiddens, 2).flatten(1, 2)[:, :tokens]
        result = totals[0], hidden, torch.cat(weights), torch.cat(biases)
        leaves = inputs(tokens)
        triples = triples_of(tokens=tokens)
        assert largest_error(result, gradients(expected(leaves, *triples, z_loss), leaves)) < 1e-12, cases[i]
        assert counts[0].item() == pytest.approx(triples[2].sum().item(), rel=1e-12)
        full = F.linear(*leaves).detach().requires_grad_()
        total, _ = token_loss(full, LabelTriples(*triples, (B, tokens)), z_loss=z_loss)
        exact = [total.detach(), *torch.autograd.grad(total, full)]
        assert largest_error([logits_losses[0], torch.cat(logits_gradients, 2)], exact) < 1e-12
