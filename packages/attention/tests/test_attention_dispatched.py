"""The ledger counts all bytes that attention methods send: torch's dispatcher sees the same ones."""

import torch
from fake_ranks import on_fake_ranks
from torch import Tensor, nn

from armillary.attention import AttentionMask
from armillary.core import CommLedger
from armillary.core.testing import Dispatched
from conformance import METHODS, Composition, compositions

B, N, H, K, D = 2, 52, 8, 2, 8
MASKS = AttentionMask(), AttentionMask(window=(9, None), documents=(0, 20, N))
PARTS = {"ring-keys", "ring-queries", "token_ring", "all_gather", "wallfacer-2", "wallfacer-2-keys", "ulysses", "usp"}
FOUR = [one for one in compositions(tuple(METHODS), (4,)) if one.method in PARTS or one.method == "ring+token_ring"]
"""Every way of sending; other compositions send in the same ways."""


def counted(composition: Composition) -> tuple[dict, dict]:
    """Returns the dispatcher's and the ledger's counts for two masks, forward and backward, one with sinks and lse."""
    attend = composition.build()
    layout = attend.layout(N)
    q, k, v = (torch.randn(B, layout.sizes[attend.shard], n, D, requires_grad=True) for n in (H, K, K))
    sinks = torch.randn(H, requires_grad=True)
    with Dispatched() as dispatched, CommLedger() as ledger:
        attend(q, k, v, mask=MASKS[1], layout=layout).sum().backward()
        attend(q, k, v, mask=MASKS[0], layout=layout, sinks=sinks, return_lse=True)[0].sum().backward()
    return dispatched.sent, Dispatched.of(ledger)


def counted_all(chosen: list[Composition]) -> list[tuple[dict, dict]]:
    return [counted(composition) for composition in chosen]


def test_every_method():
    for rank in on_fake_ranks(4, counted_all, FOUR):
        for composition, (dispatched, booked) in zip(FOUR, rank, strict=True):
            assert dispatched == booked and booked, composition


class Columns:
    """Projections by linear layers."""

    heads, key_heads = H, K

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(4, n * D, bias=False) for n in (H, K, K))

    def q(self, x: Tensor, heads: range) -> Tensor:
        return self.query(x).unflatten(-1, (-1, D))[:, :, list(heads)]

    def kv(self, x: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        k, v = (layer(x).unflatten(-1, (-1, D))[:, :, list(heads)] for layer in (self.key, self.value))
        return k, v

    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for layer in (self.query, self.key, self.value) for p in layer.parameters())


def projected(name: str) -> tuple[dict, dict]:
    attend = Composition.of(name, ring=2, ulysses=2).build()
    layout = attend.layout(N)
    x = torch.randn(B, layout.sizes[attend.shard], 4, requires_grad=True)
    with Dispatched() as dispatched, CommLedger() as ledger:
        attend.projected(x, Columns(), mask=MASKS[0], layout=layout).sum().backward()
    return dispatched.sent, Dispatched.of(ledger)


def both_projected() -> list[tuple[dict, dict]]:
    return [projected(name) for name in ("usp", "upipe+ring")]


def test_from_hidden_states():
    for rank in on_fake_ranks(4, both_projected):
        for dispatched, booked in rank:
            assert dispatched == booked != {}
