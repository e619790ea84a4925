"""Tensors of `attn_mask` become masks with the same pairs."""

import pytest
import torch
import torch.nn.functional as F

from armillary.attention import AttentionMask, Local, Slice, sdpa_parallel, sequence
from armillary.attention.context_parallel.dense_masks import mask_of_tensor
from armillary.core import SequenceLayout

LENGTH = 40
POSITIONS = torch.arange(LENGTH)
DOCUMENTS = (0, 1, 12, 13, 30, LENGTH)
MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "window": AttentionMask(window=(5, None)),
    "window of one": AttentionMask(window=(0, None)),
    "two sides": AttentionMask(causal=False, window=(3, 6)),
    "left side": AttentionMask(causal=False, window=(3, None)),
    "right side": AttentionMask(causal=False, window=(None, 2)),
    "documents": AttentionMask(documents=DOCUMENTS),
    "documents, both ways": AttentionMask(causal=False, documents=DOCUMENTS),
    "documents and a window": AttentionMask(window=(4, None), documents=DOCUMENTS),
}
OTHERS = {
    "tree": AttentionMask.tree([0, 8, 15, 22, 33, LENGTH], [-1, 0, 1, 0, -1]),
    "tree and a window": AttentionMask.tree([0, 8, 15, 22, 33, LENGTH], [-1, 0, 1, 0, -1], window=(6, None)),
    "prefix": AttentionMask.prefix((0, 13, LENGTH), (4, 9)),
    "chunks": AttentionMask.chunked(7, (0, 13, LENGTH)),
    "images": AttentionMask.image_spans([range(3, 9), range(20, 34)], window=(8, None)),
    "blocks": AttentionMask.blocks(torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) > 0.4, 5),
    "slices": AttentionMask.of_slices([Slice(range(5, 20), range(8, 30), -4, 3), Slice(range(22, 25), range(2, 9))]),
    "nothing": AttentionMask.of_slices([]),
    "later keys alone": AttentionMask.of_slices([Slice(range(LENGTH), range(LENGTH), 1, None)]),
}


def dense(mask: AttentionMask, row: int = 0) -> torch.Tensor:
    return mask.visible(POSITIONS, POSITIONS, row=row)


@pytest.mark.parametrize("name", [*MASKS, *OTHERS])
def test_a_tensor_is_read_exactly_as_few_slices(name):
    mask, few = (MASKS | OTHERS)[name], {"tree": 9, "prefix": 4, "chunks": 6, "images": 12, "nothing": 0}
    actual = mask_of_tensor(dense(mask), 2, LENGTH)
    assert torch.equal(dense(actual), dense(mask))
    assert name in OTHERS or actual.pattern is None or name == "window of one"  # the compact form
    assert sum(map(len, actual.slices(LENGTH))) <= few.get(name, LENGTH**2), actual.slices(LENGTH)


def test_random_tensors_are_read_exactly():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        visible = torch.rand(LENGTH, LENGTH, generator=generator) < torch.rand((), generator=generator)
        visible[torch.rand(LENGTH, generator=generator) < 0.2] = False
        visible = visible.roll(int(seed), 1) | (dense(MASKS["window"]) if seed % 2 else torch.zeros_like(visible))
        assert torch.equal(dense(mask_of_tensor(visible, 1, LENGTH)), visible), seed


def test_shapes_dtypes_and_rows():
    causal = dense(MASKS["causal"])
    added = torch.zeros(LENGTH, LENGTH).masked_fill(~causal, -torch.inf)
    finite = added.clamp(min=torch.finfo(added.dtype).min)
    for attn_mask in (causal[None], causal[None, None], causal.expand(2, 3, -1, -1), added, finite, added.bfloat16()):
        assert mask_of_tensor(attn_mask, 2, LENGTH) == AttentionMask()
    rows = mask_of_tensor(torch.stack([causal, dense(OTHERS["images"])])[:, None], 2, LENGTH)
    assert torch.equal(dense(rows, 0), causal) and torch.equal(dense(rows, 1), dense(OTHERS["images"]))
    hidden = POSITIONS >= 30  # padding, hidden from all queries
    padded = mask_of_tensor((~hidden)[None, None, None], 2, LENGTH)
    assert torch.equal(dense(padded), (~hidden).expand(LENGTH, LENGTH))


CAUSAL = dense(MASKS["causal"])


# -- calls ------------------------------------------------------------------------------------------------------------


def attended(mask: AttentionMask | None = None, documents=None, **options) -> torch.Tensor:
    q, k, v = torch.randn(3, 2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with sequence(layout=SequenceLayout.contiguous(LENGTH, 1), documents=documents, mask=mask), sdpa_parallel(Local()):
        return F.scaled_dot_product_attention(q, k, v, **options)


def test_tensors_and_mask_values_give_equal_results():
    q, k, v = torch.randn(3, 2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for name in ("tree", "blocks"):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense(OTHERS[name])).nan_to_num()
        for actual in (attended(attn_mask=dense(OTHERS[name])), attended(OTHERS[name], is_causal=name != "blocks")):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_tensor_is_read_once():
    from armillary.attention.context_parallel.dense_masks import MaskReader

    reader, layout, attn_mask = MaskReader(Local()), SequenceLayout.contiguous(LENGTH, 1), CAUSAL.clone()
    assert reader.read(attn_mask, 2, layout) is reader.read(attn_mask, 2, layout)
    attn_mask[0, 1] = True
    assert torch.equal(dense(reader.read(attn_mask, 2, layout)), attn_mask)
