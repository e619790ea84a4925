"""Losses with a sharded vocabulary: one loss on all ranks, and the gradients of each rank's shard."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_models_linear_loss import Allocations

from armillary.core import CommLedger
from armillary.core.testing import mesh, relative_error
from armillary.models import interleaved_shard, linear_token_loss, token_loss

UPSTREAM = 1 / 17.3
"""Not a power of two, so that scaling rounds."""


@dataclass(frozen=True)
class Case:
    """A loss of hidden [B, T, E] and weight [V, E]; `ignored` is the fraction of ignored labels."""

    B: int = 1
    T: int = 8
    V: int = 11
    E: int = 6
    chunk: int | None = None
    z_loss: float = 0.0
    bias: bool = True
    ignored: float = 0.25
    requires_grad: str = "hwb"
    dtype: torch.dtype = torch.float64

    def inputs(self):
        """Hidden states, weight and bias in float64, rounded to `dtype`, and labels."""
        generator = torch.Generator().manual_seed(0)
        shapes = (self.B, self.T, self.E), (self.V, self.E), (self.V,)
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        labels = torch.randint(self.V, (self.B, self.T), generator=generator)
        ignore = torch.rand(self.B, self.T, generator=generator) < self.ignored
        return *[x.double() for x in leaves], labels.masked_fill(ignore, -100)


def axis_of(ranks=None):
    return mesh(tp=ranks or dist.get_world_size())["tp"]


def rows_of(x, dim=0):
    """This rank's chunk of `torch.chunk`, empty if there are fewer chunks than ranks."""
    chunks, rank = x.chunk(dist.get_world_size(), dim), dist.get_rank()
    return (chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)).clone()


def gradients(total, leaves, retain=False):
    """Gradients of the leaves; None for those without `requires_grad`."""
    differentiable = [x for x in leaves if x is not None and x.requires_grad]
    result = iter(torch.autograd.grad(total, differentiable, torch.full_like(total, UPSTREAM), retain_graph=retain))
    return [next(result) if x is not None and x.requires_grad else None for x in leaves]


def leaves_of(case, hidden, weight, bias):
    leaves = [hidden.to(case.dtype), weight.to(case.dtype), bias.to(case.dtype) if case.bias else None]
    for name, x in zip("hwb", leaves, strict=True):
        if x is not None:
            x.requires_grad_(name in case.requires_grad)
    return leaves


def exact(case, logits_too=False):
    """Loss and gradients on one rank in float64, with log_softmax."""
    *tensors, labels = case.inputs()
    leaves = leaves_of(replace(case, dtype=torch.float64), *tensors)
    logits = F.linear(*leaves)
    if logits_too:
        logits = logits.detach().requires_grad_()
    valid = labels != -100
    losses = -logits.log_softmax(-1).gather(2, labels.where(valid, 0).unsqueeze(2)).squeeze(2)
    total = (losses + case.z_loss * logits.logsumexp(-1).square())[valid].sum()
    return total.detach(), valid.sum().item(), *gradients(total, [logits] if logits_too else leaves)


def run_cases(cases):
    """For each case on this rank: loss, count, gradients of its shard, and sent bytes."""
    return [run_case(case) for case in cases]


def run_case(case):
    hidden, weight, bias, labels = case.inputs()
    axis = axis_of()
    leaves = leaves_of(case, interleaved_shard(hidden, axis).clone(), rows_of(weight), rows_of(bias))
    with CommLedger() as ledger:
        total, count = linear_token_loss(
            leaves[0],
            leaves[1],
            labels,
            bias=leaves[2],
            chunk=case.chunk,
            z_loss=case.z_loss,
            axis=axis,
            vocabulary=case.V,
        )
        result = gradients(total, leaves, retain=True) if total.requires_grad else [None] * 3
        repeated = gradients(total, leaves) if total.requires_grad else [None] * 3
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(result, repeated, strict=True))
    return total.detach(), count.item(), *result, dict(ledger.entries)


def assemble(ranks):
    """Loss and full gradients from the results of all ranks: tokens are interleaved, vocabulary rows contiguous."""
    totals, counts, hiddens, weights, biases, _ = zip(*ranks, strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals), totals
    assert len({*counts}) == 1
    hidden = None if hiddens[0] is None else torch.stack(hiddens, 2).flatten(1, 2)
    weight, bias = (None if x[0] is None else torch.cat(x) for x in (weights, biases))
    return totals[0], counts[0], hidden, weight, bias


def largest_error(actual, expected):
    """Largest relative error of loss and gradients; counts and Nones must be equal."""
    assert actual[1] == expected[1]
    pairs = [(g, e) for g, e in zip(actual, expected, strict=True) if not isinstance(e, int)]
    assert all((g is None) == (e is None) for g, e in pairs)
    return max(relative_error(g, e) for g, e in pairs if e is not None)


def sent_bytes(case, ranks):
    """Bytes sent by each rank, as in the docstring."""
    n, e, w = case.B * case.T // ranks, case.dtype.itemsize, max(4, case.dtype.itemsize)
    hidden = n * case.E * e
    gathered = (ranks - 1) * (hidden + w + n * w * bool(case.requires_grad))
    summed = (ranks - 1) * (2 * n * w + hidden * ("h" in case.requires_grad))
    entries = {("tp", "all_gather", "forward"): gathered, ("tp", "reduce_scatter", "forward"): summed}
    return entries if ranks > 1 else {}


@pytest.mark.parametrize("ranks", [1, 4])
def test_sharded_vocabulary_equals_one_rank(worlds, ranks):
    """Covers sizes, chunks and subsets of gradients; in some cases a rank has no rows of the vocabulary."""
    sizes = [Case(1, ranks, 3), Case(3, 20, 9), Case(1, 20, 101), Case(3, ranks, 101)]
    chunks = [Case(3, 8, 10, chunk=chunk, z_loss=0.01) for chunk in (1, 3, 11, 1000)]
    subsets = [Case(2, 8, chunk=ranks, requires_grad=names) for names in ("h", "w", "b", "hb", "wb")]
    further = [Case(2, 12, z_loss=0.1), Case(2, 12, bias=False), Case(2, 12, ignored=0.0), Case(T=4, V=1)]
    cases = [*sizes, *chunks, *subsets, *further] if ranks > 1 else [sizes[1], *further]
    unlabelled = Case(3, 8, ignored=2.0, z_loss=0.1)
    for_bytes = [Case(3, 8, 101, chunk=8, requires_grad=names, dtype=torch.bfloat16) for names in ("hwb", "w", "")]
    cases_of_run = [*cases, *for_bytes, unlabelled]
    results = zip(*worlds(ranks).run(run_cases, cases_of_run), strict=True)
    for case, of_ranks in zip(cases_of_run, results, strict=True):
        assert all(sent == sent_bytes(case, ranks) for *_, sent in of_ranks), case
        if case == unlabelled:
            assert not any(torch.as_tensor(x).any() for x in assemble(of_ranks))
        if case in cases:
            assert largest_error(assemble(of_ranks), exact(case)) < 1e-12, case


@pytest.mark.parametrize(("ranks", "dtype", "z_loss"), [(4, torch.bfloat16, 0.1), (2, torch.float32, 0.0)])
def test_low_precision_is_as_exact_as_on_one_rank(worlds, ranks, dtype, z_loss):
    """Errors against float64. Each rank rounds its part of the hidden states' gradient before the sum."""
    case = Case(2, 512, 101, 16, chunk=64, z_loss=z_loss, dtype=dtype)
    *tensors, labels = case.inputs()
    leaves = leaves_of(case, *tensors)
    total, count = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk=64, z_loss=z_loss)
    one_rank, expected = (total.detach(), count.item(), *gradients(total, leaves)), exact(case)
    result = assemble([rank[0] for rank in worlds(ranks).run(run_cases, [case])])
    assert [x.dtype for x in (result[0], *result[2:])] == [torch.float32, dtype, dtype, dtype]
    for i in (0, 2, 3, 4):
        sharded_error, one_rank_error = relative_error(result[i], expected[i]), relative_error(one_rank[i], expected[i])
        assert sharded_error < 1.5 * one_rank_error + 5e-7, (i, sharded_error, one_rank_error)


def largest_allocation(case):
    """Largest element count of an op's output."""
    hidden, weight, bias, labels = case.inputs()
    leaves = leaves_of(case, interleaved_shard(hidden, axis_of()).clone(), rows_of(weight), rows_of(bias))
    with Allocations() as allocations:
        total, _ = linear_token_loss(
            leaves[0], leaves[1], labels, bias=leaves[2], chunk=case.chunk, axis=axis_of(), vocabulary=case.V
        )
        total.backward()
    return allocations.largest


def test_no_op_returns_all_hidden_states_or_all_logits_of_a_shard(worlds):
    ranks, case = 4, Case(2, 64, 40, 24, chunk=8, dtype=torch.bfloat16)
    own_hidden, own_weight = case.B * case.T * case.E // ranks, case.V * case.E // ranks
    for largest in worlds(ranks).run(largest_allocation, case):
        assert largest == max(own_hidden, own_weight, case.chunk * case.E, case.chunk * case.V // ranks)
        assert largest < min(case.B * case.T * case.E, case.B * case.T * case.V // ranks)


def masked_rows():
    """A padded vocabulary: the bias of all of one rank's rows is -inf."""
    case, axis = Case(2, 8, 8), axis_of()
    hidden, weight, bias, labels = case.inputs()
    bias[4:], labels = -torch.inf, labels.where(labels < 4, -100)
    logits = F.linear(hidden, weight, bias).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), logits)[0]
    leaves = leaves_of(case, interleaved_shard(hidden, axis).clone(), rows_of(weight), rows_of(bias))
    total, _ = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], axis=axis, vocabulary=8)
    result = torch.autograd.grad(total, leaves)
    return relative_error(result[0], interleaved_shard(expected @ weight, axis)), relative_error(
        result[1], rows_of(torch.einsum("btv,bte->ve", expected, hidden))
    )


def test_rows_with_bias_minus_infinity_have_no_effect(worlds):
    for errors in worlds(2).run(masked_rows):
        assert max(errors) < 1e-12


def under_autocast():
    case = Case(2, 8, 12, dtype=torch.float32)
    *tensors, labels = case.inputs()
    axis, (hidden, weight, bias) = axis_of(), leaves_of(case, *tensors)
    shards = leaves_of(
        case, interleaved_shard(hidden, axis).detach().clone(), rows_of(weight.detach()), rows_of(bias.detach())
    )
    with torch.autocast("cpu", torch.bfloat16), CommLedger() as ledger:
        total, _ = linear_token_loss(shards[0], shards[1], labels, bias=shards[2], axis=axis, vocabulary=12)
        unsharded_loss, _ = linear_token_loss(hidden, weight, labels, bias=bias)
    result, expected = gradients(total, shards), gradients(unsharded_loss, [hidden, weight, bias])
    expected = interleaved_shard(expected[0], axis), rows_of(expected[1]), rows_of(expected[2])
    assert [x.dtype for x in (total, *result)] == [torch.float32] * 4
    errors = [relative_error(g, e) for g, e in zip((total, *result), (unsharded_loss, *expected), strict=True)]
    return ledger.bytes(kind="reduce_scatter"), errors


def test_autocast_sends_low_precision(worlds):
    for sent_bytes, errors in worlds(2).run(under_autocast):
        assert sent_bytes == 8 * (2 * 4 + 6 * 2)
        assert errors[0] < 1e-6 and max(errors) < 5e-3, errors


# -- token_loss -------------------------------------------------------------------------------------------------------


def losses_of_sharded_logits(cases):
    results = []
    for case in cases:
        *tensors, labels = case.inputs()
        shard = rows_of(F.linear(*tensors), 2).to(case.dtype).requires_grad_("h" in case.requires_grad)
        with CommLedger() as ledger, Allocations() as allocations:
            total, count = token_loss(shard, labels, z_loss=case.z_loss, axis=axis_of(), vocabulary=case.V)
        result = gradients(total, [shard], retain=True)[0] if shard.requires_grad else None
        assert result is None or torch.equal(result, gradients(total, [shard])[0])
        results.append((total.detach(), count.item(), result, dict(ledger.entries), allocations.largest))
    return results


@pytest.mark.parametrize("ranks", [1, 4])
def test_sharded_logits_equal_full_logits(worlds, ranks):
    cases = [Case(1, 1, 3), Case(1, 5, 9, z_loss=0.1), Case(3, 1, 9), Case(3, 5, 3, z_loss=0.1)]
    results = worlds(ranks).run(losses_of_sharded_logits, cases)
    for i, case in enumerate(cases):
        totals, counts, shard_gradients, *_ = zip(*(rank[i] for rank in results), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        result = totals[0], counts[0], torch.cat(shard_gradients, 2)
        assert largest_error(result, exact(case, logits_too=True)) < 1e-12, case


def test_sharded_logits_send_a_few_numbers_per_token(worlds):
    ranks = 4
    cases = [Case(3, 7, 60, requires_grad=names, dtype=torch.bfloat16) for names in ("h", "")]
    largest_shard = -(-21 // ranks)
    for rank, actual in enumerate(worlds(ranks).run(losses_of_sharded_logits, cases)):
        local_tokens = 21 // ranks + (rank < 21 % ranks)
        for case, (total, _, _, sent_bytes, largest) in zip(cases, actual, strict=True):
            gathered = (ranks - 1) * 4 * (1 + largest_shard * bool(case.requires_grad))
            summed = 8 * (21 - local_tokens)
            assert sent_bytes == {
                ("tp", "reduce_scatter", "forward"): summed,
                ("tp", "all_gather", "forward"): gathered,
            }
            assert total.dtype == torch.float32
            assert largest == 21 * 60 // ranks


# -- labels out of range ---------------------------------------------------------------------------------------------


def ledger_of_label_out_of_range(label):
    with CommLedger() as ledger, pytest.raises(RuntimeError, match=f"{label} is out of bounds"):
        labels = torch.tensor([[0, label]])
        linear_token_loss(torch.zeros(1, 1, 3), rows_of(torch.zeros(3, 3)), labels, axis=axis_of(), vocabulary=3)
    with pytest.raises(RuntimeError, match=f"{label} is out of bounds"):
        token_loss(rows_of(torch.zeros(1, 2, 3), 2), labels, axis=axis_of(), vocabulary=3)
    return ledger.entries


def ledgers_of_labels_out_of_range():
    return [ledger_of_label_out_of_range(label) for label in (3, -1)]


def test_a_label_out_of_range_raises_on_every_rank(worlds):
    assert worlds(2).run(ledgers_of_labels_out_of_range) == [[{}, {}]] * 2
