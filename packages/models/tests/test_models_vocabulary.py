"""The losses over an axis that cuts the vocabulary: one loss for all ranks, and its gradients by each one's part."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_models_linear_loss import Allocations

from armillary.core import CommLedger
from armillary.core.testing import mesh, relative_error
from armillary.models import linear_token_loss, token_loss
from armillary.models.layers.interleaved import interleaved_shard, reduce_scatter_interleaved
from armillary.models.loss.linear_loss import chunk_rows

UPSTREAM = 1 / 17.3
"""No power of two, so that scaling rounds."""


@dataclass(frozen=True)
class Case:
    """A loss of hidden [B, T, E] by a weight [V, E]; `ignored` is the share of labels that are not counted."""

    B: int = 1
    T: int = 8
    V: int = 11
    E: int = 6
    chunk: int | None = None
    z_loss: float = 0.0
    bias: bool = True
    ignored: float = 0.25
    wanted: str = "hwb"
    dtype: torch.dtype = torch.float64

    def inputs(self):
        """Of the same numbers in every dtype: hidden states, weight and bias in float64, and labels."""
        generator = torch.Generator().manual_seed(0)
        shapes = (self.B, self.T, self.E), (self.V, self.E), (self.V,)
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        labels = torch.randint(self.V, (self.B, self.T), generator=generator)
        ignore = torch.rand(self.B, self.T, generator=generator) < self.ignored
        return *[x.double() for x in leaves], labels.masked_fill(ignore, -100)


def axis_of(ranks=None):
    return mesh(tp=ranks or dist.get_world_size())["tp"]


def rows_of(x, dim=0):
    """This rank's part, as `torch.chunk` cuts, and none where that gives fewer."""
    parts, rank = x.chunk(dist.get_world_size(), dim), dist.get_rank()
    return (parts[rank] if rank < len(parts) else x.narrow(dim, 0, 0)).clone()


def gradients(total, leaves, retain=False):
    """What each leaf gets; None where it wants none."""
    expected = [x for x in leaves if x is not None and x.requires_grad]
    result = iter(torch.autograd.grad(total, expected, torch.full_like(total, UPSTREAM), retain_graph=retain))
    return [next(result) if x is not None and x.requires_grad else None for x in leaves]


def leaves_of(case, hidden, weight, bias):
    leaves = [hidden.to(case.dtype), weight.to(case.dtype), bias.to(case.dtype) if case.bias else None]
    for name, x in zip("hwb", leaves, strict=True):
        if x is not None:
            x.requires_grad_(name in case.wanted)
    return leaves


def exact(case, logits_too=False):
    """The loss on one rank in float64, by log_softmax, and its gradients."""
    *tensors, labels = case.inputs()
    leaves = leaves_of(replace(case, dtype=torch.float64), *tensors)
    logits = F.linear(*leaves)
    if logits_too:
        logits = logits.detach().requires_grad_()
    valid = labels != -100
    losses = -logits.log_softmax(-1).gather(2, labels.where(valid, 0).unsqueeze(2)).squeeze(2)
    total = (losses + case.z_loss * logits.logsumexp(-1).square())[valid].sum()
    return total.detach(), valid.sum().item(), *gradients(total, [logits] if logits_too else leaves)


def by_parts(cases):
    """On a rank: for each case the loss, the count, the gradients of its part, and what it sent."""
    return [by_part(case) for case in cases]


def by_part(case):
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


def whole(ranks):
    """The loss and the gradients of all parts together: tokens dealt out like cards, rows one after another."""
    totals, counts, hiddens, weights, biases, _ = zip(*ranks, strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals), totals
    assert len({*counts}) == 1
    hidden = None if hiddens[0] is None else torch.stack(hiddens, 2).flatten(1, 2)
    weight, bias = (None if x[0] is None else torch.cat(x) for x in (weights, biases))
    return totals[0], counts[0], hidden, weight, bias


def worst(got, expected):
    """The largest error of the loss and the gradients, each relative to its own norm; counts and Nones must match."""
    assert got[1] == expected[1]
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if not isinstance(e, int)]
    assert all((g is None) == (e is None) for g, e in pairs)
    return max(relative_error(g, e) for g, e in pairs if e is not None)


def errors(worlds, ranks, cases):
    """(the worst error, case) of each."""
    results = worlds(ranks).run(by_parts, cases)
    return [(worst(whole([rank[i] for rank in results]), exact(case)), case) for i, case in enumerate(cases)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_equal_one_rank(worlds, ranks):
    """Of every size, and gradients for what wants one alone; in a few cases where not all ranks have rows."""
    sizes = [Case(B, T, V) for B in (1, 3) for T in (ranks, 20) for V in (3, 9, 101)]
    chunks = [Case(3, 8, 10, chunk=chunk, z_loss=0.01) for chunk in (1, 3, 8, 11, 24, 1000)]
    expected = [Case(2, 8, chunk=ranks, wanted=expected) for expected in ("h", "w", "b", "hw", "hb", "wb")]
    rest = [Case(2, 12, z_loss=0.1), Case(2, 12, bias=False), Case(2, 12, ignored=0.0), Case(T=4, V=1)]
    cases = {1: [*sizes[:2], *chunks[1:2]], 2: [*sizes[::2], *expected], 4: [*sizes, *chunks, *expected, *rest]}
    for error, case in errors(worlds, ranks, cases[ranks]):
        assert error < 1e-12, case


def test_no_valid_label_costs_nothing(worlds):
    case = Case(3, 8, ignored=2.0, z_loss=0.1)
    total, count, *rest = whole([rank[0] for rank in worlds(4).run(by_parts, [case])])
    assert (total.item(), count) == (0.0, 0)
    assert not any(x.any() for x in rest)


@pytest.mark.parametrize(("ranks", "dtype"), [(4, torch.bfloat16), (2, torch.float32)])
def test_low_precision_is_as_exact_as_on_one_rank(worlds, ranks, dtype):
    case = Case(2, 512, 101, 16, chunk=64, dtype=dtype)
    *tensors, labels = case.inputs()
    leaves = leaves_of(case, *tensors)
    total, count = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk=64)
    alone, expected = (total.detach(), count.item(), *gradients(total, leaves)), exact(case)
    result = whole([rank[0] for rank in worlds(ranks).run(by_parts, [case])])
    assert [x.dtype for x in (result[0], *result[2:])] == [torch.float32, dtype, dtype, dtype]
    for i in (0, 2, 3, 4):
        here, there = relative_error(result[i], expected[i]), relative_error(alone[i], expected[i])
        assert here < 2 * there + 5e-7, (i, here, there)


@pytest.mark.parametrize("ranks", [1, 4])
def test_bytes_are_those_documented(worlds, ranks):
    cases = [
        Case(B, T, V, chunk=chunk, wanted=wanted, dtype=dtype)
        for B, T, V, chunk in [(1, 4, 3, None), (3, 8, 101, 8)]
        for wanted in ("hwb", "w", "")
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    for rank in worlds(ranks).run(by_parts, cases):
        for case, (*_, sent) in zip(cases, rank, strict=True):
            n, e, w = case.B * case.T // ranks, case.dtype.itemsize, max(4, case.dtype.itemsize)
            hidden = n * case.E * e
            gathered = (ranks - 1) * (hidden + w + n * w * bool(case.wanted))
            summed = (ranks - 1) * (2 * n * w + hidden * ("h" in case.wanted))
            expected = {("tp", "all_gather", "forward"): gathered, ("tp", "reduce_scatter", "forward"): summed}
            assert sent == (expected if ranks > 1 else {})


def largest_allocation(case):
    """The most elements of any operation's result."""
    hidden, weight, bias, labels = case.inputs()
    leaves = leaves_of(case, interleaved_shard(hidden, axis_of()).clone(), rows_of(weight), rows_of(bias))
    with Allocations() as allocations:
        total, _ = linear_token_loss(
            leaves[0], leaves[1], labels, bias=leaves[2], chunk=case.chunk, axis=axis_of(), vocabulary=case.V
        )
        total.backward()
    return allocations.largest


def test_neither_all_hidden_states_nor_all_logits_of_a_part_are_made(worlds):
    ranks, case = 4, Case(2, 64, 40, 24, chunk=8, dtype=torch.bfloat16)
    own_hidden, own_weight = case.B * case.T * case.E // ranks, case.V * case.E // ranks
    for largest in worlds(ranks).run(largest_allocation, case):
        assert largest == max(own_hidden, own_weight, case.chunk * case.E, case.chunk * case.V // ranks)
        assert largest < min(case.B * case.T * case.E, case.B * case.T * case.V // ranks)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_parts_in_bfloat16_are_as_exact_as_the_whole_in_bfloat16(worlds, z_loss):
    """Against float64. What makes up the hidden states' gradient is rounded on each rank, and summed."""
    case = Case(2, 64, 90, 16, chunk=32, z_loss=z_loss, dtype=torch.bfloat16)
    expected, parts = exact(case), whole(worlds(2).run(by_part, case))
    alone = whole([by_part_alone(case)])
    result, usual = (
        [relative_error(g, e) for g, e in zip(actual, expected, strict=True) if not isinstance(e, int)]
        for actual in (parts, alone)
    )
    assert all(g < 1.5 * u + 1e-6 for g, u in zip(result, usual, strict=True)), (result, usual)


def by_part_alone(case):
    """The same on one rank, without an axis."""
    *tensors, labels = case.inputs()
    leaves = leaves_of(case, *tensors)
    total, count = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk=case.chunk, z_loss=case.z_loss)
    return total.detach(), count.item(), *gradients(total, leaves), {}


def masked_rows():
    """A padded vocabulary: the bias of what one rank has is -inf throughout."""
    case, axis = Case(2, 8, 8), axis_of()
    hidden, weight, bias, labels = case.inputs()
    bias[4:], labels = -torch.inf, labels.where(labels < 4, -100)
    whole = F.linear(hidden, weight, bias).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum"), whole)[0]
    leaves = leaves_of(case, interleaved_shard(hidden, axis).clone(), rows_of(weight), rows_of(bias))
    total, _ = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], axis=axis, vocabulary=8)
    result = torch.autograd.grad(total, leaves)
    return relative_error(result[0], interleaved_shard(expected @ weight, axis)), relative_error(
        result[1], rows_of(torch.einsum("btv,bte->ve", expected, hidden))
    )


def test_rows_that_are_masked_away_weigh_nothing(worlds):
    for errors in worlds(2).run(masked_rows):
        assert max(errors) < 1e-12


def row_parallel(tokens):
    """Hidden states that are themselves a sum over ranks, dealt out: the layer before a head that is cut."""
    case, axis = Case(2, tokens, 9), axis_of()
    x, weight, _, labels = case.inputs()
    layer = torch.randn(
        case.E, case.E, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    total, _ = linear_token_loss(x @ layer, weight, labels)
    part = rows_of(layer.detach()).requires_grad_()
    hidden = reduce_scatter_interleaved(rows_of(x, 2) @ part, axis)
    local_loss, _ = linear_token_loss(hidden, rows_of(weight), labels, axis=axis, vocabulary=9)
    result, expected = torch.autograd.grad(local_loss, part)[0], torch.autograd.grad(total, layer)[0]
    return relative_error(result, rows_of(expected))


def test_all_ranks_differentiate_one_loss_after_it(worlds):
    assert max(worlds(4).run(row_parallel, 8)) < 1e-12


def autocast():
    case = Case(2, 8, 12, dtype=torch.float32)
    *tensors, labels = case.inputs()
    axis, (hidden, weight, bias) = axis_of(), leaves_of(case, *tensors)
    parts = leaves_of(
        case, interleaved_shard(hidden, axis).detach().clone(), rows_of(weight.detach()), rows_of(bias.detach())
    )
    with torch.autocast("cpu", torch.bfloat16), CommLedger() as ledger:
        total, _ = linear_token_loss(parts[0], parts[1], labels, bias=parts[2], axis=axis, vocabulary=12)
        alone, _ = linear_token_loss(hidden, weight, labels, bias=bias)
    result, expected = gradients(total, parts), gradients(alone, [hidden, weight, bias])
    expected = interleaved_shard(expected[0], axis), rows_of(expected[1]), rows_of(expected[2])
    assert [x.dtype for x in (total, *result)] == [torch.float32] * 4
    errors = [relative_error(g, e) for g, e in zip((total, *result), (alone, *expected), strict=True)]
    return ledger.bytes(kind="reduce_scatter"), errors


def test_under_autocast_messages_are_in_low_precision_too(worlds):
    for sent, errors in worlds(2).run(autocast):
        assert sent == 8 * (2 * 4 + 6 * 2)
        assert errors[0] < 1e-6 and max(errors) < 5e-3, errors


# -- token_loss -------------------------------------------------------------------------------------------------------


def logits_by_parts(cases):
    results = []
    for case in cases:
        *tensors, labels = case.inputs()
        part = rows_of(F.linear(*tensors), 2).to(case.dtype).requires_grad_("h" in case.wanted)
        with CommLedger() as ledger, Allocations() as allocations:
            total, count = token_loss(part, labels, z_loss=case.z_loss, axis=axis_of(), vocabulary=case.V)
        result = gradients(total, [part], retain=True)[0] if part.requires_grad else None
        assert result is None or torch.equal(result, gradients(total, [part])[0])
        results.append((total.detach(), count.item(), result, dict(ledger.entries), allocations.largest))
    return results


@pytest.mark.parametrize("ranks", [1, 4])
def test_sharded_logits_equal_full_logits(worlds, ranks):
    cases = [Case(B, T, V, z_loss=z) for B in (1, 3) for T in (1, 5) for V in (3, 9) for z in (0.0, 0.1)]
    results = worlds(ranks).run(logits_by_parts, cases)
    for i, case in enumerate(cases):
        totals, counts, parts, *_ = zip(*(rank[i] for rank in results), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        result = totals[0], counts[0], torch.cat(parts, 2)
        assert worst(result, exact(case, logits_too=True)) < 1e-12, case


def test_logits_in_parts_send_a_few_numbers_for_each_token(worlds):
    ranks = 4
    cases = [Case(3, 7, 60, wanted=expected, dtype=torch.bfloat16) for expected in ("h", "")]
    share = -(-21 // ranks)
    for rank, actual in enumerate(worlds(ranks).run(logits_by_parts, cases)):
        own = 21 // ranks + (rank < 21 % ranks)
        for case, (total, _, _, sent, largest) in zip(cases, actual, strict=True):
            gathered = (ranks - 1) * 4 * (1 + share * bool(case.wanted))
            summed = 8 * (21 - own)
            assert sent == {("tp", "reduce_scatter", "forward"): summed, ("tp", "all_gather", "forward"): gathered}
            assert total.dtype == torch.float32
            assert largest == 21 * 60 // ranks


def test_z_loss_of_whole_logits():
    case = Case(2, 5, z_loss=0.1)
    *tensors, labels = case.inputs()
    logits = F.linear(*tensors).requires_grad_()
    total, count = token_loss(logits, labels, z_loss=0.1)
    assert worst((total.detach(), count.item(), gradients(total, [logits])[0]), exact(case, logits_too=True)) < 1e-12


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(rows, vocabulary, labels=(1, 4), **options):
    """The messages for a weight of these rows and for as many logits; and nothing was sent."""
    axis, messages = axis_of(), []
    with CommLedger() as ledger:
        with pytest.raises(ValueError) as caught:
            hidden, weight = torch.zeros(1, 2, 3), torch.zeros(rows, 3)
            linear_token_loss(hidden, weight, torch.zeros(labels).long(), axis=axis, vocabulary=vocabulary, **options)
        messages.append(str(caught.value))
        if labels == (1, 4) and not options:
            with pytest.raises(ValueError) as caught:
                token_loss(torch.zeros(1, 4, rows), torch.zeros(labels).long(), axis=axis, vocabulary=vocabulary)
            messages.append(str(caught.value))
        assert not ledger.entries
    return {*messages}


WRONG = [
    ({"rows": 4, "vocabulary": 10}, "rank {} of 2 on axis 'tp' has 5 of vocabulary=10 rows.*got 4"),
    ({"rows": 5, "vocabulary": None}, "vocabulary.* axis 'tp' of 2 ranks"),
    ({"rows": 5, "vocabulary": 10, "labels": (1, 2)}, r"T / 2\), E\].*got \(1, 2, 3\), \(5, 3\), \(1, 2\)"),
    ({"rows": 5, "vocabulary": 10, "backend": "torch"}, "needs torch 2.13 and one rank; got .* 2 ranks"),
    ({"rows": 5, "vocabulary": 10, "bias": torch.zeros(10)}, r"\(1, 4\), \(10,\)"),
]


def all_refused():
    return [refused(**call) for call, _ in WRONG]


def test_mismatched_arguments_are_refused_on_every_rank(worlds):
    for rank, actual in enumerate(worlds(2).run(all_refused)):
        for (_, message), messages in zip(WRONG, actual, strict=True):
            assert len(messages) == 1
            assert re.search(message.format(rank), messages.pop())


def foreign_label(label):
    with CommLedger() as ledger, pytest.raises(RuntimeError, match=f"{label} is out of bounds"):
        labels = torch.tensor([[0, label]])
        linear_token_loss(torch.zeros(1, 1, 3), rows_of(torch.zeros(3, 3)), labels, axis=axis_of(), vocabulary=3)
    with pytest.raises(RuntimeError, match=f"{label} is out of bounds"):
        token_loss(rows_of(torch.zeros(1, 2, 3), 2), labels, axis=axis_of(), vocabulary=3)
    return ledger.entries


def foreign_labels():
    return [foreign_label(label) for label in (3, -1)]


def test_a_label_of_no_rank_is_refused_by_torch_on_every_rank(worlds):
    assert worlds(2).run(foreign_labels) == [[{}, {}]] * 2


def test_chunks_of_several_ranks_leave_room_for_messages():
    for tokens, ranks in [(655360, 1), (655360, 8), (5 * 2**20, 8)]:
        rows = chunk_rows(tokens, 4096, 128256, ranks=ranks)
        took = rows * (128256 // ranks * 6 + (ranks > 1) * 4 * 4096 * 2)
        assert 0.45 < took / ((tokens + 128256) * 4096 * 2 / ranks) <= 0.51


def test_with_one_rank_the_vocabulary_may_be_named_and_must_be_right():
    hidden, weight, labels = torch.randn(1, 4, 3), torch.randn(5, 3), torch.zeros(1, 4).long()
    named, usual = (linear_token_loss(hidden, weight, labels, vocabulary=v)[0] for v in (5, None))
    assert torch.equal(named, usual)
    with pytest.raises(ValueError, match=r"has 6 of vocabulary=6 rows.*got 5"):
        linear_token_loss(hidden, weight, labels, vocabulary=6)
