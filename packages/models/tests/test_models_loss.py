"""The token loss, a sum and a count."""

import pytest
import torch

from armillary.models import token_loss


def test_the_loss_sums_over_valid_labels_and_counts_them():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 6], [0, 0, -100]])
    total, count = token_loss(logits, labels)
    by_hand = -sum(
        logits[b, t].log_softmax(-1)[labels[b, t]].item() for b in range(2) for t in range(3) if labels[b, t] >= 0
    )
    assert total.item() == pytest.approx(by_hand, rel=1e-14)
    assert total.dtype == torch.float64
    assert count.item() == 4


def test_losses_of_chunks_add_up():
    logits, labels = torch.randn(2, 8, 7, dtype=torch.float64), torch.randint(-1, 7, (2, 8))
    full = token_loss(logits, labels, ignore=-1)
    chunk_losses = [token_loss(logits[:, chunk], labels[:, chunk], ignore=-1) for chunk in (slice(0, 3), slice(3, 8))]
    assert sum(total.item() for total, _ in chunk_losses) == pytest.approx(full[0].item(), rel=1e-14)
    assert sum(count.item() for _, count in chunk_losses) == full[1].item()


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels = torch.randn(4, 500, 7).bfloat16(), torch.randint(7, (4, 500))
    total, _ = token_loss(logits, labels)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(token_loss(logits.double(), labels)[0].item(), rel=1e-6)


def test_no_valid_label_gives_zero():
    logits = torch.randn(1, 3, 7, requires_grad=True)
    total, count = token_loss(logits, torch.full((1, 3), -100))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros(1, 3, 7))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_any_integers(dtype):
    logits, labels = torch.randn(1, 4, 7), torch.tensor([[5, 0, 6, 3]])
    assert torch.equal(token_loss(logits, labels.to(dtype), ignore=3)[0], token_loss(logits, labels, ignore=3)[0])
