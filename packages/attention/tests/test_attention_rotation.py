"""The rotation as data: every token travels to the last rank that sees it, in the cheaper direction."""

from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.attention import AttentionMask, AttentionSpec, Ring, TokenRing, reference_attention
from armillary.attention.call.spec import key_heads_of
from armillary.attention.kernels import Scores
from armillary.attention.parts import Inputs, choose_kernel
from armillary.attention.reference import visible_pairs
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.core import Axis, SequenceLayout, TokenRanges, build_mesh, start_exchange
from armillary.core.testing import mesh, relative_error


def ring(
    place: int, side: RotatingSide, spec: AttentionSpec, ranks: int = 4, topology: RingTopology | None = None
) -> Rotation:
    """Returns the rotation of the rank at `place` of a topology, by default of all ranks in order."""
    topology = topology or RingTopology.of_all(ranks, side)
    axis = Axis("ring", topology.ranks[place], ranks, None, None)  # type: ignore[arg-type] - no group is used
    return Rotation.of(axis, axis, topology, spec.grid)


def spec_of(mask: AttentionMask, layout: SequenceLayout, key_layout: SequenceLayout | None = None) -> AttentionSpec:
    kernel = choose_kernel(Inputs("cpu", torch.float32, 8, 8, None, None))
    return AttentionSpec(mask, layout, key_layout or layout, Scores(1.0), key_heads_of(2, 2), kernel)


@st.composite
def layouts(draw, length: int, shards: int) -> SequenceLayout:
    """Draws a named layout, or random runs in random order."""
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "shuffled"]))
    if kind != "shuffled":
        return getattr(SequenceLayout, kind)(length, shards)
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), min_size=shards - 1, max_size=12)))
    runs = draw(st.permutations([range(a, b) for a, b in pairwise([0, *cuts, length])]))
    return SequenceLayout([runs[shard::shards] for shard in range(shards)])


CUTS = st.sets(st.integers(1, 39)).map(lambda cuts: (0, *sorted(cuts), 40))
MASKS = st.builds(
    AttentionMask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
    documents=st.none() | CUTS | st.tuples(CUTS, CUTS),
)


def blocks(buffers: list[torch.Tensor]) -> int:
    """Counts the memory blocks of live tensors."""
    return len({x.untyped_storage().data_ptr() for x in buffers})


@pytest.mark.parametrize(("name", "direct"), [("ring", 0), ("ring, queries", 0), ("token_ring", 1)])
def test_rings_reuse_receive_buffers(monkeypatch, name, direct):
    """Rotating shards use two blocks; direct returns, or their sums and the rank's, use one block each."""
    rotated, returned = list[torch.Tensor](), list[torch.Tensor]()
    for module, buffers in (("rotate", rotated), ("reduce", returned)):

        def start(axis, send, receive, buffers=buffers):
            send_buffers, receive_buffers = ([flat.buffer for flat in flats.values()] for flats in (send, receive))
            count = blocks(send_buffers) + len(receive_buffers)
            assert blocks([*send_buffers, *receive_buffers]) == count, "a receive buffer overlaps a send buffer"
            buffers.extend(receive_buffers)
            return start_exchange(axis, send, receive)

        monkeypatch.setattr(f"armillary.attention.rotation.{module}.start_exchange", start)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    eight = build_mesh("cpu", ring=8)
    method = TokenRing(eight["ring"]) if direct else Ring(eight["ring"], "queries" if "queries" in name else "keys")
    q, k, v = (torch.zeros(1, 16, 2, 8, requires_grad=True) for _ in range(3))
    out = method(q, k, v, mask=AttentionMask(causal=False), layout=method.layout(128))
    assert (len(rotated), blocks(rotated), blocks(returned)) == (7, 2, direct)
    out.sum().backward()
    assert (len(rotated), blocks(rotated[7:])) == (14, 2)
    assert blocks(returned[7 * direct :]) == (1 if direct else 3)
    for mask, batch in product((AttentionMask(), AttentionMask(window=(40, 0))), (1, 2)):
        q, k, v = (torch.zeros(batch, 16, 2, 8, requires_grad=True) for _ in range(3))
        method(q, k, v, mask=mask, layout=method.layout(128)).sum().backward()


def attends_to_other_ranks_alone() -> list[float]:
    """Errors of out and gradients for a mask under which each rank sees only keys of two other ranks."""
    axis = mesh(ring=4)["ring"]
    layout = SequenceLayout.contiguous(16, 4)
    key_layout = SequenceLayout([layout.spans(rank) for rank in (2, 3, 0, 1)])
    mask, method, shard = AttentionMask(causal=False, documents=(0, 8, 16)), TokenRing(axis), axis.get_local_rank()
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 16, 2, 8, dtype=torch.float64).unbind(0)
    wholes, places = [x.clone().requires_grad_() for x in (q, k, v)], (layout, key_layout, key_layout)
    shards = [place.take(x, shard).requires_grad_() for x, place in zip((q, k, v), places, strict=True)]
    out = method(*shards, mask=mask, layout=layout, key_layout=key_layout)
    exact = reference_attention(*wholes, mask=mask)
    actual = [out, *torch.autograd.grad(out, shards, layout.take(dout, shard))]
    expected = zip((layout, *places), (exact, *torch.autograd.grad(exact, wholes, dout)), strict=True)
    return [relative_error(x, place.take(full, shard)) for x, (place, full) in zip(actual, expected, strict=True)]


def test_results_of_only_other_ranks_are_merged(worlds):
    assert all(max(errors) < 1e-12 for errors in worlds(4).run(attends_to_other_ranks_alone))


def last_seen(spec: AttentionSpec, topology: RingTopology, origin: int) -> list[int]:
    """Returns, for each token of the rotating shard of `origin`, the steps to the last rank that sees it."""
    layouts = (spec.layout, spec.key_layout) if topology.rotating_side == "keys" else (spec.key_layout, spec.layout)
    rotating, last = layouts[1].positions(topology.rotating_shards[origin]), []
    for step in range(len(topology.ranks)):
        stays = layouts[0].positions(topology.stationary_shards[(origin + step) % len(topology.ranks)])
        pair = (stays, rotating) if topology.rotating_side == "keys" else (rotating, stays)
        visible = visible_pairs(spec.mask, *pair, batch=2).any(0).any(0 if topology.rotating_side == "keys" else 1)
        last = [step if sees else before for sees, before in zip(visible, last or [0] * len(rotating), strict=True)]
    return last


def tokens(ranges: TokenRanges) -> list[int]:
    return [token for run in ranges.runs for token in run]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data(), MASKS, st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_every_token_travels_to_the_last_rank_that_sees_it(data, mask, ranks, moving):
    spec = spec_of(mask, data.draw(layouts(40, ranks)), data.draw(layouts(40, ranks)))
    ring_topology = RingTopology.of_all(ranks, moving)
    hops = [
        sum(sum(last_seen(spec, way, origin)) for origin in range(ranks))
        for way in (ring_topology, ring_topology.opposite)
    ]
    topology = ring_topology.cheaper_direction(spec.grid)
    assert topology == (ring_topology.opposite if hops[1] < hops[0] else ring_topology)
    assert topology.tokens_sent(spec.grid) == min(hops)
    assert [way.tokens_sent(spec.grid) for way in (ring_topology, ring_topology.opposite)] == hops
    last = [last_seen(spec, topology, origin) for origin in range(ranks)]
    for place in range(ranks):
        rotation = ring(place, moving, spec, ranks, topology)
        for step in rotation.steps:
            last_steps = last[rotation.origin(step.step)]
            assert tokens(step.token_ranges) == [token for token, steps in enumerate(last_steps) if steps >= step.step]
            leaving, ending = (
                [tokens(step.token_ranges)[i] for i in tokens(some)] for some in (step.next_tokens, step.final_tokens)
            )
            assert leaving == [token for token, steps in enumerate(last_steps) if steps > step.step]
            assert ending == [token for token, steps in enumerate(last_steps) if steps == step.step]
            assert step.received_count == sum(steps > step.step for steps in last[rotation.origin(step.step + 1)])
            assert tokens(step.returned_tokens) == [i for i, steps in enumerate(last[place]) if steps == step.step]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.data(), MASKS, st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_kernels_get_the_visible_tokens_of_the_current_shard(data, mask, ranks, moving):
    """Kernels compute every visible pair once, also for packed tokens."""
    spec = spec_of(mask, data.draw(layouts(40, ranks)), data.draw(layouts(40, ranks)))
    rotation = ring(data.draw(st.integers(0, ranks - 1)), moving, spec, ranks)
    for step, direct in zip(rotation.steps, rotation.direct_steps, strict=True):
        assert [tokens(step.token_ranges)[i] for i in tokens(direct.packed_tokens)] == tokens(direct.visible_tokens)
        for ranges in (step.token_ranges, direct.visible_tokens):
            sides = (None, ranges) if moving == "keys" else (ranges, None)
            chosen = zip((spec.layout, spec.key_layout), (step.query_shard, step.key_shard), sides, strict=True)
            q, k = (layout.positions(n)[slice(None) if some is None else tokens(some)] for layout, n, some in chosen)
            visible = visible_pairs(mask, q, k, batch=2).expand(2, -1, -1).long()
            count = torch.zeros_like(visible)
            for rows, columns, (low, high) in spec.block(step.query_shard, step.key_shard, *sides).calls:
                part = count[rows.rows, rows.tokens, columns.tokens]
                offsets = torch.arange(part.shape[2])[None, :] - torch.arange(part.shape[1])[:, None]
                part += (offsets >= (-99 if low is None else low)) & (offsets <= (99 if high is None else high))
            assert torch.equal(count, visible)


@pytest.mark.parametrize(
    ("mask", "kind", "moving", "tokens"),
    [
        (AttentionMask(causal=False), "zigzag", "keys", 120),
        (AttentionMask(), "zigzag", "keys", 90),
        (AttentionMask(), "zigzag", "queries", 90),
        (AttentionMask(), "contiguous", "keys", 60),
        (AttentionMask(), "contiguous", "queries", 60),
        (AttentionMask(window=(4, None)), "contiguous", "keys", 3 * 4),
        (AttentionMask(documents=(0, 10, 20, 30, 40)), "contiguous", "keys", 0),
    ],
)
def test_tokens_sent_of_the_120_of_a_full_round(mask, kind, moving, tokens):
    spec = spec_of(mask, getattr(SequenceLayout, kind)(40, 4))
    assert ring(0, moving, spec).topology.tokens_sent(spec.grid) == tokens


def test_tokens_between_visible_ones_are_not_sent():
    """Shard 1 has positions 8..15 and 48..55. Rank 0 sees their ends, of the first and the last document; ranks 2 and 3
    see the tokens between."""
    mask = AttentionMask(causal=False, documents=(0, 12, 52, 64))
    spec = spec_of(mask, SequenceLayout.zigzag(64, 4))
    rotation = ring(1, "keys", spec)
    assert rotation.topology == RingTopology.of_all(4, "keys")
    full, middle, ends = (range(16),), (range(4, 12),), (range(4), range(12, 16))
    reach = rotation.topology.reach(spec.grid)[1]
    assert [reach.tokens_at(step).runs for step in range(5)] == [full, full, full, ends, ()]
    assert [reach.final_tokens_at(step).runs for step in range(4)] == [(), (), middle, ends]
    assert reach.counts == (16, 16, 16, 8, 0)
    assert [step.returned_tokens.runs for step in rotation.steps] == [(), (), middle, ends]
    last = ring(0, "keys", spec).steps[3]
    assert (last.token_ranges.runs, last.next_tokens.runs, last.final_tokens.runs) == (ends, (), (range(8),))
    assert last.token_ranges.index(13) == 5
    direct_step = ring(0, "queries", spec).direct_steps[3]
    assert (direct_step.visible_tokens.runs, direct_step.packed_tokens.runs) == (ends, (range(8),))
