"""The oracle, compared with torch's attention, loops, finite differences and results by hand."""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.nn.functional as F

from armillary.attention import AttentionMask, Slice, reference_attention
from armillary.attention.mask import Tree
from armillary.attention.reference import visible_pairs
from conformance.draw_masks import tree_mask

FULL, CAUSAL = AttentionMask(causal=False), AttentionMask()
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": AttentionMask(causal=False, window=(3, 1)),
    "left": AttentionMask(causal=True, window=(2, None)),
    "documents": AttentionMask(documents=(0, 3, 4, 11)),
    "rows": AttentionMask(causal=False, documents=((0, 3, 11), (0, 8, 11))),
}


def tensors(
    heads: int = 4, kv_heads: int = 2, length: int = 11, value_dim: int = 5, batch: int = 2
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    shapes = [(length, heads, 8), (length, kv_heads, 8), (length, kv_heads, value_dim), (length, heads, value_dim)]
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


ONE_A_HEAD = torch.tensor([-1.0, 0.5, 3.0, 40.0], dtype=torch.float64)
SEVERAL_A_HEAD = torch.stack([ONE_A_HEAD, ONE_A_HEAD.flip(0), -ONE_A_HEAD])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("sinks", "scale"),
    [(ONE_A_HEAD[:0], None), (ONE_A_HEAD, 0.7), (SEVERAL_A_HEAD, None), (SEVERAL_A_HEAD[:1], 0.7)],
    ids=["none", "[H]", "[n, H]", "[1, H]"],
)
def test_results_match_torch_with_sinks_as_further_keys_with_value_0(name, sinks, scale):
    q, k, v, dout = tensors()
    i = torch.arange(11)
    visible = torch.stack([MASKS[name].visible(i, i, row) for row in range(2)])[:, None]

    def with_torch(q, k, v, sinks):
        sinks = sinks.reshape(-1, 4)
        padding = (0, 0, 0, 0, 0, len(sinks))
        q, k, v = (x.transpose(1, 2) for x in (q, F.pad(k, padding), F.pad(v, padding)))
        bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf).expand(2, 4, 11, 11)
        bias = torch.cat([bias, sinks.T[None, :, None].expand(2, 4, 11, -1)], dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True).transpose(1, 2)

    def with_oracle(q, k, v, sinks):
        return reference_attention(q, k, v, mask=MASKS[name], scale=scale, sinks=sinks if len(sinks) else None)

    def run(attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out = attention(*leaves)
        return out, *torch.autograd.grad(out, leaves if len(sinks) else leaves[:3], dout)

    for result, expected in zip(run(with_oracle), run(with_torch), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_a_sink_for_each_query_has_a_gradient_for_each_query():
    q, k, v, dout = tensors()
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    each = sinks.detach().expand(2, 11, 4).clone().requires_grad_()
    shared, many = (
        torch.autograd.grad(reference_attention(q, k, v, mask=CAUSAL, sinks=x), x, dout)[0] for x in (sinks, each)
    )
    torch.testing.assert_close(many.sum((0, 1)), shared, rtol=1e-12, atol=1e-12)


def test_sink_of_minus_infinity_has_no_effect_and_only_a_sink_gives_0():
    q, k, v, _ = tensors()
    plain = reference_attention(q, k, v, mask=CAUSAL, return_lse=True)
    ignored = reference_attention(q, k, v, mask=CAUSAL, sinks=torch.full((4,), -torch.inf), return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ignored, strict=True))
    later, sinks = torch.arange(20, 31), torch.tensor([1.0, 2.0, 3.0, 1000.0])
    out, lse = reference_attention(q, k, v, mask=CAUSAL, sinks=sinks, key_positions=later, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sinks.double().expand(2, 11, 4))


def test_softcap_by_hand_and_its_gradients_by_finite_differences():
    q, k, v, _ = tensors(2, 1, length=4, batch=1)
    scores = 2 * torch.tanh(torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 0.7 / 2)
    expected = torch.einsum("bhts,bsd->bthd", scores.softmax(-1), v[:, :, 0])
    out = reference_attention(q, k, v, mask=FULL, scale=0.7, softcap=2.0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), torch.randn(2, dtype=torch.float64).requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: reference_attention(q, k, v, mask=CAUSAL, sinks=s, softcap=1.5), leaves
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6)])
def test_query_head_h_uses_kv_head_h_over_the_group_size(heads, kv_heads):
    q, k, v, _ = tensors(heads, kv_heads)
    out = reference_attention(q, k, v, mask=CAUSAL)
    for b in range(2):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for t in range(11):
                weights = (k[b, : t + 1, g] @ q[b, t, h] / 8**0.5).softmax(0)
                torch.testing.assert_close(out[b, t, h], weights @ v[b, : t + 1, g], rtol=1e-12, atol=1e-12)


def test_gradients_of_out_and_lse_pass_gradcheck():
    leaves = [x.requires_grad_() for x in tensors(2, 1, length=5, value_dim=1)[:3]]
    rows = AttentionMask(causal=False, documents=((0, 3, 5), (0, 4, 5)))
    assert torch.autograd.gradcheck(lambda *x: reference_attention(*x, mask=rows, return_lse=True), leaves)


def test_query_without_visible_keys_gives_zero_and_no_gradients():
    q, k, v, dout = tensors()
    positions = {"query_positions": torch.arange(11), "key_positions": torch.arange(4, 15)}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = reference_attention(*leaves, mask=CAUSAL, return_lse=True, **positions)
    assert (out[:, :4] == 0).all() and (lse[:, :4] == -torch.inf).all() and lse[:, 4:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert (dq[:, :4] == 0).all() and (dk[:, 7:] == 0).all() and (dv[:, 7:] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    _, dk_rest, dv_rest = torch.autograd.grad(
        reference_attention(*leaves, mask=CAUSAL, **positions)[:, 4:], leaves, dout[:, 4:]
    )
    assert torch.equal(dk, dk_rest) and torch.equal(dv, dv_rest)


def test_huge_logits_neither_overflow_nor_vanish():
    q, k, v, _ = tensors(2, 2)
    q[..., 0], k[..., 0] = 60, -60
    shifted, lse = reference_attention(q, k, v, mask=CAUSAL, scale=1.0, return_lse=True)
    q[..., 0] = 0
    plain, lower = reference_attention(q, k, v, mask=CAUSAL, scale=1.0, return_lse=True)
    torch.testing.assert_close(shifted, plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, lower - 3600, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_the_inputs_and_are_rounded_once(dtype):
    q, k, v, _ = (x.to(dtype) for x in tensors())
    out, lse = reference_attention(q, k, v, mask=CAUSAL, return_lse=True)
    exact, exact_lse = reference_attention(*(x.double() for x in (q, k, v)), mask=CAUSAL, return_lse=True)
    assert out.dtype == dtype and torch.equal(out, exact.to(dtype))
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(lse, exact_lse.to(lse.dtype))


# -- visible pairs by hand --------------------------------------------------------------------------------------------


ENDS, PARENTS = (0, 2, 3, 4, 5, 6, 7), (-1, 0, 1, 1, 0, -1)
"""A prompt with two answers, the first of which has two itself; and another prompt."""
PREFIX, CHUNKS = AttentionMask.prefix((0, 5), (3,)), AttentionMask.chunked(2)
SPANS = [range(1, 3), range(4, 5)]
TABLE = [[True, False, True], [False, False, False], [True, True, True]]
BANDS = AttentionMask.of_slices(
    [Slice(range(4), range(1, 4), -1, 1), Slice(range(4, 5), range(5)), Slice(range(2), range(5), 3, None)]
)
BY_ROW = AttentionMask(causal=False, documents=((0, 1, 5), (0, 4, 5)))
OF_ROWS = AttentionMask.rows([AttentionMask.tree((0, 2, 4, 5), (-1, 0, 0)), FULL])
SHOWN = {
    "causal": (CAUSAL, "x.... xx... xxx.. xxxx. xxxxx"),
    "full": (FULL, "xxxxx xxxxx xxxxx xxxxx xxxxx"),
    "window of both sides": (AttentionMask(causal=False, window=(1, 2)), "xxx.. xxxx. .xxxx ..xxx ...xx"),
    "window of earlier tokens": (AttentionMask(causal=False, window=(None, 0)), "x.... xx... xxx.. xxxx. xxxxx"),
    "window of later tokens": (AttentionMask(causal=False, window=(0, None)), "xxxxx .xxxx ..xxx ...xx ....x"),
    "causal window": (AttentionMask(causal=True, window=(1, 2)), "x.... xx... .xx.. ..xx. ...xx"),
    "documents, both ways": (AttentionMask(causal=False, documents=(0, 2, 5)), "xx... xx... ..xxx ..xxx ..xxx"),
    "documents": (AttentionMask(documents=(0, 2, 3, 5)), "x.... xx... ..x.. ...x. ...xx"),
    "documents of a row": (BY_ROW, "x.... .xxxx .xxxx .xxxx .xxxx"),
    "documents of another row": (BY_ROW, "xxxx. xxxx. xxxx. xxxx. ....x", 1),
    # a segment sees itself and its ancestors
    "tree": (AttentionMask.tree(ENDS, PARENTS), "x...... xx..... xxx.... xxxx... xxx.x.. xx...x. ......x"),
    "tree, window": (
        AttentionMask.tree(ENDS, PARENTS, window=(1, 0)),
        "x...... xx..... .xx.... ..xx... ..x.x.. .x...x. ......x",
    ),
    "prefix": (PREFIX, "xxx.. xxx.. xxx.. xxxx. xxxxx"),
    "prefixes": (AttentionMask.prefix((0, 2, 5), (0, 2)), "x.... xx... ..xx. ..xx. ..xxx"),
    "prefix, window": (replace(PREFIX, window=(1, 1)), "xx... xxx.. .xx.. ..xx. ...xx"),
    "chunks": (CHUNKS, "x.... xx... ..x.. ..xx. ....x"),
    "chunks from the document": (AttentionMask.chunked(2, (0, 3, 5)), "x.... xx... ..x.. ...x. ...xx"),
    "chunks from the row": (AttentionMask.chunked(2, (0, 3, 5), "row"), "x.... xx... ..x.. ...x. ....x"),
    "chunks, both ways": (replace(CHUNKS, causal=False), "xx... xx... ..xx. ..xx. ....x"),
    "images": (AttentionMask.image_spans(SPANS), "x.... xxx.. xxx.. xxxx. xxxxx"),
    "images, window": (AttentionMask.image_spans(SPANS, (0, 1, 5), (1, None)), "x.... .xx.. .xx.. ..xx. ...xx"),
    "blocks": (AttentionMask.blocks(TABLE, 2, 5), "xx..x xx..x ..... ..... xxxxx"),
    "causal blocks": (AttentionMask.blocks(TABLE, 2, 5, causal=True), "x.... xx... ..... ..... xxxxx"),
    "slices": (BANDS, ".x.xx .xx.x .xxx. ..xx. xxxxx"),
    "slices, window": (replace(BANDS, causal=True, window=(2, None)), "..... .x... .xx.. ..xx. ..xxx"),
    "mask of a row": (OF_ROWS, "x.... xx... xxx.. xxxx. xx..x"),
    "mask of another row": (OF_ROWS, "xxxxx xxxxx xxxxx xxxxx xxxxx", 1),
    "mask of a row, window": (replace(OF_ROWS, window=(1, 2)), "x.... xx... .xx.. ..xx. .x..x"),
    "mask of another row, window": (replace(OF_ROWS, window=(1, 2)), "xxx.. xxxx. .xxxx ..xxx ...xx", 1),
}
"""Masks, for each query an x at the keys that it sees, and the row of the batch if it is not the first."""


@pytest.mark.parametrize("name", SHOWN)
def test_visible_pairs_by_hand(name):
    mask, shown, *row = SHOWN[name]
    lines = shown.split()
    i = torch.arange(len(lines))
    pairs = visible_pairs(mask, i, i, batch=2)
    actual = pairs[min(*row, len(pairs) - 1) if row else 0]
    assert ["".join(".x"[int(pair)] for pair in line) for line in actual] == lines


def test_path_of_a_tree_equals_a_sequence():
    for seed in range(100):
        random = Random(seed)
        length, window = random.randint(1, 30), random.choice((None, random.randint(0, 9)))
        tree = replace(tree_mask(random, length), window=(window, 0))
        assert isinstance(tree.pattern, Tree)
        ends, parents = tree.pattern.ends, tree.pattern.parents
        expected = torch.zeros(1, length, length, dtype=torch.bool)
        for leaf in range(len(parents)):
            path, segment = list[int](), leaf
            while segment >= 0:
                path[:0] = range(ends[segment], ends[segment + 1])
                segment = parents[segment]
            path_pairs = visible_pairs(
                AttentionMask(window=(window, 0)), torch.arange(len(path)), torch.arange(len(path))
            )
            leaf_tokens = torch.tensor(path)[-(ends[leaf + 1] - ends[leaf]) :]
            expected[0, leaf_tokens[:, None], torch.tensor(path)] = path_pairs[0, -len(leaf_tokens) :]
        assert torch.equal(visible_pairs(tree, torch.arange(length), torch.arange(length)), expected), tree


def test_positions_are_global_for_any_local_order():
    pairs = visible_pairs(AttentionMask(window=(2, None)), torch.tensor([7, 2]), torch.tensor([5, 0, 8, 2, 7]))
    assert pairs.tolist() == [[[True, False, False, False, True], [False, True, False, True, False]]]
