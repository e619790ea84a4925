"""Plain modules that call SDPA, on shards: outputs and gradients equal those of the full sequence on one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

from armillary.attention import AttentionMask, Local, Ring, Ulysses, sdpa_parallel, sequence
from armillary.attention.reference import visible_pairs
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, relative_error

AXES = {"ring": 2, "ulysses": 2}
LENGTH, EMBED, HEADS = 42, 24, 4


def usp():
    return Ulysses(mesh(**AXES)["ulysses"], inner=Ring(mesh(**AXES)["ring"]))


class Block(nn.Module):
    """A pre-norm block; `call` is the way it calls SDPA, `key_heads` below HEADS means grouped-query attention."""

    def __init__(self, call: str, key_heads: int = HEADS, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.call, self.causal, self.scale, self.key_heads = call, causal, scale, key_heads
        dim = EMBED // HEADS
        self.norm = nn.LayerNorm(EMBED)
        self.q, self.kv = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, 2 * key_heads * dim)
        self.out, self.mlp = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x, mask=None):
        normed = self.norm(x)
        q = self.q(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for y in self.kv(normed).chunk(2, -1))
        function = {"attribute": F.scaled_dot_product_attention, "name": scaled_dot_product_attention}[self.call]
        shared = self.key_heads != HEADS
        attended = function(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, scale=self.scale, enable_gqa=shared
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + F.gelu(self.mlp(x))


def inputs(batch: int = 2):
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(batch, LENGTH, EMBED, generator=generator, dtype=torch.float64) for _ in range(2))


def model(call: str = "attribute", **options):
    torch.manual_seed(3)
    return nn.Sequential(Block(call, **options), Block(call, **options)).double()


def on_a_shard(kind: str, documents, checkpointed: str, options: dict):
    """Returns this rank's outputs and its addends of the gradients."""
    attend, blocks = usp(), model(**options)
    layout = attend.layout(LENGTH, kind)
    x, dout = (layout.take(y, attend.shard) for y in inputs())
    with sequence(layout=layout, documents=documents), sdpa_parallel(attend):
        out = x
        for block in blocks:
            reentrant = {"use_reentrant": checkpointed == "reentrant"}
            out = checkpoint(block, out.requires_grad_(), **reentrant) if checkpointed else block(out)
        if checkpointed:
            out.backward(dout)
    if not checkpointed:
        out.backward(dout)
    return out.detach(), [p.grad for p in blocks.parameters()]


def on_one_rank(documents, options: dict):
    blocks, (x, dout) = model(**options), inputs()
    positions = torch.arange(LENGTH)
    mask = AttentionMask(causal=options.get("causal", True), documents=documents)
    out = x
    for block in blocks:
        out = block(out, visible_pairs(mask, positions, positions, 2)[:, None])
    out.backward(dout)
    return out.detach(), [p.grad for p in blocks.parameters()]


PER_ROW = ((0, 5, 6, 30, LENGTH), (0, 20, LENGTH))


CALLS = [
    ("zigzag", None, "", {"call": "attribute"}),
    ("contiguous", None, "", {"call": "name", "key_heads": 2}),
    ("striped", PER_ROW[0], "", {"call": "name", "scale": 0.3}),
    ("zigzag", PER_ROW, "", {"call": "attribute", "causal": False, "key_heads": 1}),
    ("zigzag", PER_ROW, "non-reentrant", {"call": "attribute"}),
    ("zigzag", PER_ROW[1], "reentrant", {"call": "name"}),
]


def each_on_a_shard():
    return [on_a_shard(*call) for call in CALLS]


def test_a_shard_equals_one_rank(worlds):
    for (kind, documents, *settings), *ranks in zip(CALLS, *worlds(4).run(each_on_a_shard), strict=True):
        expected, gradients = on_one_rank(documents, settings[1])
        outs, local_gradients = zip(*ranks, strict=True)
        layout = getattr(SequenceLayout, kind)(LENGTH, 2).refine(2)
        assert relative_error(layout.join(outs), expected) < 1e-12, (kind, documents, settings)
        for gradient, *parts in zip(gradients, *local_gradients, strict=True):
            assert relative_error(torch.stack(parts).sum(0), gradient) < 1e-12, (kind, documents, settings)


TREE = AttentionMask.tree((0, 9, 20, 30, LENGTH), (-1, 0, 0, 2))


def full_mask(wrong: str = "") -> torch.Tensor:
    """Returns a tree's pairs [N, N], or a wrong tensor on one rank."""
    visible = TREE.visible(torch.arange(LENGTH), torch.arange(LENGTH))
    return {"another": visible.tril(-1), "a bias": visible.double()}.get(wrong, visible)


def with_tensors():
    """Returns outputs and gradients under a tensor, and the errors if one rank has another or an invalid one."""
    attend, blocks = usp(), model()
    layout = attend.layout(LENGTH)
    x, dout = (layout.take(y, attend.shard) for y in inputs())
    with sequence(layout=layout), sdpa_parallel(attend):
        out = blocks[1](blocks[0](x, full_mask()), full_mask())
        messages: list[str] = []
        for wrong in ("another", "a bias"):
            with pytest.raises(ValueError, match="attn_mask") as refused:
                blocks[0](x, full_mask(wrong if attend.shard == 1 else ""))
            messages.append(str(refused.value))
    out.backward(dout)
    return out.detach(), [p.grad for p in blocks.parameters()], messages


def test_masks_of_the_full_sequence_apply_to_shards(worlds):
    blocks, (x, dout) = model(), inputs()
    expected = blocks[1](blocks[0](x, full_mask()), full_mask())
    expected.backward(dout)
    outs, local_gradients, messages = zip(*worlds(4).run(with_tensors), strict=True)
    assert relative_error(SequenceLayout.zigzag(LENGTH, 2).refine(2).join(outs), expected) < 1e-12
    for parameter, *parts in zip(blocks.parameters(), *local_gradients, strict=True):
        assert relative_error(torch.stack(parts).sum(0), parameter.grad) < 1e-12
    for differ, bias in messages:
        assert "ranks" in differ
        assert "bias" in bias or "another rank" in bias


def test_recomputing_outside_of_the_block_raises():
    with sequence(), sdpa_parallel(Local()):
        out = checkpoint(model()[0], next(inputs()), use_reentrant=False)
    with pytest.raises(CheckpointError, match=r"different metadata|number of"):
        out.sum().backward()


def test_one_shard_needs_no_layout_and_the_block_ends():
    q, k, v = torch.randn(3, 2, HEADS, 9, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return local(*args, **kwargs)

    local = Local()
    counting.shards, counting.shard, counting.sequence_shards = 1, 0, 1
    with sdpa_parallel(counting):
        assert relative_error(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected) < 1e-12
        assert relative_error(scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True), expected) < 1e-12
    assert len(calls) == 2
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert len(calls) == 2


def test_the_innermost_sequence_applies():
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    alone = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with sdpa_parallel(Local()), sequence(documents=[0, 3, 6]):
        split = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with sequence():
            full = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        routed = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert relative_error(full, alone) < 1e-12 and torch.equal(split, routed)
    assert relative_error(split[:, :, 3:], alone[:, :, 3:]) > 0.01


class Attends(nn.Module):
    """Attention without scaled_dot_product_attention, as in some models."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def forward(self, q):
        if self.function == "flex":
            return flex_attention(q, q, q)
        if self.function == "op":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]
        return (q @ q.mT).softmax(-1) @ q


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("call", "message"),
    [("softmax", "without a call of"), ("flex", "flex_attention ran"), ("op", "flash_attention_for_cpu attends")],
)
def test_a_block_with_attention_that_is_not_routed_is_refused(call, message):
    q, parallel = torch.randn(1, 2, 6, 8), sdpa_parallel(Local())
    model, routed = Attends(call), call != "softmax"
    compiled = torch.compile(model, backend="eager")
    for run in (model, compiled, compiled) if call != "op" else (model,):
        with pytest.raises(ValueError, match=message), parallel:
            run(q)
            if routed:  # next to a routed call
                F.scaled_dot_product_attention(q, q, q)


def test_errors_inside_the_block_are_raised():
    with pytest.raises(KeyError, match="mine"), sequence(documents=[0, 4]), sdpa_parallel(Local()):
        raise KeyError("mine")


def test_compiled_model_counts_as_routed_with_one_graph():
    q, attend = torch.randn(1, HEADS, 8, 6), Local()
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend=graphs)
    for _ in range(3):
        with sequence(documents=[0, 3, 8]), sdpa_parallel(attend):
            split = compiled(q)
    assert graphs.frame_count == 1
    assert relative_error(split[:, :, 3:], F.scaled_dot_product_attention(*(q[:, :, 3:],) * 3, is_causal=True)) < 1e-5


def test_methods_called_in_the_block_use_their_kernels():
    q, attend = torch.randn(1, HEADS, 8, 6, requires_grad=True), Local()
    with sdpa_parallel(attend):
        out = F.scaled_dot_product_attention(q, q, q) + attend(q, q, q, mask=AttentionMask())
        out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.bfloat16)])
def test_autocast_casts_like_for_scaled_dot_product_attention(dtypes):
    query, key, value = (torch.randn(2, 4, 10, 8).to(dtype) for dtype in dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(query, key, value, is_causal=True)
        with sdpa_parallel(Local()):
            actual = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert relative_error(actual, expected) < 1e-2
