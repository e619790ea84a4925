"""Packed rows with a position per document: each document has the logits that it has alone."""

from itertools import pairwise

import pytest
import torch

from armillary.attention import AttentionMask
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, initialize

LLAMA = LlamaConfig(vocab_size=37, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48)
LEARNED = GPTConfig(vocab_size=37, dim=32, layers=2, heads=4, max_positions=64)
ROWS = [(0, 5, 6, 30), (0, 11, 28, 30)]


@pytest.mark.parametrize("config", [LLAMA, LEARNED], ids=["llama", "gpt"])
def test_documents_of_a_packed_row_equal_separate_rows(config):
    model = (Llama(config) if config is LLAMA else GPT(config)).double()
    initialize(model, 0)
    ids = torch.randint(37, (2, 30), generator=torch.Generator().manual_seed(0))
    spans = [[range(a, b) for a, b in pairwise(ends)] for ends in ROWS]
    positions = torch.tensor([[p - span.start for span in row for p in span] for row in spans])
    logits = model(ids, positions=positions, mask=AttentionMask(documents=ROWS))
    for row, documents in enumerate(spans):
        for span in documents:
            alone = model(ids[row : row + 1, span.start : span.stop])[0]
            assert torch.allclose(logits[row, span.start : span.stop], alone, rtol=1e-10, atol=1e-12)
