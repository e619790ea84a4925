"""What each method sends, counted, is its closed form to the byte; and what nobody sees is not sent."""

from collections.abc import Sequence

import torch

from armillary.attention import AllGatherKV, AttentionMask, Method, Ring, TokenRing, Ulysses, UPipe, WallFacer
from armillary.core import CommLedger
from armillary.core.testing import mesh

B, T, H, D, P = 2, 8, 8, 16, 4  # T tokens on each of P ranks
FULL, CAUSAL = AttentionMask(causal=False), AttentionMask()
DTYPES = ((torch.float32, 4, 4), (torch.bfloat16, 2, 4), (torch.float64, 8, 8))  # with e and a


def build(name: str) -> Method:
    if name == "ulysses":
        return Ulysses(mesh(ulysses=P)["ulysses"])
    axis = mesh(ring=P)["ring"]
    return TokenRing(axis) if name == "token_ring" else Ring(axis, backward=name.removeprefix("ring "))


def bytes_sent(name: str, key_heads: int, dtype: torch.dtype, mask: AttentionMask, kind: str) -> tuple[int, int]:
    attend = build(name)
    q, k, v = (torch.randn(B, T, n, D, dtype=dtype, requires_grad=True) for n in (H, key_heads, key_heads))
    with CommLedger() as ledger:
        attend(q, k, v, mask=mask, layout=attend.layout(P * T, kind)).sum().backward()
    assert ledger.bytes() == ledger.bytes(phase="forward") + ledger.bytes(phase="backward")
    return ledger.bytes(phase="forward"), ledger.bytes(phase="backward")


def sent(worlds, name: str, key_heads: int, dtype: torch.dtype, mask: AttentionMask = FULL, kind: str = "zigzag"):
    return worlds(P).run(bytes_sent, name, key_heads, dtype, mask, kind)


def test_ring_that_rotates_keys(worlds):
    for key_heads in (1, 2, 8):
        for dtype, e, a in DTYPES:
            shard = 2 * B * T * key_heads * D
            expected = ((P - 1) * shard * e, (P - 1) * shard * (e + a))
            assert sent(worlds, "ring keys", key_heads, dtype) == [expected] * P


def test_ring_that_rotates_queries_in_backward(worlds):
    for key_heads in (1, 8):
        for dtype, e, a in DTYPES:
            forward = (P - 1) * 2 * B * T * key_heads * D * e
            backward = (P - 1) * B * T * H * (3 * D * e + a + D * a)  # lse is as wide as the accumulators
            assert sent(worlds, "ring queries", key_heads, dtype) == [(forward, backward)] * P


def test_ring_takes_the_cheaper_backward(worlds):
    for key_heads in (1, 2, 8):
        for dtype, *_ in DTYPES:
            both = [sent(worlds, f"ring {moving}", key_heads, dtype)[0] for moving in ("keys", "queries")]
            assert sent(worlds, "ring auto", key_heads, dtype) == [min(both)] * P
    # Multi-head attention in bfloat16 at a usual head dim is where queries win: 5 units against 6.
    assert sent(worlds, "ring auto", 8, torch.bfloat16) == sent(worlds, "ring queries", 8, torch.bfloat16)


def test_token_ring(worlds):
    for key_heads in (2, 8):
        for dtype, e, a in DTYPES:
            forward = (P - 1) * B * T * H * (D * e + D * e + a)
            backward = (P - 1) * B * T * H * (3 * D * e + a + D * a)
            assert sent(worlds, "token_ring", key_heads, dtype) == [(forward, backward)] * P


def test_ulysses(worlds):
    for key_heads in (1, 2, 4, 8):
        for dtype, e, a in DTYPES:
            queries, keys = (n * (P - 1) * B * T * D // P for n in (2 * H, 2 * max(key_heads, P)))
            # Where ranks share a key head, what they send back of its gradient is a sum not finished yet, and wide.
            expected = ((queries + keys) * e, queries * e + keys * (a if key_heads < P else e))
            assert sent(worlds, "ulysses", key_heads, dtype) == [expected] * P


def test_causal_and_contiguous_only_ranks_that_see_a_shard_get_it(worlds):
    """Keys of shard r are seen by ranks r and up, queries see keys of ranks r and down: half of all cells."""
    shard = 2 * B * T * H * D * 4
    keys = sent(worlds, "ring keys", H, torch.float32, CAUSAL, "contiguous")
    assert [forward for forward, _ in keys] == [shard * (r + 1) * (r < P - 1) for r in range(P)]  # shards 0..r go on
    queries = sent(worlds, "ring queries", H, torch.float32, CAUSAL, "contiguous")
    going, returning = (3 * D * 4 + 4) * B * T * H, D * 4 * B * T * H
    assert sum(b for _, b in queries) == (going + returning) * P * (P - 1) // 2
    assert sum(b for _, b in keys) == 2 * sum(f for f, _ in keys)


def test_causal_and_zigzag_three_quarters_are_sent(worlds):
    """Half of the ranks see the first half of a shard's keys only: those come last, and get no more than that."""
    for name in ("ring keys", "ring queries", "token_ring"):
        for key_heads in (2, 8):
            whole, part = (sent(worlds, name, key_heads, torch.float32, mask) for mask in (FULL, CAUSAL))
            for phase in (0, 1):
                assert 4 * sum(rank[phase] for rank in part) == 3 * sum(rank[phase] for rank in whole), name


def test_with_a_window_neighbours_get_the_tokens_within_it(worlds):
    """A window of 3 back on contiguous shards: the last 3 tokens of a shard go one hop, and their gradients back."""
    window = AttentionMask(window=(3, None))
    token = 2 * B * H * D * 4
    assert sent(worlds, "ring keys", H, torch.float32, window, "contiguous") == [
        (3 * token * (r < P - 1), 3 * token * (r < P - 1) + 3 * token * (r > 0)) for r in range(P)
    ]
    alone = AttentionMask(window=(0, 0))
    assert sent(worlds, "token_ring", H, torch.float32, alone, "contiguous") == [(0, 0)] * P


def wall_facer_bytes(
    team: int, placement: str, gather_keys: bool, backward: str, key_heads: int, dtype: torch.dtype
) -> tuple[bool, dict[tuple[str, str], int]]:
    """Whether this rank keeps its own keys, and bytes by (kind, phase)."""
    attend = WallFacer(mesh(ring=16)["ring"], team, placement, backward, gather_keys)
    q, k, v = (torch.randn(B, T, n, D, dtype=dtype, requires_grad=True) for n in (H, key_heads, key_heads))
    with CommLedger() as ledger:
        attend(q, k, v, mask=AttentionMask(False), layout=attend.layout(16 * T)).sum().backward()
    kinds = [(kind, phase) for kind in ("p2p", "all_gather", "reduce_scatter") for phase in ("forward", "backward")]
    own = attend.teams.keeper(*attend.seat) == attend.shard
    return own, {(kind, phase): ledger.bytes(kind=kind, phase=phase) for kind, phase in kinds}


def test_wall_facer(worlds):
    """Its closed form at 16 ranks: teams of 2 in rings of 4, and teams of 4 with no ring at all."""
    for team, placement, backward, key_heads, (dtype, e, a) in (
        (1, "collect_intra", "keys", 2, DTYPES[0]),
        (2, "collect_intra", "keys", 2, DTYPES[1]),
        (2, "p2p_intra", "queries", 8, DTYPES[1]),
        (2, "p2p_intra", "queries", 8, DTYPES[0]),
        (4, "collect_intra", "keys", 8, DTYPES[0]),
    ):
        steps = 16 // team**2 - 1
        queries, keys = B * T * H, 2 * B * T * key_heads * D
        step = keys * (e + a) if backward == "keys" else queries * (3 * D * e + a + D * a)
        for own, sent in worlds(16).run(wall_facer_bytes, team, placement, True, backward, key_heads, dtype):
            placed = 0 if own else team  # the team's keys, once; a rank that keeps its own sends none
            assert sent == {
                ("all_gather", "forward"): (team - 1) * (queries * D + keys) * e,
                ("p2p", "forward"): (placed + steps * team) * keys * e,
                ("reduce_scatter", "forward"): (team - 1) * queries * (D * e + a),
                ("all_gather", "backward"): (team - 1) * (queries * (3 * D * e + a) + keys * e),
                ("p2p", "backward"): placed * keys * (e + a) + steps * team * step,
                ("reduce_scatter", "backward"): (team - 1) * (queries * D + keys) * a,
            }


def test_wall_facer_without_the_gather_of_keys_sends_less_within_teams(worlds):
    _, sent = worlds(16).run(wall_facer_bytes, 2, "collect_intra", False, "keys", 8, torch.float32)[5]
    assert sent["all_gather", "forward"] == B * T * H * D * 4
    assert sent["p2p", "forward"] == (2 + 3 * 2) * 2 * B * T * 8 * D * 4


def all_gather_bytes(key_heads: int) -> tuple[int, int, int]:
    attend = AllGatherKV(mesh(ring=P)["ring"])
    q, k, v = (torch.randn(B, T, n, D, requires_grad=True) for n in (H, key_heads, key_heads))
    with CommLedger() as ledger:
        attend(q, k, v, mask=AttentionMask(), layout=attend.layout(P * T)).sum().backward()
    gathers = [ledger.bytes(kind="all_gather", phase=phase) for phase in ("forward", "backward")]
    return gathers[0], gathers[1], ledger.bytes(kind="reduce_scatter")


def test_all_gather(worlds):
    for key_heads in (1, 8):
        keys = (P - 1) * 2 * B * T * key_heads * D * 4
        assert worlds(P).run(all_gather_bytes, key_heads) == [(keys, keys, keys)] * P


# -- in stages of heads -----------------------------------------------------------------------------------------------


class Columns:
    """Hidden states that are q, k and v side by side already."""

    def __init__(self, key_heads: int) -> None:
        self.heads, self.key_heads = H, key_heads

    def q(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        return x.unflatten(-1, (-1, D))[:, :, list(heads)]

    def kv(self, x: torch.Tensor, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.unflatten(-1, (-1, D))[:, :, [start + head for head in heads]] for start in (H, H + self.key_heads))
        return k, v

    def parameters(self) -> tuple[torch.Tensor, ...]:
        return ()


def sent_in_stages(key_heads: int, heads_per_stage: int, dtype: torch.dtype) -> tuple[int, int]:
    attend = UPipe(mesh(ulysses=P)["ulysses"], heads_per_stage=heads_per_stage)
    x = torch.randn(B, T, (H + 2 * key_heads) * D, dtype=dtype, requires_grad=True)
    with CommLedger() as ledger:
        out = attend.projected(x, Columns(key_heads), mask=FULL, layout=attend.layout(P * T))
        out.sum().backward()
    return ledger.bytes(phase="forward"), ledger.bytes(phase="backward")


def test_upipe_sends_what_ulysses_does_and_in_backward_what_it_has_not_kept(worlds):
    for key_heads in (1, 2, 4, 8):
        for dtype, e, a in DTYPES[:2]:
            queries, keys = (n * (P - 1) * B * T * D // P for n in (H, 2 * max(key_heads, P)))
            forward = (2 * queries + keys) * e
            again = (3 * queries + keys) * e  # q, out and dout, k and v come in
            home = queries * e + keys * (a if key_heads < P else e)
            for heads_per_stage in (P, 2 * P):
                expected = [(forward, again + home)] * P
                assert worlds(P).run(sent_in_stages, key_heads, heads_per_stage, dtype) == expected
