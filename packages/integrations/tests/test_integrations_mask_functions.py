"""transformers' mask functions as `AttentionMask`: equal for every pair, or refused by name."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from armillary.attention import AttentionMask, Slice
from armillary.attention.mask import Chunked, ImageSpans
from armillary.integrations.transformers.documents import check_multimodal
from armillary.integrations.transformers.mask_functions import mask_of, narrow, rule_of

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402
from transformers.models.gemma3 import modeling_gemma3 as gemma3  # noqa: E402

LENGTH = 24
POSITIONS = torch.arange(LENGTH)
TYPES = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0, 1] + [0] * 14, [1] * 5 + [0] * 5 + [1] * 6 + [0] * 8])
RUNS, SCATTERED = gemma3.get_block_sequence_ids_for_mask(TYPES), torch.where(TYPES == 1, 0, -1)
both, either = masking_utils.and_masks, masking_utils.or_masks
blocks, window, chunks = (
    getattr(masking_utils, f"{name}_overlay") for name in ("blockwise", "sliding_window", "chunked")
)
CAUSAL, WINDOW = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(4)
ZEROS = torch.zeros(2, dtype=torch.long)


def everything(*args):
    return torch.tensor(True, dtype=torch.bool)


FUNCTIONS = {
    "causal": (CAUSAL, None),
    "window": (WINDOW, None),
    "window of one": (masking_utils.sliding_window_causal_mask_function(1), None),
    "bidirectional": (masking_utils.bidirectional_mask_function, None),
    "bidirectional window": (masking_utils.sliding_window_bidirectional_mask_function(3), None),
    "Gemma 3, full": (either(CAUSAL, blocks(RUNS)), ImageSpans),
    "Gemma 3, sliding": (both(either(CAUSAL, blocks(RUNS)), window(4)), ImageSpans),
    "a window, or one image": (either(WINDOW, blocks(RUNS)), None),
    "images as one group": (either(CAUSAL, blocks(SCATTERED)), None),
    "images as one group, and a window": (both(either(CAUSAL, blocks(SCATTERED)), window(4)), None),
    "an image alone": (blocks(RUNS), None),
    "chunks": (masking_utils.chunked_causal_mask_function(5, ZEROS), Chunked),
    "chunks and a window": (both(masking_utils.chunked_causal_mask_function(5, ZEROS), window(3)), Chunked),
    "EmbeddingGemma, full": (either(CAUSAL, everything), None),
    "EmbeddingGemma, sliding": (either(WINDOW, gemma3._bidirectional_window_overlay(4)), None),
}


def dense(function) -> torch.Tensor:
    """The visibility [2, LENGTH, LENGTH] that transformers computes."""
    indices = (torch.arange(2)[:, None, None], ZEROS[:1], POSITIONS[None, :, None], POSITIONS[None, None, :])
    return function(*indices).expand(2, LENGTH, LENGTH)


def visibility(mask: AttentionMask) -> torch.Tensor:
    return torch.stack([mask.visible(POSITIONS, POSITIONS, row=row if mask.per_row else 0) for row in range(2)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_becomes_a_mask_and_documents_are_masked_as_separate_rows(name):
    function, pattern = FUNCTIONS[name]
    rule = rule_of(function)
    mask = mask_of(rule, rule.groups, None, LENGTH)
    assert torch.equal(visibility(mask), dense(function))
    assert pattern is None or type(mask.row(1).pattern) is pattern  # the compact form
    # Documents replace the mask function that transformers adds for packed rows.
    ends = ((0, 2, 13, LENGTH), (0, LENGTH))
    ids = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in ends])
    found = masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(ids))
    restarting = masking_utils.remap_positions_for_packed_sequence(function, ids)
    rule = rule_of(both(found, restarting))
    actual = visibility(mask_of(rule, rule.groups, ends, LENGTH))
    assert torch.equal(actual[1], dense(function)[1])
    for a, b in pairwise(ends[0]):
        assert not actual[0, a:b, :a].any() and not actual[0, a:b, b:].any()
        document = mask_of(rule, None if rule.groups is None else rule.groups[:, a:b], None, b - a)
        assert torch.equal(actual[0, a:b, a:b], document.visible(POSITIONS[: b - a], POSITIONS[: b - a]))


def test_documents_that_transformers_found_are_left_out_beside_images_too():
    found = masking_utils.packed_sequence_mask_function(ZEROS)
    restarting = masking_utils.remap_positions_for_packed_sequence(CAUSAL, POSITIONS.repeat(2, 1))
    rule = rule_of(both(either(restarting, blocks(RUNS)), found))
    expected = rule_of(either(CAUSAL, blocks(RUNS)))
    assert torch.equal(*(visibility(mask_of(each, each.groups, None, LENGTH)) for each in (rule, expected)))


def test_a_batch_without_images_has_the_plain_mask():
    for name, band in (("Gemma 3, full", None), ("Gemma 3, sliding", (3, None))):
        rule = rule_of(FUNCTIONS[name][0])
        assert mask_of(rule, torch.full_like(RUNS, -1), None, LENGTH) == AttentionMask(window=band)


UNKNOWN = {
    "none": None,
    "functools": partial(CAUSAL),
    "<lambda>": lambda batch, head, query, key: query >= key,
    "hides_everything": both(CAUSAL, lambda *args: torch.tensor(False)),
    "padding_mask_function": masking_utils.padding_mask_function(TYPES),
    "packed_sequence_mask_function": both(CAUSAL, masking_utils.packed_sequence_mask_function(TYPES)),
    "packed_sequence_mask_function, restarted": masking_utils.remap_positions_for_packed_sequence(
        both(CAUSAL, masking_utils.packed_sequence_mask_function(TYPES)), ZEROS
    ),
    "chunks joined by or": either(masking_utils.chunked_causal_mask_function(3, ZEROS), CAUSAL),
    "chunks of 3 and of 4": both(chunks(3, ZEROS), chunks(4, ZEROS)),
    "blocks of two kinds": either(blocks(RUNS), blocks(SCATTERED)),
}


def _bidirectional_window_overlay(sliding_window):
    """A function of a known name with other code."""

    def inner_mask(batch, head, query, key):
        return abs(query - key) <= sliding_window

    inner_mask.__qualname__ = "_bidirectional_window_overlay.<locals>.inner_mask"
    inner_mask.__module__ = "transformers.models.other.modeling_other"
    return inner_mask


def test_unknown_changed_and_scattered_functions_are_refused_by_name():
    for name, function in (UNKNOWN | {"_bidirectional_window_overlay": _bidirectional_window_overlay(4)}).items():
        with pytest.raises(ValueError, match="mask made of") as refused:
            rule_of(function)
        assert name.split(",")[0] in str(refused.value) or name in ("functools", "hides_everything")
    rule = rule_of(FUNCTIONS["images as one group"][0])
    with pytest.raises(ValueError, match="more than 65536 slices"):
        mask_of(rule, (torch.arange(4000) % 2 - 1)[None], None, 4000)


# -- explicit masks ---------------------------------------------------------------------------------------------------


def test_an_explicit_mask_gets_the_window_of_each_layer_or_is_refused():
    tree = AttentionMask.tree([0, 8, 16, LENGTH], [-1, 0, 0])
    assert narrow(tree, rule_of(WINDOW)) == tree.narrow(3) and narrow(tree, rule_of(CAUSAL)) == tree
    bidirectional_window = rule_of(FUNCTIONS["bidirectional window"][0])
    plain = AttentionMask(causal=False, window=(None, 2))
    assert narrow(plain, bidirectional_window) == AttentionMask(causal=False, window=(3, 2))
    anything = AttentionMask.of_slices([Slice(range(LENGTH), range(LENGTH))])
    assert narrow(anything, rule_of(CAUSAL)) == anything
    for mask, name, message in (
        (AttentionMask(), "bidirectional", "bidirectional"),
        (AttentionMask(causal=False), "causal", "causal"),
        (AttentionMask(), "chunks", "chunks of 5"),
    ):
        with pytest.raises(ValueError, match=message):
            narrow(mask, rule_of(FUNCTIONS[name][0]))


# -- positions in time, height and width ----------------------------------------------------------------------------


def video_positions() -> torch.Tensor:
    """Qwen2.5-VL's positions [3, 1, 13] of 3 text tokens, 2 frames of 2 x 2 tokens 50 apart, and 2 text tokens."""
    text = torch.arange(3).expand(3, -1)
    frames = torch.stack([torch.arange(8) // 4 * 50, torch.arange(8) // 2 % 2, torch.arange(8) % 2]) + 3
    return torch.cat([text, frames, torch.arange(5, 7).expand(3, -1)], 1)[:, None]


def test_positions_may_decrease_only_after_a_video():
    check_multimodal(video_positions())
    for wrong in (video_positions().flip(2), video_positions() % 5, torch.arange(13).remainder(7).expand(3, 1, -1)):
        with pytest.raises(ValueError, match=r"position ids \[.*not beyond"):
            check_multimodal(wrong)
