"""The token loss, and fused with the head: equal to `token_loss`, without a tensor as large as the logits."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.core.internal import simulating
from armillary.core.testing import relative_error
from armillary.models import linear_token_loss, token_loss
from armillary.models.internal import loss_chunk_tokens

B, T, E, V = 2, 37, 12, 101
needs_torch = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="needs torch 2.13")
BACKENDS = ["own", pytest.param("torch", marks=needs_torch)]


def inputs(dtype=torch.float64, tokens=T, device="cpu"):
    """Hidden states, weight, bias and labels; a quarter of the labels is ignored."""
    torch.manual_seed(0)
    shapes = (B, tokens, E), (V, E), (V,)
    leaves = [torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(V, (B, tokens), device=device)
    return *leaves, labels.where(torch.rand(B, tokens, device=device) > 0.25, -100)


def plain(hidden, weight, bias, labels):
    return token_loss(F.linear(hidden, weight, bias), labels)[0]


@pytest.mark.parametrize("with_break", [False, True])
def test_a_graph_of_the_caller_has_no_chunks(with_break):
    hidden, weight, _, labels = inputs()
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def loss_of(hidden, weight):
        if with_break:
            torch._dynamo.graph_break()
        return linear_token_loss(2 * hidden, weight, labels, chunk=4)[0]

    torch._dynamo.reset()
    compiled = torch.autograd.grad(torch.compile(loss_of, backend=backend)(hidden, weight), (hidden, weight))
    expected = torch.autograd.grad(linear_token_loss(2 * hidden, weight, labels, chunk=4)[0], (hidden, weight))
    assert targets and not any("linear" in target or "mm" in target for target in targets)
    for actual, gradient in zip(compiled, expected, strict=True):
        assert relative_error(actual, gradient) < 1e-12


def result(loss, *leaves, upstream=1 / 17.3):
    """The loss and the gradient of each leaf, for an upstream gradient that is not a power of two."""
    return loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), retain_graph=True)


def exact(hidden, weight, bias, labels):
    """Loss and gradients in float64 of the same inputs."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    return result(plain(*leaves, labels), *leaves)


def errors(actual, expected):
    return [relative_error(g, e) for g, e in zip(actual, expected, strict=True)]


class Allocations(TorchDispatchMode):
    """Records the largest element count of an op's outputs, and the names of the ops."""

    def __init__(self):
        super().__init__()
        self.largest, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.largest = max(self.largest, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


class Traffic(TorchDispatchMode):
    """Counts bytes that ops read and write in tensors of `count` elements, by dtype, except gather and scatter ops."""

    def __init__(self, count):
        super().__init__()
        self.count, self.bytes = count, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_excluded = func.is_view or any(name in str(func) for name in ("prim", "empty", "gather", "scatter"))
        if not is_excluded:
            read = [*args, *(x for name, x in (kwargs or {}).items() if name != "out")]
            for x in pytree.tree_leaves((read, result)):
                if isinstance(x, torch.Tensor) and x.numel() == self.count:
                    self.bytes[x.dtype] += x.nbytes
        return result


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 2e-6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients_equal_the_token_loss_of_logits(backend, dtype, limit):
    hidden, weight, bias, labels = inputs(dtype)
    expected = exact(hidden, weight, bias, labels)
    for chunk in (None, 1, 5, B * T, 1000):
        total, count = linear_token_loss(hidden, weight, labels, bias=bias, chunk=chunk, backend=backend)
        assert total.dtype == dtype
        assert count.item() == (labels != -100).sum().item()
        assert max(errors(result(total, hidden, weight, bias), expected)) < limit, chunk
    total = linear_token_loss(hidden, weight, labels, backend=backend)[0]
    assert max(errors(result(total, hidden, weight), exact(hidden, weight, 0 * bias, labels)[:3])) < limit, "no bias"


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, None), (torch.bfloat16, 16), (torch.float16, 16)])
def test_low_precision_is_as_exact_as_with_full_logits_for_any_chunk(dtype, chunk):
    hidden, weight, bias, labels = inputs(dtype, tokens=1024)
    total = linear_token_loss(hidden, weight, labels, bias=bias, chunk=chunk)[0]
    assert total.dtype == torch.float32
    expected, leaves = exact(hidden, weight, bias, labels), (hidden, weight, bias)
    actual, usual = (errors(result(loss, *leaves), expected) for loss in (total, plain(*leaves, labels)))
    # The gradient of hidden is rounded once more when backward scales it.
    assert all(g < 1.5 * u + 1e-6 for g, u in zip(actual, usual, strict=True)), (actual, usual)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_valid_label_gives_zero_loss_and_gradients(backend):
    hidden, weight, bias, labels = inputs(torch.bfloat16)
    none = torch.full_like(labels, -1)
    total, count = linear_token_loss(hidden, weight, none, bias=bias, ignore=-1, chunk=5, backend=backend)
    assert (total.item(), count.item(), total.dtype) == (0.0, 0, torch.float32)
    assert not any(gradient.any() for gradient in result(total, hidden, weight, bias)[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_frozen_parameters_get_no_gradient(backend):
    for frozen in ({0}, {1}, {2}, {1, 2}, {0, 1}):
        *leaves, labels = inputs()
        expected = exact(*leaves, labels)[1:]
        for i in frozen:
            leaves[i].requires_grad_(False)
        total = linear_token_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk=5, backend=backend)[0]
        (total / 17.3).backward()
        assert {i for i, leaf in enumerate(leaves) if leaf.grad is None} == frozen
        assert all(x.grad is None or relative_error(x.grad, e) < 1e-10 for x, e in zip(leaves, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_grad_mode_only_the_sum_is_computed(backend):
    hidden, weight, bias, labels = inputs()
    with torch.no_grad(), Allocations() as allocations:
        total = linear_token_loss(hidden, weight, labels, bias=bias, chunk=5, backend=backend)[0]
    assert not total.requires_grad
    assert total.item() == pytest.approx(plain(hidden, weight, bias, labels).item(), rel=1e-12)
    assert not allocations.names & {"mm", "addmm_", "scatter_"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_may_run_again_with_another_upstream_gradient(backend):
    hidden, weight, bias, labels = inputs()
    total = linear_token_loss(hidden, weight, labels, bias=bias, chunk=5, backend=backend)[0]
    first, second, third = (result(total, hidden, weight, bias, upstream=u)[1:] for u in (1.0, -3.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert max(errors(second, [-3 * x for x in first])) < 1e-14


def test_no_tensor_is_as_large_as_the_logits():
    hidden, weight, bias, labels = inputs(torch.bfloat16)
    with Allocations() as allocations:
        linear_token_loss(hidden, weight, labels, bias=bias, chunk=20)[0].backward()
    assert max(B * T * E, V * E) < allocations.largest == 20 * V < B * T * V


def test_a_chunk_is_read_and_written_in_float32_at_most_twice():
    """On CUDA, in bytes per logit: conversion, softmax and the read for gradients; other traffic is in bfloat16."""
    with FakeTensorMode(), torch.device("cuda"):
        hidden, weight = torch.empty(1, 64, E, dtype=torch.bfloat16), torch.empty(V, E, dtype=torch.bfloat16)
        hidden.requires_grad_()  # not the weight: torch 2.11 has no fake kernel for a product added to a wider sum
        labels = torch.zeros(1, 64, dtype=torch.long)
        with Traffic(64 * V) as moved:
            linear_token_loss(hidden, weight, labels, chunk=64)
    by_logit = {dtype: count / (64 * V) for dtype, count in moved.bytes.items()}
    assert by_logit == {torch.float32: 16, torch.bfloat16: 10}


def test_tensors_that_live_until_backward():
    hidden, weight, bias, labels = inputs(torch.bfloat16)
    total = linear_token_loss(hidden, weight, labels, bias=bias, chunk=5)[0]
    assert sum(x.nbytes for x in total.grad_fn.saved_tensors) == B * T * E * 2 + V * E * 4 + V * 4
    total.backward()
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = total.grad_fn.saved_tensors
    of_hidden = linear_token_loss(hidden, weight.detach(), labels, bias=bias.detach(), chunk=5)[0]
    assert [x is None for x in of_hidden.grad_fn.saved_tensors] == [False, True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast_matrix_products_run_like_a_linear_layers(backend):
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total = linear_token_loss(hidden, weight, labels, bias=bias, backend=backend)[0]
        usual = plain(hidden, weight, bias, labels)
    actual, expected = (result(loss, hidden, weight, bias) for loss in (total, usual))
    assert [x.dtype for x in actual] == [torch.float32] * 4
    assert relative_error(expected[1], exact(hidden, weight, bias, labels)[1]) > 1e-5
    assert max(errors(actual, expected)) < 1e-2


class TokensOfLogits(TorchFunctionMode):
    """Records for each call of `F.linear` its number of tokens, and the first feature of its first token."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.calls.append((len(args[0]), args[0][0, 0].item()))
        return func(*args, **(kwargs or {}))


def chunks_of(rows, tokens, chunk):
    """The chunks of which `linear_token_loss` computes logits, as (first token, number of tokens)."""
    hidden = torch.arange(rows * tokens, dtype=torch.float32).view(rows, tokens, 1)
    labels = torch.zeros(rows, tokens, dtype=torch.long)
    with TokensOfLogits() as mode:
        linear_token_loss(hidden, torch.ones(3, 1), labels, chunk=chunk)
    return [(int(first), count) for count, first in mode.calls]


def test_a_simulation_computes_the_first_two_chunks_and_the_last():
    every = chunks_of(2, 10, 4)
    assert every == [(start, 4) for start in range(0, 20, 4)]
    with simulating():
        assert chunks_of(2, 10, 4) == [*every[:2], every[-1]]
        assert chunks_of(2, 6, 4) == every[:3] and chunks_of(0, 6, 4) == []


def test_chunks_stay_within_their_bytes():
    assert loss_chunk_tokens(512, 64, 1000, itemsize=4) == 512
    assert loss_chunk_tokens(0, 64, 1000) == 1
    assert loss_chunk_tokens(1, 4096, 10**9) == 1
    for tokens in (8192, 655360):
        chunk = loss_chunk_tokens(tokens, 4096, 128256)
        assert 0.45 < chunk * 128256 * 6 / ((tokens + 128256) * 4096 * 2) <= 0.51
    for tokens in (655360, 5 * 2**20):  # of several ranks, with their messages
        chunk = loss_chunk_tokens(tokens, 4096, 128256, ranks=8)
        chunk_bytes = chunk * (128256 // 8 * 6 + 4 * 4096 * 2)
        assert 0.45 < chunk_bytes / ((tokens + 128256) * 4096 * 2 / 8) <= 0.51


# -- token_loss -------------------------------------------------------------------------------------------------------


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels = torch.randn(4, 500, 7).bfloat16(), torch.randint(7, (4, 500))
    total, _ = token_loss(logits, labels)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(token_loss(logits.double(), labels)[0].item(), rel=1e-6)


def test_no_valid_label_gives_a_zero_token_loss():
    logits = torch.randn(1, 3, 7, requires_grad=True)
    total, count = token_loss(logits, torch.full((1, 3), -100))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros(1, 3, 7))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_any_integers(dtype):
    logits, labels = torch.randn(1, 4, 7), torch.tensor([[5, 0, 6, 3]])
    assert torch.equal(token_loss(logits, labels.to(dtype), ignore=3)[0], token_loss(logits, labels, ignore=3)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_on_a_gpu(dtype, limit):
    hidden, weight, bias, labels = inputs(dtype, tokens=1024, device="cuda")
    total = linear_token_loss(hidden, weight, labels, bias=bias, chunk=16)[0]
    assert max(errors(result(total, hidden, weight, bias), exact(hidden, weight, bias, labels))) < limit
