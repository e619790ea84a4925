"""Every kernel: exact pieces of tiles, results against float64, and refusals of unsupported inputs."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate, pairwise, product

import flash_stub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._meta_registrations import meta__efficient_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.attention import AttentionMask, AttentionSpec, Local
from armillary.attention.internal import AttentionOptions, FlashAttn3, Inputs, check_call, choose_kernel
from armillary.attention.kernels import (
    EFFICIENCY,
    KERNELS,
    CpuFlash,
    CudaFlash,
    Cudnn,
    Dense,
    Efficient,
    FlashAttn2,
    FlashAttn4,
    Scores,
    cudnn,
)
from armillary.attention.kernels.flash import parameters, window_of
from armillary.attention.kernels.inputs import module_exists
from armillary.attention.kernels.kernel import MAX_PACKED_TOKENS, MIN_SINGLE_TOKENS, Sequences, Tile
from armillary.attention.kernels.top_left import TopLeft
from armillary.attention.tiling.accumulators import EVERYTHING, Merge, Sum, TilePart
from armillary.attention.tiling.block_attention import BlockAttention, Shards, SingleCall, pack_calls
from armillary.core import SequenceLayout

FLASH = (CudaFlash(), FlashAttn2(), FlashAttn3(), FlashAttn4())
EMULATED = (*FLASH, Cudnn(), Efficient())


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    flash_stub.install(monkeypatch, 2, 3, 4)
    yield
    monkeypatch.undo()
    module_exists.cache_clear()


@st.composite
def band_tiles(draw, longest: int = 12) -> Tile:
    queries, keys = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    bound = st.none() | st.integers(-queries, keys)
    q0, k0 = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    low, high = (None if x is None else x + k0 - q0 for x in (draw(bound), draw(bound)))
    tile = Tile(q0, q0 + queries, k0, k0 + keys, low, high).trim()
    return tile or Tile(q0, q0 + queries, k0, k0 + keys)


def pairs(tile: Tile) -> list[tuple[int, int]]:
    return list(grid(range(tile.q0, tile.q1), range(tile.k0, tile.k1), tile.low, tile.high))


def grid(rows, columns, low, high):
    for a, b in product(rows, columns):
        if (low is None or b - a >= low) and (high is None or b - a <= high):
            yield a, b


def sizes(tile: Tile) -> tuple[int, int]:
    return tile.q1 - tile.q0, tile.k1 - tile.k0


# -- pieces -----------------------------------------------------------------------------------------------------------


def in_one_call(kernel, piece: Tile) -> bool:
    """Returns whether one call of the kernel computes exactly this piece."""
    (queries, keys), (low, high) = sizes(piece), piece.offsets
    if isinstance(kernel, TopLeft):
        return (low is None and high in (None, 0)) or (high is None and low == keys - queries)
    return isinstance(kernel, Dense) or window_is_exact(piece, 3 if isinstance(kernel, FlashAttn3 | FlashAttn4) else 2)


def window_is_exact(piece: Tile, version: int, longer: int = 0) -> bool:
    """Returns whether the window of a piece shows exactly its pairs, also when packed with longer sequences."""
    queries, keys = sizes(piece)
    window = window_of(piece.offsets, queries, keys)
    bounds = flash_stub.band(window, queries, keys, queries + longer, keys + longer, version)
    return pairs(Tile(0, queries, 0, keys, *bounds)) == pairs(Tile(0, queries, 0, keys, *piece.offsets))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@given(tile=band_tiles())
@settings(max_examples=150, deadline=None)
def test_tiles_are_split_into_pieces_of_one_kernel_call(kernel, tile):
    pieces = kernel.cut(tile)
    assert sorted(pair for piece in pieces for pair in pairs(piece)) == pairs(tile)
    for piece in pieces:
        assert piece == piece.trim() and in_one_call(kernel, piece), piece


def test_windows_are_exact_after_flash_attention_rewrites_them():
    tiles = {
        tile
        for queries, keys in product(range(1, 9), repeat=2)
        for low, high in product([None, *range(-queries, keys)], repeat=2)
        if (tile := Tile(0, queries, 0, keys, low, high).trim())
    }
    for tile in tiles:
        pieces = CudaFlash().cut(tile)
        assert all(window_is_exact(piece, *case) for piece in pieces for case in product((2, 3), (0, 1, 5))), tile
        assert len(pieces) == 1 or not window_is_exact(tile, 2) or tile.low is not None, f"{tile} needs no cut"


# -- results ----------------------------------------------------------------------------------------------------------


def softmax_parts(q, k, v, visible, other_keys, scores, dout):
    """Returns (out, lse) over the visible keys; (out, lse) over these and other keys; gradients through the former."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]

    def score(queries, keys):
        values = torch.einsum("bthd,bshd->bhts", queries, keys.repeat_interleave(groups, 2)) * scores.scale
        return values if scores.softcap is None else scores.softcap * (values / scores.softcap).tanh()

    visible_scores = score(q, k).masked_fill(~visible, -torch.inf)
    every = torch.cat([visible_scores, score(q.detach(), other_keys[0])], -1)
    values = torch.cat([v, other_keys[1]], 1).repeat_interleave(groups, 2)
    out = torch.einsum("bhts,bshd->bthd", every.softmax(-1), values)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    part_out = torch.einsum("bhts,bshd->bthd", visible_scores.softmax(-1), v.repeat_interleave(groups, 2))
    part_lse = visible_scores.detach().logsumexp(-1).mT
    return (part_out.detach(), part_lse), (out.detach(), every.detach().logsumexp(-1).mT), grads


def pieces_of(kernel, tile: Tile):
    for piece in kernel.cut(tile):
        rows, columns = (slice(piece.q0, piece.q1), slice(piece.k0, piece.k1))
        yield TilePart(slice(None), rows, slice(None)), TilePart(slice(None), columns, slice(None)), piece.offsets


def run_kernel(kernel, tile, q, k, v, dout, out, lse, scores):
    """Returns (out, lse, dq, dk, dv) of a tile, accumulated over its pieces."""
    block, merge = BlockAttention(0, 0, kernel, scores, 1, tuple(pieces_of(kernel, tile))), Merge.of(q, v.shape[3])
    block.forward(q, k, v, merge)
    sums = [Sum.like(x) for x in (q, k, v)]
    block.backward(dout, q, k, v, out, lse, *sums)
    return *merge.result(), *(total.value() for total in sums)


KERNELS_HERE = (CpuFlash(), Dense(), Dense(score_bytes=600), *EMULATED)
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize(
    "kernel", KERNELS_HERE, ids=lambda kernel: f"{kernel.name}{getattr(kernel, 'score_bytes', '')}"
)
@given(tile=band_tiles(9), kv_heads=st.sampled_from([1, 2, 4]), values=st.sampled_from([8, 5]), capped=st.booleans(),
       dtype=st.sampled_from(list(LIMITS)), seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_tiles_with_part_of_the_keys_of_their_rows(kernel, tile, kv_heads, values, capped, dtype, seed):
    torch.manual_seed(seed)
    tile = Tile(0, tile.q1 - tile.q0, 0, tile.k1 - tile.k0, *tile.offsets)
    scores = Scores(0.3, 1.5 if capped and kernel.limits.softcap else None)
    shapes = [(tile.q1, 4, 8), (tile.k1, kv_heads, 8), (tile.k1, kv_heads, values), (tile.q1, 4, values)]
    q, k, v, dout = (torch.randn(2, *shape).to(dtype) for shape in shapes)
    other_keys = [torch.randn(2, 3, kv_heads, dim, dtype=torch.float64) for dim in (8, values)]
    visible = torch.zeros(tile.q1, tile.k1, dtype=torch.bool)
    visible[tuple(torch.tensor(pairs(tile)).T)] = True
    exact = softmax_parts(*(x.double() for x in (q, k, v)), visible, other_keys, scores, dout.double())
    out, lse = exact[1][0].to(dtype), exact[1][1].to(torch.promote_types(dtype, torch.float32)).contiguous()
    actual = run_kernel(kernel, tile, q, k, v, dout, out, lse, scores)
    for name, got, reference in zip(("out", "lse", "dq", "dk", "dv"), actual, (*exact[0], *exact[2]), strict=True):
        error = (got.double() - reference).abs().max() / reference.abs().max().clamp(min=0.1)
        assert error <= LIMITS[dtype], f"{name} off by {error:.2g}"


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor returned by an op."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_dense_kernel_limits_its_scores_in_memory():
    q, k, v, dout = (torch.randn(1, 128, heads, 4) for heads in (4, 2, 2, 4))
    kernel, scores = Dense(score_bytes=4 * 4 * 128 * 16), Scores(0.5)
    with Largest() as largest:
        out, lse = kernel.forward(q, k, v, (-40, 0), scores)
        kernel.backward(dout, q, k, v, out, lse, (-40, 0), scores)
    assert largest.elements <= 4 * 128 * 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", EMULATED, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_kernels_on_a_gpu_agree_with_the_dense_one(monkeypatch, kernel, dims):
    monkeypatch.undo()
    module_exists.cache_clear()
    torch.manual_seed(0)
    for queries, keys, low, high in product((5, 64, 300), (5, 64, 300), (None, -200, -3), (None, 0, 40)):
        tile = Tile(0, queries, 0, keys, low, high).trim()
        if tile is None or tile != Tile(0, queries, 0, keys, *tile.offsets):
            continue
        q, k, v, dout = (torch.randn(2, n, h, d).bfloat16().cuda() for n, h, d in zip(
            (queries, keys, keys, queries), (4, 2, 2, 4), (dims[0], *dims, dims[1]), strict=True))  # fmt: skip
        if reason := kernel.refuses(Inputs.of(q, v)):
            pytest.skip(reason)
        wide = [x.double() for x in (q, k, v, dout)]
        out, lse = Dense().forward(*wide[:3], tile.offsets, Scores(0.2))
        exact = (out, lse, *Dense().backward(wide[3], *wide[:3], out, lse, tile.offsets, Scores(0.2)))
        given_back = run_kernel(kernel, tile, q, k, v, dout, out.bfloat16(), lse.float(), Scores(0.2))
        for name, got, reference in zip(("out", "lse", "dq", "dk", "dv"), given_back, exact, strict=True):
            error = (got.double() - reference).abs().max() / reference.abs().max()
            assert error <= LIMITS[torch.bfloat16], f"{tile}: {name} off by {error:.2g}"


# -- packed pieces ----------------------------------------------------------------------------------------------------


def run_block(kernel, mask, key_heads=(0, 0, 1, 1), tokens=64):
    torch.manual_seed(0)
    shapes = (4, 16), (2, 16), (2, 8), (4, 8)
    q, k, v, dout = (torch.randn(2, tokens, *shape, dtype=torch.float64) for shape in shapes)
    layout = SequenceLayout.zigzag(tokens, 1)
    block = AttentionSpec(mask, layout, layout, Scores(0.4), key_heads, kernel).block(0, 0)
    merge, sums = Merge.of(q, v.shape[3]), [Sum.like(x) for x in (q, k, v)]
    block.forward(q, k, v, merge)
    out, lse = merge.result()
    block.backward(dout, q, k, v, out, lse, *sums)
    return out, lse, *(total.value() for total in sums)


PACKED = [
    ("documents", AttentionMask(documents=[0, 5, 8, 30, 64]), (0, 0, 1, 1), 1),
    ("documents of each row", AttentionMask(documents=[[0, 5, 30, 64], [0, 9, 11, 64]]), (0, 0, 1, 1), 1),
    ("some longer than the window", AttentionMask(window=(8, 0), documents=[0, 5, 8, 30, 64]), (0, 0, 1, 1), 2),
    ("uneven heads", AttentionMask(documents=[0, 5, 8, 30, 64]), (0, 0, 0, 1), 2),
    ("one tile", AttentionMask(), (0, 0, 1, 1), 1),
]


@pytest.mark.parametrize("kernel", EMULATED, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("mask", "key_heads", "count"), [case[1:] for case in PACKED], ids=[case[0] for case in PACKED]
)
def test_small_tiles_of_one_window_and_the_same_heads_are_one_call(kernel, mask, key_heads, count):
    actual, expected = run_block(kernel, mask, key_heads), run_block(CpuFlash(), mask, key_heads)
    assert flash_stub.calls == sorted(flash_stub.calls, key=lambda call: call.startswith("backward"))
    if isinstance(kernel, Cudnn):
        count += mask.window is not None  # without windows, tiles are split into one more kind of piece
    if not isinstance(kernel, Efficient):  # which does not pack
        assert len(flash_stub.calls) == 2 * count
        assert all("packed" in call for call in flash_stub.calls) == (mask.documents is not None)
    for got, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [CpuFlash(), Dense()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("documents", [range(0, 65, 4), [range(0, 65, 8), (0, 8, 20, 32, 64)]])
def test_small_tiles_of_one_shape_are_one_batch(monkeypatch, kernel, documents):
    mask, calls = AttentionMask(documents=documents, window=(5, 0)), list[int]()
    batched, forward = run_block(kernel, mask), type(kernel).forward
    monkeypatch.setattr(
        type(kernel), "forward", lambda *arguments: calls.append(len(arguments[1])) or forward(*arguments)
    )
    run_block(kernel, mask)
    assert len(calls) <= sum(calls) / 4, f"batches of {calls}"
    monkeypatch.setattr(type(kernel), "pack_key", lambda *piece: None)
    for got, expected in zip(batched, run_block(kernel, mask), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def tokens_of(run: range) -> TilePart:
    return EVERYTHING._replace(tokens=slice(run.start, run.stop))


def packed(kernel, sides: list[tuple[range, range]], band=(None, 0)) -> list[int]:
    """Returns the number of pieces in each call of a block with these queries and keys."""
    calls = [(tokens_of(q), tokens_of(k), band) for q, k in sides]
    shards = Shards(1, max(q.stop for q, _ in sides), max(k.stop for _, k in sides))
    packed_calls = pack_calls(calls, kernel, shards)
    return [1 if isinstance(call, SingleCall) else len(call.sequences.queries) for call in packed_calls]


def runs(*sizes: int) -> list[range]:
    ends = [0, *accumulate(sizes)]
    return [range(*pair) for pair in pairwise(ends)]


def test_large_tiles_are_not_packed_and_packs_are_limited():
    documents = runs(3, MIN_SINGLE_TOKENS, 4)
    assert sorted(packed(CudaFlash(), list(zip(documents, documents, strict=True)))) == [1, 2]
    documents = runs(*[MIN_SINGLE_TOKENS - 1] * 40)
    actual = packed(CudaFlash(), list(zip(documents, documents, strict=True)))
    assert sum(actual) == 40
    assert max(actual) * (MIN_SINGLE_TOKENS - 1) <= MAX_PACKED_TOKENS + MIN_SINGLE_TOKENS


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30, unique=True))
def test_no_token_is_twice_in_a_pack(cells):
    parts = [[tokens_of(range(4 * cell[side], 4 * cell[side] + 4)) for cell in cells] for side in (0, 1)]
    calls = [(*pair, (None, None)) for pair in zip(*parts, strict=True)]
    actual = pack_calls(calls, CpuFlash(), Shards(2, 40, 40))
    every = torch.arange(80).view(2, 40, 1)
    for side in (0, 1):
        tokens = [call[side].of(every).flatten() for call in actual]
        assert all(index.unique().numel() == index.numel() for index in tokens)
        expected = torch.cat([part.of(every).flatten() for part in parts[side]])
        assert torch.cat(tokens).sort().values.equal(expected.sort().values)


def bfloats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(("kernel", "pieces"), [(CudaFlash(), 1), (CudaFlash(), 3), (Cudnn(), 1), (Efficient(), 1)])
def test_the_calls_fit_the_schema_of_torchs_own_ops(monkeypatch, kernel, pieces):
    monkeypatch.undo()  # on meta tensors the real ops check their arguments and return shapes
    q, k, v, dout = (bfloats(*shape) for shape in [(2, 6, 4, 16), (2, 5, 2, 16), (2, 5, 2, 8), (2, 6, 4, 8)])
    band, sequences = (None, -1), Sequences((6,) * 2 * pieces, (5,) * 2 * pieces, (None, -1))

    def pack(x):
        return torch.cat([x.flatten(0, 1)] * pieces)

    if pieces == 1:
        out, lse = kernel.forward(q, k, v, band, Scores(0.3))
    else:
        q, k, v, dout = map(pack, (q, k, v, dout))
        out, lse = kernel.forward_packed(q, k, v, sequences, Scores(0.3))
    assert out.shape == dout.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    if kernel == Efficient() and "out" not in [p.name for p in parameters(meta__efficient_attention_backward)]:
        return  # in torch 2.11 the meta function lacks an argument of the op on CUDA
    tensors = (dout, q, k, v, out, lse)
    if pieces == 1:
        grads = kernel.backward(*tensors, band, Scores(0.3))
    else:
        grads = kernel.backward_packed(tensors, sequences, Scores(0.3))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", [CudaFlash(), Cudnn(), Efficient()], ids=lambda kernel: kernel.name)
def test_outputs_on_a_fake_gpu_have_the_shapes_of_a_kernel(monkeypatch, kernel, dtype, flip):
    monkeypatch.undo()
    dim, values = (16, 8) if isinstance(kernel, CudaFlash) else (8, 16)
    if reason := kernel.refuses(Inputs("cuda", dtype, dim, values, capability=(9, 0))):
        pytest.skip(reason)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, h, d, dtype=dtype, device="cuda") for n, h, d in
                   ((37, 4, dim), (37, 2, dim), (37, 2, values)))  # fmt: skip
        out, lse = kernel.forward(q, k, v, (0, None) if flip else (None, 0), Scores(0.3))
    assert (out.shape, out.dtype, out.device.type) == ((2, 37, 4, values), dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 37, 4), torch.float32)


OPS = {
    "_scaled_dot_product_cudnn_attention": flash_stub.cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": flash_stub.cudnn_backward,
    "_cudnn_attention_forward": flash_stub.cudnn_packed_forward,
    "_cudnn_attention_backward": flash_stub.cudnn_packed_backward,
    "_efficient_attention_forward": flash_stub.efficient_forward,
    "_efficient_attention_backward": flash_stub.efficient_backward,
}


@pytest.mark.parametrize("op", OPS)
def test_the_emulation_has_the_schema_of_torchs_op(op):
    arguments = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    newer = {"seqused_k", "block_table"}  # newer than torch 2.11
    assert [p.name for p in parameters(OPS[op]) if p.name in arguments or p.name not in newer] == arguments


def test_cudnn_packs_only_if_torch_passes_the_longest_length(monkeypatch):
    documents = runs(3, 1, 9)
    sides = list(zip(documents, documents, strict=True))
    assert sorted(packed(Cudnn(), sides)) == [1, 2]  # a sequence of one token is separate
    monkeypatch.setattr(cudnn, "_can_pack", lambda: False)
    assert packed(Cudnn(), sides) == [1, 1, 1]


def test_cudnn_refuses_an_lse_of_another_layout(monkeypatch):
    def ragged(*args, **options):
        out, lse, *states = flash_stub.cudnn_forward(*args, **options)
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2), *states

    monkeypatch.setattr(cudnn, "_forward", ragged)
    with pytest.raises(RuntimeError, match="TORCH_CUDNN_SDPA_AVOID_RECOMPILE"):
        Cudnn().forward(*[torch.randn(1, 4, 2, 8)] * 3, (None, 0), Scores(0.3))


def test_efficient_attention_gets_at_most_65536_rows_or_columns():
    tile = Tile(0, 200_000, 0, 150_000, None, 0)
    pieces = Efficient().cut(tile)
    assert max(max(sizes(piece)) for piece in pieces) == 65536
    assert sum(covered(piece) for piece in pieces) == covered(tile)


def covered(tile: Tile) -> int:
    """Counts the pairs of a tile that is a rectangle or top-left causal."""
    (queries, keys), (low, high) = sizes(tile), tile.offsets
    assert low is None and high in (None, 0)
    short = min(queries, keys)
    return queries * keys if high is None else short * (short + 1) // 2 + (queries - short) * keys


@pytest.mark.parametrize("margin", [0, 16])
def test_flash_attn_3_leaves_multiprocessors_free(monkeypatch, margin):
    arguments = []
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        real = getattr(sys.modules["flash_attn_interface"], name)

        def spy(*args, real=real, sm_margin=0, **options):
            arguments.append(sm_margin)
            return real(*args, sm_margin=sm_margin, **options)

        spy._init_fn = real
        monkeypatch.setattr(sys.modules["flash_attn_interface"], name, spy)
    run_block(FlashAttn3(sm_margin=margin), AttentionMask())
    assert arguments == [margin, margin]


# -- refusals ---------------------------------------------------------------------------------------------------------


def on_cuda(dtype=torch.bfloat16, dims=(64, 64), softcap=None, capability=(9, 0)) -> Inputs:
    return Inputs("cuda", dtype, *dims, softcap, capability)


def on_cpu(dtype, softcap=None) -> Inputs:
    return Inputs("cpu", dtype, 64, 64, softcap)


ANY_ORDER = replace(on_cuda(), deterministic=True)
REFUSED = [
    (CpuFlash(), on_cuda(), r"CPU.*cuda"),
    (CpuFlash(), on_cpu(torch.int32), r"float16, bfloat16, float32.*float64.*torch.int32"),
    (CpuFlash(), on_cpu(torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
    (CpuFlash(), on_cpu(torch.float32, softcap=30.0), "softcap; .*dense"),
    (Dense(), on_cpu(torch.int32), r"float16, bfloat16, float32.*float64.*torch.int32"),
    (Dense(), on_cuda(torch.float8_e5m2), "not torch.float8_e5m2"),
    *[(kernel, on_cuda(softcap=30.0), "softcap") for kernel in (CudaFlash(), Cudnn(), Efficient())],
    *[(kernel, on_cpu(torch.bfloat16), r"CUDA.*cpu") for kernel in EMULATED],
    *[(kernel, on_cuda(capability=(7, 5)), "capability .*not 7.5") for kernel in EMULATED if kernel != Efficient()],
    *[(kernel, on_cuda(torch.float32), r"float16.*bfloat16.*torch.float32") for kernel in (*FLASH, Cudnn())],
    *[(kernel, on_cuda(dims=(64, 128)), r"head dim.*64.*128") for kernel in FLASH],
    *[(kernel, on_cuda(dims=(20, 20)), "multiple of 8") for kernel in EMULATED],
    (Efficient(), on_cuda(capability=(7, 5)), r"bfloat16.*8\.0"),
    (Efficient(), on_cuda(torch.float64), "not torch.float64"),
    (FlashAttn3(), on_cuda(capability=(10, 0)), r"capability 9 .*10.0.*flash_attn_4, cudnn, "),
    (FlashAttn3(), on_cuda(capability=None), "not an unknown one"),
    (FlashAttn4(), on_cuda(capability=(12, 0)), r"capability 9 .*10 .*12.0"),
    (FlashAttn4(), on_cuda(dims=(192, 192), capability=(10, 0)), r"128.*256.*192 and 192"),
    (FlashAttn4(), on_cuda(dims=(192, 128), capability=(10, 0)), r"128.*256.*192 and 128"),
    (Cudnn(), on_cuda(capability=(8, 0)), "not 8.0"),
    (Cudnn(), on_cuda(dims=(256, 256)), "128.*192 and 128.*256 and 256"),
    (Cudnn(), ANY_ORDER, "deterministic"),
    (Cudnn(), replace(on_cuda(), cudnn=91500), "needs cuDNN 9.15.1 or above, not 9.15.0"),
    (Cudnn(), replace(on_cuda(), cudnn=0), "cuDNN 9.15.1"),
    (CudaFlash(), replace(on_cuda(), activated="FA4"), "FA4 is activated .* flash_attn_4 calls it"),
    (CudaFlash(), on_cuda(dims=(224, 224), capability=(8, 9)), "head dim 224"),
]


@pytest.mark.parametrize(("kernel", "inputs", "reason"), REFUSED)
def test_kernels_refuse_unsupported_inputs_with_the_reason(kernel, inputs, reason):
    with pytest.raises(ValueError, match=rf"no kernel for .*{kernel.name}: .*{reason}"):
        choose_kernel(inputs, kernel.name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_dtype_has_a_kernel(dtype):
    assert choose_kernel(on_cpu(dtype)).name == "cpu_flash"
    assert choose_kernel(on_cpu(dtype, softcap=2.0)).name == "dense"
    x = torch.randn(1, 3, 2, 8).to(dtype)
    out, lse = CpuFlash().forward(x, x, x, (None, 0), Scores(0.3))
    grads = CpuFlash().backward(x, x, x, x, out, lse, (None, 0), Scores(0.3))
    assert {out.dtype, *(grad.dtype for grad in grads)} == {dtype} and lse.dtype == torch.promote_types(
        dtype, lse.dtype
    )


AMPERE, BLACKWELL, LATER = (8, 0), (10, 0), (12, 0)
ALL, WINDOW, DOCUMENTS = (2, 3, 4), {"windowed": True}, {"documents": True}
PREFERRED = [
    (ALL, on_cuda(), "flash_attn_3"),
    ((2, 4), on_cuda(), "cudnn"),
    ((), on_cuda(), "cudnn"),
    ((), replace(on_cuda(), cudnn=91800), "cudnn"),
    ((), replace(on_cuda(), cudnn=91002), "cuda_flash"),
    ((), ANY_ORDER, "cuda_flash"),
    ((2,), replace(on_cuda(), **WINDOW), "flash_attn_2"),
    ((), replace(on_cuda(), **WINDOW), "cuda_flash"),
    ((), replace(on_cuda(), **DOCUMENTS), "cuda_flash"),
    ((3,), replace(on_cuda(), **DOCUMENTS), "flash_attn_3"),
    ((), replace(on_cuda(dims=(192, 128)), **WINDOW), "cuda_flash"),
    ((2,), replace(on_cuda(dims=(192, 128)), **DOCUMENTS), "flash_attn_2"),
    (ALL, replace(on_cuda(dims=(192, 128)), **DOCUMENTS), "flash_attn_3"),
    (ALL, replace(on_cuda(dims=(192, 128), capability=BLACKWELL), **DOCUMENTS), "flash_attn_2"),
    ((), on_cuda(dims=(192, 128), capability=AMPERE), "cuda_flash"),
    (ALL, on_cuda(capability=BLACKWELL), "flash_attn_4"),
    ((2, 3), on_cuda(capability=BLACKWELL), "cudnn"),
    (ALL, on_cuda(capability=LATER), "flash_attn_2"),
    (ALL, on_cuda(capability=AMPERE), "flash_attn_2"),
    ((), on_cuda(capability=AMPERE), "cuda_flash"),
    (ALL, on_cuda(capability=None), "flash_attn_2"),
    ((2,), on_cuda(softcap=30.0), "flash_attn_2"),
    ((), on_cuda(softcap=30.0), "dense"),
    (ALL, on_cuda(torch.float32), "efficient"),
    (ALL, on_cuda(torch.float64), "dense"),
    (ALL, on_cuda(dims=(192, 128)), "cudnn"),
    (ALL, on_cuda(dims=(64, 128)), "cudnn"),
    (ALL, on_cuda(dims=(64, 128), capability=AMPERE), "efficient"),
    ((), on_cuda(dims=(256, 256)), "cuda_flash"),
    (ALL, on_cuda(dims=(512, 512)), "efficient"),
    (ALL, on_cuda(dims=(20, 20)), "dense"),
    (ALL, on_cuda(capability=(7, 5)), "dense"),
    (ALL, on_cuda(torch.float16, capability=(7, 5)), "efficient"),
    ((4,), replace(on_cuda(capability=BLACKWELL), activated="FA4", **WINDOW), "flash_attn_4"),
]


@pytest.mark.parametrize(("versions", "inputs", "name"), PREFERRED)
def test_fastest_available_kernel_for_the_inputs_is_chosen(monkeypatch, versions, inputs, name):
    flash_stub.install(monkeypatch, *versions)
    assert choose_kernel(inputs).name == name


def test_an_activated_implementation_also_refuses_calls_that_were_checked_before(monkeypatch):
    attend, options = Local(), AttentionOptions(AttentionMask(), kernel="cuda_flash")
    with FakeTensorMode(), torch.device("cuda"):
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    assert check_call(attend, q, q, q, None, options).kernel == CudaFlash()
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    with pytest.raises(ValueError, match=r"FA3.*flash_attn_3"):
        check_call(attend, q, q, q, None, options)


def test_efficiencies_name_existing_kernels_and_supported_accelerators(monkeypatch):
    flash_stub.install(monkeypatch, *ALL)
    kernels_by_name = {kernel.name: kernel for kernel in KERNELS}
    for (name, major), figures in EFFICIENCY.items():
        assert kernels_by_name[name].refuses(on_cuda(capability=(major, 0))) is None and "arXiv" in figures.source
        assert 0 < figures.causal <= figures.full < 1 and 0 < figures.backward < 1
        assert figures.forward(2**10) == pytest.approx(figures.causal)
        assert figures.forward(2**10) <= figures.forward(2**15) <= figures.forward(2**30) <= figures.full + 1e-9


def test_missing_flash_attn_raises_and_an_unknown_name_lists_all_kernels(monkeypatch):
    flash_stub.install(monkeypatch)
    assert FlashAttn2().refuses(on_cuda()) == "flash_attn.flash_attn_interface is not installed"
    assert FlashAttn3().refuses(on_cuda()) == "flash_attn_interface is not installed"
    assert FlashAttn4().refuses(on_cuda()) == "flash_attn.cute.interface is not installed"
    names = "cpu_flash, flash_attn_3, flash_attn_4, cudnn, flash_attn_2, cuda_flash, efficient, dense"
    with pytest.raises(ValueError, match=rf"'flash'.*known: {names}"):
        choose_kernel(on_cuda(), "flash")


def test_flash_attn_is_found_without_being_imported(monkeypatch, tmp_path):
    flash_stub.none_loaded(monkeypatch)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/cute").mkdir()
    for name in ("flash_attn/__init__", "flash_attn/flash_attn_interface", "flash_attn_interface",
                 "flash_attn/cute/__init__", "flash_attn/cute/interface"):  # fmt: skip
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [kernel.refuses(on_cuda()) for kernel in FLASH] == [None] * 4


WHEELS = [
    (("4",), "flash_attn_4"),
    (("4",), "cuda_flash"),
    (("2",), "flash_attn_2"),
    (("4", "2"), "flash_attn_2"),
    (("3", "4"), "flash_attn_3"),
    (("3", "4"), "flash_attn_4"),
    (("3 of 2025",), "flash_attn_3"),
    (("3 of 2025", "2", "4"), "flash_attn_3"),
]


@pytest.mark.parametrize("separate_folders", [False, True], ids=["in one folder", "in folders of their own"])
@pytest.mark.parametrize(("wheels", "name"), WHEELS)
def test_every_release_is_called_by_its_signature(monkeypatch, tmp_path, wheels, name, separate_folders):
    flash_stub.none_loaded(monkeypatch)
    for wheel in wheels:
        place = tmp_path / wheel if separate_folders else tmp_path
        flash_stub.unpack(place, wheel)
        monkeypatch.syspath_prepend(place)
    kernel_names = [kernel.name for kernel in KERNELS if kernel.refuses(on_cuda()) is None]
    assert ("flash_attn_2" in kernel_names) == ("2" in wheels)
    assert ("flash_attn_4" in kernel_names) == ("4" in wheels) or (separate_folders and {"2", "4"} <= {*wheels})
    kernel = choose_kernel(on_cuda(), name)
    for mask in (AttentionMask(window=(20, 0)), AttentionMask(documents=[0, 5, 8, 30, 64])):
        for got, exact in zip(run_block(kernel, mask), run_block(CpuFlash(), mask), strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "stub"),
    [
        ("flash_attn.flash_attn_interface", flash_stub.FA2),
        ("flash_attn_interface", flash_stub.FA3),
        ("flash_attn.cute.interface", flash_stub.FA4),
    ],
)
def test_the_emulation_has_the_signatures_of_the_real_package(monkeypatch, module, stub):
    monkeypatch.undo()
    if find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    real = pytest.importorskip(module)
    for name, function in vars(stub).items():
        names = [p.name for p in parameters(getattr(real, name))]
        assert names[: len(parameters(function))] == [p.name for p in parameters(function)]


def test_lengths_of_packed_pieces_are_copied_once_and_fake_ones_stay_in_their_mode():
    def lengths(*sizes):
        counts = tuple(size for size in sizes for _ in range(2))
        return Sequences(counts, counts, (None, None)).lengths(torch.zeros(()).device)

    first, equal, other = lengths(3, 5), lengths(3, 5), lengths(5, 3)
    assert first.queries is first.keys is equal.queries and other.queries is not first.queries
    assert first.queries.tolist() == [0, 3, 6, 11, 16] and first.queries.dtype == torch.int32
    for _ in range(2):
        with FakeTensorMode(), torch.device("cuda"):
            assert lengths(3, 5).queries.device.type == "cuda"
    assert lengths(3, 5).queries is first.queries
