"""The ledger counts all bytes that attention methods send: torch's dispatcher sees the same ones."""

import torch
from fake_ranks import on_fake_ranks
from split_states import Split

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


def projected(name: str) -> tuple[dict, dict]:
    attend = Composition.of(name, ring=2, ulysses=2).build()
    layout = attend.layout(N)
    split = Split(H, K, D)
    x = torch.randn(B, layout.sizes[attend.shard], split.width, requires_grad=True)
    with Dispatched() as dispatched, CommLedger() as ledger:
        attend.projected(x, split, mask=MASKS[0], layout=layout).sum().backward()
    return dispatched.sent, Dispatched.of(ledger)


def both_projected() -> list[tuple[dict, dict]]:
    return [projected(name) for name in ("usp", "upipe+ring")]


def test_from_hidden_states():
    for rank in on_fake_ranks(4, both_projected):
        for dispatched, booked in rank:
            assert dispatched == booked != {}
