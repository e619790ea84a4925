"""The calls that attention refuses: each row of a table has a call and the words that its ValueError must contain."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    AttentionShape,
    ContextParallel,
    Local,
    Method,
    Ring,
    Slice,
    TokenRing,
    Ulysses,
    UPipe,
    WallFacer,
    build_attention,
    build_comm_plan,
    reference_attention,
    sdpa_parallel,
    sequence,
)
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.attention.context_parallel.dense_masks import mask_of_tensor
from armillary.attention.internal import segment_sum
from armillary.attention.mask import Prefix
from armillary.attention.methods.wallfacer import Teams
from armillary.attention.post_training import completion_labels, dpo_loss, grpo_loss
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import mesh, value_errors

Table = list[tuple[Callable[[], object], *tuple[str, ...]]]
N = 8
ALONE = Axis.alone("ulysses")
CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
contiguous, zigzag = SequenceLayout.contiguous, SequenceLayout.zigzag


@dataclass
class Plain:
    """Projections without weights."""

    heads: int = 4
    key_heads: int = 2

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return x.new_zeros(*x.shape[:2], len(heads), 8)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.q(x, heads), self.q(x, heads)

    def parameters(self) -> list[Tensor]:
        return []


# -- masks ------------------------------------------------------------------------------------------------------------

documents, window = (lambda x: lambda: AttentionMask(documents=x)), (lambda x: lambda: AttentionMask(window=x))
tree, prefix, images = AttentionMask.tree, AttentionMask.prefix, AttentionMask.image_spans
slices, chunked, blocks, rows = AttentionMask.of_slices, AttentionMask.chunked, AttentionMask.blocks, AttentionMask.rows
SEEN = [[True, False], [True, True]]
TREE, PREFIX, IMAGES = tree((0, 8), (-1,)), prefix((0, 8), (1,)), images([range(2)])
OF_FIVE = [tree((0, 2, 5), (-1, 0)), prefix((0, 5), (2,)), AttentionMask(documents=(0, 5)), blocks([[True]], 8, 5)]
OF_FIVE = [*OF_FIVE, chunked(2, (0, 3, 5)), *[rows([mask]) for mask in OF_FIVE]]
SQUARE = torch.ones(N, N, dtype=torch.bool).tril()


def dense(attn_mask: Tensor) -> Callable[[], object]:
    return lambda: mask_of_tensor(attn_mask, 2, N)


MASKS: Table = [
    *[(documents(x), f"boundaries {x!r}") for x in ([[0, 3, 8], 5], [[0, 8], None], "08", 8, [], [1, 5], [0, 5, 5])],
    (documents([False, True]), "boundaries [False, True]"),
    *[(documents([[0, 8], x]), f"boundaries {x!r}") for x in ([], [0, 3.7, 8], [0, 0])],
    *[(documents(torch.tensor(x)), f"boundaries {x!r}") for x in ([0.0, 8.0], [0, 5, 4, 5])],
    (documents(torch.tensor(8)), "boundaries tensor 8"),
    (documents({0: 3, 3: 8}), "boundaries"),
    (documents(torch.zeros(2, 2, 2, dtype=torch.long)), "boundaries"),
    *[(window(x), f"window {x!r}") for x in (4, (2.0, 0), (True, False), (-1, 0), (1, 2, 3), ("1", "0"))],
    (lambda: AttentionMask(causal="no"), "causal='no'"),
    *[(lambda mask=mask: replace(mask, causal=False), "causal=False") for mask in (TREE, PREFIX, IMAGES)],
    (lambda: replace(TREE, documents=(0, 8)), "documents"),
    # slices
    (lambda: slices([Slice(range(4), range(4)), Slice(range(3, 6), range(2, 5))]), "range(0, 4)", "query 3 and key 2"),
    (lambda: slices([Slice(range(8), range(8), None, 0), Slice(range(8), range(8), 0, None)]), "query", "key"),
    (lambda: slices([Slice(range(0, 8, 2), range(8))]), "range(0, 8, 2)"),
    (lambda: slices([Slice(range(-1, 8), range(8))]), "range(-1, 8)"),
    (lambda: slices([Slice((0, 8), range(8))]), "(0, 8)"),
    (lambda: slices([Slice(range(8), range(8), 0.5)]), "0.5"),
    (lambda: slices([(range(8), range(8))]), "slice"),
    (lambda: slices([Slice(range(9), range(8))]).slices(8), "queries", "9", "8"),
    (lambda: slices([Slice(range(8), range(9))]).slices(8), "keys", "9", "8"),
    # trees
    (lambda: tree((1, 8), (-1,)), "(1, 8)"),
    (lambda: tree((0, 5, 5), (-1, 0)), "(0, 5, 5)"),
    (lambda: tree((0, 5, 8), (-1,)), "1 parents", "2 segments"),
    (lambda: tree((0, 5, 8), (0, 0)), "parent 0 of segment 0"),
    (lambda: tree((0, 5, 8), (-1, -2)), "parent -2 of segment 1"),
    (lambda: tree((0, 2, 4, 6, 8), (-1, 0, 0, 1)), "parent 1 of segment 3"),  # 1 ended when its sibling 2 began
    (lambda: tree((0, 2, 4), (-1, 0.0)), "0.0"),
    (lambda: tree((0, 2, 4), (-1, 0), window=(-1, 0)), "window (-1, 0)"),
    # prefixes
    (lambda: prefix((0, 3, 8), (2,)), "1 prefixes", "2 documents"),
    (lambda: prefix((0, 3, 8), (4, 0)), "prefix of 4", "document 0", "3"),
    (lambda: prefix((0, 3, 8), (-1, 0)), "-1"),
    (lambda: prefix((0, 8), (1.0,)), "1.0"),
    (lambda: AttentionMask(pattern=Prefix((3,))).slices(8, 4), "8 queries", "4 keys"),
    (lambda: AttentionMask(pattern=Prefix((3, 1))).slices(8), "2 prefixes", "1 documents"),
    # chunks
    (lambda: chunked(0), "size=0"),
    (lambda: chunked(2.0), "size=2.0"),
    (lambda: chunked(4, origin="start"), "origin='start'", "document, row"),
    # spans of images
    (lambda: images([range(2, 5), range(4, 6)]), "range(2, 5)", "range(4, 6)"),
    (lambda: images([range(2, 5)], (0, 4, 8)), "range(2, 5)", "4"),
    (lambda: images([range(6, 9)], (0, 4, 8)), "range(6, 9)"),
    (lambda: images([range(6, 9)]).slices(8), "range(6, 9)", "8 tokens"),
    (lambda: images([range(0, 8, 2)]), "range(0, 8, 2)"),
    (lambda: images([(2, 5)]), "(2, 5)"),
    # blocks
    (lambda: blocks(SEEN, 0), "block=0"),
    (lambda: blocks([[True, False]], 4).slices(8), "1 rows", "8 tokens"),
    (lambda: blocks([True, False], 4), "(2,)"),
    (lambda: blocks([[1, 0], [1, 1]], 4), "bool"),
    (lambda: blocks([[True], [True, False]], 4), "bool"),
    (lambda: blocks(SEEN, 4, 9), "9"),
    (lambda: blocks(SEEN, 4, 7).slices(8), "7", "8"),
    (lambda: blocks(SEEN, 4).slices(9), "9 tokens"),
    (lambda: blocks(SEEN, 4).slices(8, 12), "columns", "12"),
    (lambda: blocks(SEEN, 4, causal="no"), "causal='no'"),
    # rows
    (lambda: rows([]), "no masks"),
    (lambda: rows([AttentionMask(documents=[[0, 4], [0, 2, 4]])]), "row 0"),
    (lambda: rows([CAUSAL, rows([CAUSAL])]), "row 1"),
    (lambda: rows([None]), "None"),
    (lambda: rows([CAUSAL] * 3).check(8, 8, 2), "3 rows", "2"),
    (lambda: rows([CAUSAL, AttentionMask(documents=(0, 9))]).check(8, 8, 2), "9", "8"),
    # sequences of another length, and other numbers of keys
    *[(lambda f=f: f(6), "5", "6") for mask in OF_FIVE for f in (mask.slices, mask.pairs, mask.positions)],
    (lambda: AttentionMask(documents=[[0, 4, 10], [0, 10]]).pairs(11, 1), "row 1", "10", "11"),
    *[(lambda mask=mask: mask.slices(8, 9), "8", "9") for mask in (TREE, PREFIX, IMAGES, chunked(4))],
    # masks without segments
    *[(lambda mask=mask: mask.segments(8), "mask") for mask in (FULL, AttentionMask(window=(3, 0)), chunked(4))],
    # tensors of scaled_dot_product_attention
    (dense(SQUARE[:4, :4]), "8", "AttentionMask"),
    (dense(SQUARE[:4]), "8", "AttentionMask"),
    (dense(torch.stack([SQUARE, SQUARE.T])[None]), "heads", "AttentionMask"),
    (dense(SQUARE.expand(3, 1, -1, -1)), "3 rows", "2"),
    (dense(torch.where(SQUARE, 0.5, -torch.inf)), "bias", "0.5"),
    (dense(torch.where(SQUARE, 0.0, torch.nan)), "bias", "nan"),
    (dense(torch.zeros(N, N, requires_grad=True)), "gradient"),
    (dense(SQUARE.long()), "torch.int64"),
    (dense(torch.full((N, N), torch.finfo(torch.float32).min)), "alike"),
    (dense(SQUARE[None, None, None]), "sequence"),
    (lambda: mask_of_tensor(torch.rand(400, 400, generator=torch.Generator().manual_seed(0)) > 0.5, 1, 400), "16384"),
]  # fmt: skip

# -- methods and plans ------------------------------------------------------------------------------------------------


def shape(heads: int = 8, key_heads: int = 8, shards: int = 4, length: int = 32) -> AttentionShape:
    return AttentionShape.of(
        zigzag(length, shards), FULL, heads=heads, kv_heads=key_heads, head_dim=16, dtype=torch.float32
    )


def plan(name: str, ring: int = 4, ulysses: int = 1, of: AttentionShape | None = None, **options):
    return lambda: build_comm_plan(name, of or shape(), ring, ulysses, **options)


NO_AXES = [(Ring, None), (Ring, "ring"), (TokenRing, 4), (AllGatherKV, object()), (Ulysses, None), (UPipe, {})]
METHODS: Table = [
    *[(lambda make=make, axis=axis: make(axis), type(axis).__name__) for make, axis in NO_AXES],
    (lambda: WallFacer(["ring"], team=1), "list"),
    (lambda: Ulysses(ALONE, inner=Ring), "inner=Ring"),
    (lambda: Ulysses(ALONE, inner="ring"), "inner=str"),
    (lambda: UPipe(ALONE, inner=ALONE), "inner=Axis"),
    (lambda: UPipe(ALONE, inner=Ulysses(ALONE)), "inner"),
    (lambda: UPipe(ALONE, heads_per_stage=0), "heads_per_stage=0"),
    (lambda: UPipe(ALONE, heads_per_stage=2.0), "heads_per_stage=2.0"),
    (lambda: UPipe(ALONE, prefetch="no"), "prefetch='no'"),
    (lambda: Ring(ALONE, backward="both"), "backward='both'", "auto, keys, queries"),
    (lambda: WallFacer(ALONE, team=2), "team=2"),
    (lambda: WallFacer(ALONE, team=1.0), "team=1.0"),
    (lambda: WallFacer(ALONE, team=1, placement="near"), "placement='near'", "collect_intra, p2p_intra"),
    (lambda: WallFacer(ALONE, team=1, backward="k"), "backward='k'"),
    (lambda: WallFacer(ALONE, team=1, gather_keys=1), "gather_keys=1"),
    (lambda: Teams(8, 3, "collect_intra"), "team=3", "8", "[1, 2]"),
    (lambda: Teams(16, 0, "collect_intra"), "team=0", "[1, 2, 4]"),
    (lambda: Teams(8, 2, "collect_intra").layout(7, "balanced"), "7 tokens", "8 shards"),
    (lambda: Local().layout(8, "spiral"), "'spiral'", "zigzag"),
    (lambda: Local().layout(8.0), "length=8.0"),
    (lambda: Local().layout(8, "balanced", mask=True), "mask", "bool"),
    (lambda: build_attention("ring", None), "mesh", "NoneType"),
    (lambda: build_attention(None, None), "None"),
    (lambda: build_attention("rung", None), "'rung'"),
    (lambda: ContextParallel("ring"), "mesh"),
    (lambda: ContextParallel(Local(), None, "shard"), "mesh"),
    # plans
    (lambda: build_comm_plan(3, None), "3"),
    (plan("rings"), "'rings'"),
    (plan("ring", team=2), "ring", "team=2", "wallfacer"),
    (plan("usp", ulysses=2, placement="p2p_intra"), "usp", "placement='p2p_intra'", "wallfacer"),
    (plan("usp", ulysses=2, heads_per_stage=2), "usp", "heads_per_stage=2", "upipe"),
    (plan("wallfacer", team=3), "team=3", "4", "1, 2"),
    (plan("wallfacer", placement="near"), "placement='near'", "collect_intra, p2p_intra"),
    (plan("ring", backward="values"), "backward='values'", "auto, keys, queries"),
    (plan("upipe+ring", ulysses=2, heads_per_stage=3), "heads_per_stage=3", "2"),
    (plan("usp", ulysses=16), "8 ", "16 "),
    (plan("ring", ulysses=2), "ring", "'ulysses'", "2 "),
    (plan("ring", ring=2), "layout", "4 ", "2 "),
    (plan("ring+ring", of=shape(shards=8), ring=8, nodes=3), "nodes=3"),
    (plan("ring", of=shape(shards=8), ring=8, nodes=2), "nodes=2"),
    (lambda: shape(key_heads=3), "8 ", "3"),
    (lambda: replace(shape(), key_layout=zigzag(32, 2)), "4 ", "2"),
]

# -- calls on one rank ------------------------------------------------------------------------------------------------

Q, KV = (2, N, 4, 8), (2, N, 2, 8)


def zeros(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=dtype) for name, size in shapes.items()}


def call(attend: Method | Callable = Local(), **wrong) -> Callable[[], object]:  # noqa: B008
    arguments = zeros(q=Q, k=KV, v=KV) | {"mask": CAUSAL} | wrong
    return lambda: attend(**arguments)


def latents(**wrong: tuple[int, ...]) -> Callable[[], object]:
    """Calls attention on rotary keys of 4 numbers and latents of 16."""
    return call(
        **zeros(**{"q": (2, N, 8, 12), "k": (2, N, 1, 4), "v": (2, N, 1, 16), "expansion": (4, 16, 16)} | wrong)
    )


def projected(attend: Method = UPipe(ALONE), **wrong) -> Callable[[], object]:  # noqa: B008
    arguments = {"x": torch.zeros(2, N, 16), "projections": Plain(), "mask": CAUSAL} | wrong
    return lambda: attend.projected(**arguments)


def under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call(v=torch.zeros(KV, dtype=torch.float64))()


def oracle(**wrong) -> Callable[[], object]:
    return call(reference_attention, **wrong)


OPTIONS = [
    ({"mask": None}, "mask", "None", "AttentionMask(causal=False)"),
    ({"mask": torch.ones(N, N, dtype=torch.bool)}, "mask is a Tensor"),
    ({"mask": "causal"}, "mask", "'causal'"),
    ({"mask": AttentionMask(documents=[0, 3, 9])}, "documents", "row 0", "9", "8"),
    ({"mask": AttentionMask(documents=[[0, 8]] * 3)}, "documents", "3", "2"),
    ({"layout": "zigzag"}, "layout is 'zigzag'", 'attend.layout(length, "zigzag")'),
    ({"layout": [range(8)]}, "layout", "list"),
    ({"layout": contiguous(N, 2)}, "layout", "2 ", "1"),
    ({"scale": math.nan}, "scale=nan"),
    ({"scale": "1"}, "scale='1'"),
    ({"scale": 1j}, "scale=1j"),
    ({"scale": torch.tensor(0.3)}, "scale=tensor"),
    ({"softcap": math.inf}, "softcap=inf"),
    ({"softcap": 10**400}, "softcap=1000"),
    ({"softcap": 0}, "softcap 0"),
    ({"softcap": "50"}, "softcap='50'"),
    ({"softcap": torch.tensor(50.0)}, "softcap=tensor 50.0"),
    ({"softcap": 2.0, "kernel": "cpu_flash"}, "softcap", "cpu_flash", "dense"),
    ({"sinks": np.zeros(4)}, "sinks is a ndarray", "torch.as_tensor"),
    *[({"sinks": torch.zeros(s)}, f"sinks {s}", "4 query heads") for s in ((3,), (), (2, N, 4))],
    ({"sinks": torch.zeros(2, 4, dtype=torch.long)}, "sinks", "torch.int64"),
    ({"kernel": "abacus"}, "'abacus'", "cpu_flash"),
    ({"kernel": 5}, "kernel=5", "cpu_flash"),
]
CALLS: Table = [
    *[(call(**wrong), *words) for wrong, *words in OPTIONS],
    (call(key_layout="contiguous"), "key_layout is 'contiguous'", 'attend.layout(length, "contiguous")'),
    (call(return_lse="no"), "return_lse='no'"),
    (call(q=np.zeros(Q)), "q is a ndarray", "torch.as_tensor"),
    (call(k=None), "k ", "NoneType"),
    (call(v=[[1.0]]), "v ", "list"),
    (call(q=torch.zeros(Q).to_sparse()), "q ", "torch.sparse_coo"),
    (call(q=torch.nested.nested_tensor([torch.zeros(N, 4, 8)])), "q is a nested tensor", "documents="),
    (call(**zeros(q=(2, N, 4, 0), k=(2, N, 2, 0), v=(2, N, 2, 0))), "head dims"),
    (call(**zeros(v=(2, N, 2, 0))), "head dims"),
    (call(**zeros(q=(2, N, 0, 8))), "head"),
    (call(**zeros(k=(2, N, 0, 8), v=(2, N, 0, 8))), "head"),
    (call(**zeros(q=(2, N, 8))), "(2, 8, 8)", "[batch, tokens, heads, head dim]"),
    (call(**zeros(q=(2, N, 3, 8))), "3 query", "2"),
    (call(**zeros(k=(2, N, 2, 6))), "(2, 8, 2, 6)"),
    (call(**zeros(v=(2, N, 1, 8))), "(2, 8, 2, 8)", "(2, 8, 1, 8)"),
    (call(**zeros(k=(3, N, 2, 8), v=(3, N, 2, 8))), "(3, 8, 2, 8)"),
    (call(**zeros(q=(2, 4, N, 8), k=(2, 2, N, 8), v=(2, 2, N, 8))), "transpose(1, 2)"),
    (call(**dict.fromkeys("qkv", torch.zeros(2, 4, N, 8)), layout=contiguous(N, 1)), "8 ", "4", "transpose(1, 2)"),
    (call(**zeros(torch.int32, q=Q, k=KV, v=KV)), "torch.int32"),
    (call(v=torch.zeros(KV, dtype=torch.bfloat16)), "dtype", "torch.float32", "torch.bfloat16"),
    (under_autocast, "dtype", "torch.float64"),
    # latents: a rotary key for each head, latents of another size, a rotary key of more than D numbers, no rows for
    # values, heads that K does not divide, other tokens, and an expansion of two dims
    (latents(k=(2, N, 2, 4), v=(2, N, 2, 16)), "expansion", "(2, 8, 2, 4)"),
    (latents(v=(2, N, 1, 15)), "expansion", "latents of 16"),
    (latents(k=(2, N, 1, 13)), "expansion", "(2, 8, 1, 13)"),
    (latents(expansion=(4, 8, 16)), "expansion (4, 8, 16)", "Dv"),
    (latents(expansion=(3, 16, 16)), "8 query heads", "3"),
    (latents(k=(2, 7, 1, 4)), "(2, 7, 4, 12)", "agree"),
    (latents(expansion=(4, 16)), "expansion (4, 16)", "[K, D - Dr + Dv, L]"),
    # hidden states
    *[(projected(**wrong), *words) for wrong, *words in OPTIONS],
    (projected(x=np.zeros((2, N, 16))), "x ", "ndarray"),
    (projected(x=torch.zeros(N, 16)), "x (8, 16)", "[batch, tokens, model dim]"),
    (projected(projections=None), "projections", "None", "heads, key_heads, q, kv, parameters"),
    (projected(projections=lambda x: x), "projections", "function"),
    # the oracle
    (oracle(mask=None), "mask", "None"),
    (oracle(mask=torch.ones(8)), "mask", "Tensor"),
    (oracle(softcap=math.inf), "softcap"),
    (oracle(sinks=torch.zeros(3)), "sinks (3,)", "4 query heads"),
    (oracle(**zeros(q=(N, 4, 8))), "(8, 4, 8)"),
    (oracle(**zeros(v=(2, 9, 2, 8))), "(2, 9, 2, 8)"),
    (oracle(**zeros(v=(2, N, 4, 8))), "v (2, 8, 4, 8)"),
    (oracle(**zeros(k=(2, N, 2, 6))), "(2, 8, 2, 6)"),
    (oracle(**zeros(k=(2, N, 3, 8), v=(2, N, 3, 8))), "4 ", "3 "),
    (oracle(query_positions=torch.arange(7)), "query_positions", "(7,)", "(8,)"),
    (oracle(mask=AttentionMask(documents=(0, 7))), "position 7", "7"),
    (oracle(mask=AttentionMask(documents=((0, N),) * 3)), "documents", "3", "2"),
]  # fmt: skip

# -- scaled_dot_product_attention -------------------------------------------------------------------------------------


def sdpa(block: dict | None = None, **wrong) -> Callable[[], object]:
    """Calls scaled_dot_product_attention in a `sequence` block; returns the call."""
    arguments = zeros(query=(2, 4, N, 8), key=(2, 4, N, 8), value=(2, 4, N, 8)) | wrong

    def run() -> None:
        with sequence(**{"layout": contiguous(N, 1)} | (block or {})), sdpa_parallel(Local()):
            F.scaled_dot_product_attention(**arguments)

    return run


def encoder(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0).train(train)
    with torch.set_grad_enabled(train), sdpa_parallel(Local()):
        layer(torch.zeros(1, 5, 16))


def enter(**block) -> Callable[[], object]:
    def run() -> None:
        with sequence(**block):
            F.scaled_dot_product_attention(*[torch.zeros(1, 2, N, 8)] * 3)

    return run


HALVES = {"documents": (0, 3, N)}
SDPA: Table = [
    (sdpa(attn_mask=torch.ones(9, 5, dtype=torch.bool)), "attn_mask (9, 5)", "8 tokens"),
    (sdpa(dropout_p=0.1), "dropout"),
    (sdpa(**zeros(key=(2, 2, N, 8), value=(2, 2, N, 8))), "enable_gqa=True"),
    (sdpa(**zeros(query=(2, N, 8), key=(2, N, 8), value=(2, N, 8))), "4 dims"),
    (sdpa(**zeros(key=(2, 4, 7, 8), value=(2, 4, 7, 8))), "tokens"),
    (sdpa(attn_mask=SQUARE, is_causal=True), "is_causal"),
    (sdpa(HALVES, attn_mask=SQUARE), "documents"),
    (sdpa({"mask": CAUSAL}, attn_mask=SQUARE), "mask"),
    (sdpa({"mask": CAUSAL}), "is_causal=False"),
    (sdpa({"mask": FULL}, is_causal=True), "is_causal=True"),
    (sdpa({"mask": CAUSAL} | HALVES), "documents", "mask"),
    (sdpa({"mask": AttentionMask(documents=(0, 7))}), "end at 7"),
    (sdpa({"mask": "causal"}), "mask", "str", "AttentionMask"),
    (lambda: encoder(True), "MultiheadAttention"),
    (lambda: encoder(False), "MultiheadAttention"),
    (enter(layout=contiguous(6, 1), documents=[0, 5]), "end at 5"),
    (enter(layout=contiguous(6, 1), documents=[[0, 6], [0, 5]]), "end at 5"),
    (enter(**HALVES), "`sequence`"),
]

# -- losses of post-training ------------------------------------------------------------------------------------------

LOGPROBS, NUMBERS = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)
IDS, BRANCHES = torch.zeros(1, 12, dtype=torch.long), AttentionMask.tree((0, 4, 12), (-1, 0))


def dpo(pairs: Tensor = torch.tensor([[0, 1]]), reference: Tensor = LOGPROBS) -> Callable[[], object]:  # noqa: B008
    return lambda: dpo_loss(LOGPROBS, reference, NUMBERS, pairs)


def grpo(advantages: Tensor = torch.zeros(1), **wrong) -> Callable[[], object]:  # noqa: B008
    return lambda: grpo_loss(LOGPROBS, NUMBERS, advantages, **wrong)


LOSSES: Table = [
    (lambda: segment_sum(LOGPROBS, NUMBERS[:1], 1), "sequences"),
    (lambda: segment_sum(LOGPROBS, LOGPROBS, 1), "sequences"),
    (lambda: segment_sum(NUMBERS, NUMBERS, 1), "values"),
    (lambda: segment_sum(LOGPROBS, NUMBERS, -1), "count"),
    (lambda: segment_sum(LOGPROBS, NUMBERS, 1, gradients="multiplied"), "gradients"),
    (dpo(torch.zeros(0, 2, dtype=torch.long)), "pairs"),
    (dpo(torch.tensor([[0, -1]])), "pairs"),
    (dpo(torch.tensor([[False, True]])), "pairs"),
    (dpo(reference=LOGPROBS[:1]), "reference_logprobs"),
    (grpo(beta=0.1), "reference_logprobs"),
    (grpo(torch.zeros(1, 1)), "advantages"),
    (grpo(normalize=0.0), "normalize"),
    (lambda: completion_labels(IDS, BRANCHES, contiguous(8, 2)), "layout"),
    (lambda: completion_labels(IDS, BRANCHES, trained=[[True]]), "trained"),
    (lambda: completion_labels(IDS, BRANCHES, trained=[[False, True]] * 2), "trained"),
    (lambda: completion_labels(IDS.expand(3, -1), AttentionMask.rows([BRANCHES] * 2)), "mask"),
]

ONE_RANK = [*MASKS, *METHODS, *CALLS, *SDPA, *LOSSES]
NAMES = [f"{number} {words[0]}" for number, (_, *words) in enumerate(ONE_RANK)]


@pytest.mark.parametrize(("refused", "words"), [(row[0], row[1:]) for row in ONE_RANK], ids=NAMES)
def test_refusals_on_one_rank(refused, words):
    (message,) = value_errors([refused])
    assert all(word in message for word in words), message


# -- on several ranks -------------------------------------------------------------------------------------------------


def four_ranks() -> Table:
    return [*compositions(), *calls(), *styles(), *context_parallel()]


def compositions() -> Table:
    one, two, over = mesh(ring=2, ulysses=2), mesh(ring=4), mesh(nodes=2, devices=2)
    ring, ulysses, all_ring, nodes, devices = one["ring"], one["ulysses"], two["ring"], over["nodes"], over["devices"]
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))["all"]
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
    turned = DeviceMesh("cpu", [[0, 2], [3, 1]], mesh_dim_names=("u", "r"))  # on some of the ranks
    share = "share ranks"
    return [
        (lambda: Ulysses(ulysses, inner=Ring(ulysses)), share),
        (lambda: UPipe(ring, inner=AllGatherKV(ring)), share),
        (lambda: Ulysses(all_ring, inner=WallFacer(all_ring, team=2)), share),
        (lambda: Ulysses(all_ring, inner=Ring(flat)), share),
        (lambda: Ulysses(ulysses, inner=Ring(all_ring)), share),
        (lambda: Ulysses(ring, inner=Ulysses(ulysses, inner=Ring(ring))), share),
        (lambda: Ulysses(ulysses, inner=Ring(crossed["b"])), "across"),
        (lambda: Ulysses(turned["u"], inner=Ring(ring)), "across"),
        (lambda: Ring(one["ring", "ulysses"]), "one mesh axis", "2"),
        (lambda: Ring(ring.get_group()), "DeviceMesh.from_group"),
        (lambda: UPipe(all_ring, heads_per_stage=6), "6", "4"),
        *[(lambda i=i: Ring(nodes, inner=i), type(i).__name__) for i in (Ulysses(devices), WallFacer(devices, 1), 3)],
        (lambda: Ring(nodes, inner=UPipe(devices)), "UPipe"),
        (lambda: Ring(nodes, inner=TokenRing), "TokenRing"),
        (lambda: Ring(nodes, inner=TokenRing(nodes)), "nodes"),
        (lambda: build_attention("usp", flat), "ulysses=None", "one axis of 4 ranks"),
        (lambda: build_attention("ring", over), "nodes"),
        (lambda: build_attention("ring+ring", two), "ring"),
        (lambda: build_attention("ring+ring", over, team=2), "team=2"),
        (lambda: build_attention("ring+ring", over["nodes", "ulysses"]), "devices"),
        (lambda: build_attention("ring", two, team=2), "ring", "team=2"),
        (lambda: build_attention("ulysses", one, backward="keys"), "ulysses", "backward='keys'"),
        (lambda: build_attention("all_gather", two, heads_per_stage=2), "all_gather", "heads_per_stage=2"),
    ]


def calls() -> Table:
    """Arguments that only fit together, or not, on several ranks: 24 tokens, 6 on each rank."""
    both, three = mesh(ring=2, ulysses=2), contiguous(24, 3)
    usp = Ulysses(both["ulysses"], inner=Ring(both["ring"]))
    heads = mesh(ulysses=4)["ulysses"]
    ring, ulysses, staged = Ring(mesh(ring=4)["ring"]), Ulysses(heads), UPipe(heads)
    table = Table()
    for attend in (ring, ulysses, usp):
        layout = attend.layout(24, "zigzag")

        def on_ranks(attend=attend, layout=layout, tokens=6, keys=6, heads=(8, 4), **wrong) -> Callable[[], object]:
            tensors = zeros(q=(2, tokens, heads[0], 8), k=(2, keys, heads[1], 8), v=(2, keys, heads[1], 8))
            return call(attend, **tensors | {"layout": layout} | wrong)

        table += [
            (on_ranks(layout=three), "3 shards", str(attend.sequence_shards)),
            (on_ranks(layout=None), "layout"),
            (on_ranks(tokens=7, keys=7), "7", "6"),
            (on_ranks(keys=8), "8", "6"),
            (on_ranks(heads=(8, 3)), "8", "3"),
            (on_ranks(key_layout=three), "3 shards", str(attend.sequence_shards)),
            (on_ranks(key_layout=attend.layout(48, "zigzag")), "12", "6"),
            (on_ranks(mask=AttentionMask(documents=(0, 9, 31))), "31", "24"),
            (on_ranks(mask=AttentionMask.tree((0, 9, 31), (-1, 0))), "31", "24"),
        ]

    def hidden(tokens: int = 6, heads: tuple[int, int] = (8, 4), **wrong) -> Callable[[], object]:
        options = {"x": torch.zeros(2, tokens, 16), "projections": Plain(*heads), "layout": staged.layout(24)}
        return projected(staged, **options | wrong)

    q = torch.zeros(1, 2, 6, 8)

    def without_layout() -> None:
        with sdpa_parallel(usp):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)

    few = zeros(q=(2, 6, 3, 8), k=(2, 6, 3, 8), v=(2, 6, 3, 8))
    return [
        *table,
        (call(ulysses, **few, layout=ulysses.layout(24)), "3 ", "4", "heads"),
        (lambda: usp.layout(24, "spiral"), "spiral", "zigzag"),
        (hidden(heads=(3, 3)), "3 ", "4", "heads"),
        (hidden(tokens=7), "7", "6"),
        (hidden(layout=None), "layout"),
        (hidden(mask=AttentionMask(documents=(0, 9, 31))), "31", "24"),
        (without_layout, "sequence(layout=attend.layout(length))"),
    ]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def styles() -> Table:
    axes = mesh(ring=2, ulysses=2)
    attend, full = Ulysses(axes["ulysses"], inner=Ring(axes["ring"])), axes["ring", "ulysses"]
    layout, x, parts = attend.layout(24), torch.zeros(2, 6, 32), AttentionMask(documents=(0, 7, 16, 24))

    def styled(style: ContextParallelStyle, module: nn.Module | None = None) -> nn.Module:
        return parallelize_module(module or Attends(), full, style)

    def within(block: dict, **style) -> Callable[[], object]:
        def run() -> None:
            with sequence(**block):
                styled(ContextParallelStyle(attend, **style))(x)

        return run

    rows = DTensor.from_local(x, full, [Shard(0), Shard(1)], run_check=False)
    with_layout, other, one = ContextParallelStyle(attend, layout=layout), attend.layout(24, "contiguous"), (0, 24)
    return [
        (lambda: ContextParallelStyle(Ring), "Ring"),
        (lambda: ContextParallelStyle(attend, layout=4), "layout"),
        (lambda: ContextParallelStyle(attend, mask="causal"), "AttentionMask"),
        (lambda: parallelize_module(Attends(), axes["ring"], ContextParallelStyle(attend)), "('ring', 'ulysses')"),
        (lambda: styled(ContextParallelStyle(Ring(axes["ring"]))), "('ring', 'ulysses')"),
        (lambda: styled(ContextParallelStyle(attend))(x), "4 ranks"),
        (lambda: styled(with_layout, nn.Linear(32, 32))(x), "scaled_dot_product_attention"),
        (lambda: styled(with_layout)(rows), "Shard(1)"),
        (within({"layout": other}, layout=layout), "ContextParallelStyle(layout="),
        (within({"documents": parts.documents}, layout=layout, mask=AttentionMask(documents=one)), "(0, 7, 16, 24)"),
        (within({"layout": layout, "mask": AttentionMask(window=(5, 0))}, layout=layout, mask=parts), "sequence(mask="),
        (within({"layout": layout, "documents": parts.documents, "mask": AttentionMask.chunked(4)}), "(0, 7, 16, 24)"),
    ]


def context_parallel() -> Table:
    axes, ids = mesh(ring=4), torch.arange(20)[None]
    cp, other, model = ContextParallel("ring", axes), ContextParallel("ring", axes), nn.Sequential(nn.Linear(4, 4))
    batch, longer = cp.shard(ids), cp.shard(torch.arange(30)[None])
    logits, q = torch.zeros(1, 5, 32), torch.zeros(1, 5, 2, 4)
    hooked = DistributedDataParallel(nn.Linear(4, 4))
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
    branches = {"mask": AttentionMask.tree([0, 8, 20], [-1, 0]), "position_ids": ids}
    padded = {"shift_labels": torch.full_like(ids, -100), "attention_mask": ids < 15}
    return [
        (lambda: ContextParallel("ring", axes, data="other"), "data=['other']"),
        (lambda: ContextParallel("ring", axes, data=("ring",)), "data=['ring']"),
        (lambda: other.loss(logits, batch), "cp.shard"),
        (lambda: cp.loss(logits, None), "NoneType"),
        (lambda: cp.loss(logits, longer), "logits (1, 5, 32)"),
        (lambda: cp.loss(logits.mean(), batch), "batch.inputs"),
        (lambda: cp.loss(None, batch), "next token"),
        (lambda: batch.attend(q, q, q, layout=longer.layout), "layout="),
        (lambda: cp.shard(ids, mask=AttentionMask.of_slices([Slice(range(20), range(20))])), "shift_labels"),
        (lambda: cp.shard(ids, mask=AttentionMask(documents=[0, 5, 20]), documents=[0, 7, 20]), "mask", "documents"),
        (lambda: cp.shard(ids, **branches, **padded), "attention_mask"),
        (lambda: cp.reduce_gradients(hooked), "DDP"),
        (lambda: cp.reduce_gradients(sharded), "FSDP2"),
        (lambda: cp.prepare(model), "Sequential"),
    ]


def eight_ranks() -> Table:
    return [*dtensors(), *projected_dtensors()]


def dtensor(over: DeviceMesh, placements: Sequence, *sizes: int) -> DTensor:
    return distribute_tensor(torch.zeros(sizes), over, placements, src_data_rank=None)


def dtensors() -> Table:
    built, four, eight = mesh(ring=2, ulysses=2, tp=2), mesh(ring=4, tp=2), mesh(ring=4, ulysses=2)
    three, ring = built["ring", "ulysses", "tp"], Ring(built["ring"])
    usp, other = (Ulysses(each["ulysses"], inner=Ring(each["ring"])) for each in (built, eight))
    everywhere = [Replicate()] * 3

    def of(*placements, heads: int = 8) -> DTensor:
        return dtensor(three, placements, 2, 16, heads, 16)

    def on_ranks(attend: Method, *qkv: Tensor, length: int = 16, **options) -> Callable[[], object]:
        q, k, v = qkv if len(qkv) == 3 else qkv * 3
        return call(attend, q=q, k=k, v=v, layout=attend.layout(length, kind="contiguous"), **options)

    def sinks(*placements, sizes: tuple[int, ...] = (2, 8)) -> DTensor:
        return dtensor(three, placements, *sizes)

    placed = (Shard(1), Shard(1), Shard(2))
    x, rows = of(*placed), of(Shard(1), Replicate(), Shard(2))
    ten = dtensor(four["ring", "tp"], [Shard(1), Shard(2)], 2, 10, 8, 16)
    one_head, local = of(*placed, heads=1), x.to_local()
    return [
        (on_ranks(usp, x, local, x), "q DTensor, k local, v DTensor"),
        (on_ranks(usp, x, x, rows), "placed alike"),
        (on_ranks(usp, rows), "q is Replicate() on axis 'ulysses'", "[2, 16, 8, 16]", "Shard(dim=1)"),
        (on_ranks(ring, x), "q is Shard(dim=1) on axis 'ulysses'", "over axis 'ring'"),
        (on_ranks(usp, of(Shard(1), Shard(1), Shard(3))), "q is Shard(dim=3) on axis 'tp'"),
        (on_ranks(usp, of(*placed, heads=3)), "q is DTensor [2, 16, 3, 16]"),
        (on_ranks(usp, x, one_head, one_head), "k is DTensor [2, 16, 1, 16]"),
        (on_ranks(Ring(four["ring"]), ten, length=10), "(3, 3, 2, 2) over axis 'ring'", "10 as (3, 3, 3, 1)"),
        (on_ranks(usp, x, length=20), "16 as (4, 4, 4, 4)"),
        (on_ranks(usp, x, sinks=sinks(*everywhere, sizes=(8,))), "sinks", "with q DTensor"),
        (on_ranks(usp, x, sinks=sinks(Replicate(), Replicate(), Shard(0))), "[Replicate(), Replicate(), Shard(dim=1)]"),
        (on_ranks(usp, x, sinks=sinks(Replicate(), Replicate(), Shard(1), sizes=(2, 6))), "sinks (2, 3)"),
        (on_ranks(usp, local, sinks=sinks(*everywhere, sizes=(8,))), "q local, k local, v local", "sinks DTensor"),
        (on_ranks(other, x), "other ranks"),
    ]


class Linear(Plain):
    """Projections by one weight, 8 for each head."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(1, 1)
        self.weight = weight

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return F.linear(x, self.weight).unsqueeze(2)

    def parameters(self) -> list[Tensor]:
        return [self.weight]


def projected_dtensors() -> Table:
    built = mesh(ring=4, tp=2)
    over, ring = built["ring", "tp"], Ring(built["ring"])
    everywhere, on_tokens, on_heads = (Replicate(),) * 2, (Shard(1), Replicate()), (Replicate(), Shard(0))
    ulysses = mesh(ulysses=8)["ulysses"]

    def hidden(x=on_tokens, weight=everywhere, length=16, kind="contiguous", **options) -> Callable[[], object]:
        x = x if isinstance(x, Tensor) else dtensor(over, x, 2, length, 12)
        weight = weight if isinstance(weight, Tensor) else dtensor(over, weight, 8, 12)
        return projected(ring, x=x, projections=Linear(weight), layout=ring.layout(length, kind), **options)

    sinks, x = dtensor(over, everywhere, 2), dtensor(over, on_tokens, 2, 16, 12)
    pending = DTensor.from_local(torch.zeros(8, 12), over, [Replicate(), Partial()], run_check=False)
    weight = "parameter 0 of projections is "
    return [
        (hidden(everywhere), "x is Replicate() on axis 'ring' of DTensor [2, 16, 12]", "Shard(dim=1)"),
        (
            hidden([Shard(1), Shard(2)]),
            "x is Shard(dim=2) on axis 'tp'",
            "over axis 'ring'",
            "Shard(dim=0) or Replicate()",
        ),
        (hidden(length=10, kind="zigzag"), "(3, 3, 2, 2) over axis 'ring'", "10 as (3, 3, 3, 1)"),
        (hidden(weight=(Shard(0), Replicate())), f"{weight}Shard(dim=0) on axis 'ring' of DTensor [8, 12]"),
        (hidden(weight=pending), f"{weight}Partial(sum) on axis 'tp'"),
        (hidden(weight=dtensor(over, on_heads, 7, 12)), f"{weight}DTensor [7, 12]", "2"),
        (hidden(weight=dtensor(ulysses, [Replicate()], 8, 12)), f"{weight}DTensor [8, 12]", "ulysses", "x is DTensor"),
        (hidden(weight=on_heads, sinks=sinks), "sinks", "[Replicate(), Shard(dim=0)]"),
        (hidden(x.to_local(), sinks=sinks), "x local, sinks DTensor"),
        (lambda: ring.check_projected(x, Linear(pending), mask=CAUSAL), "x is a DTensor"),
    ]


def missing_words(table: Callable[[], Table], sent: int) -> list[tuple[str, str]]:
    """Returns the words that errors lack, each with the error; asserts that calls send no other number of bytes."""
    rows = table()
    messages = value_errors([refused for refused, *_ in rows], sent)
    pairs = [(word, message) for (_, *words), message in zip(rows, messages, strict=True) for word in words]
    return [(word, message) for word, message in pairs if word not in message]


# Three calls of `cp.shard` compare their arguments with those of three ranks before they raise.
@pytest.mark.parametrize(("ranks", "table", "sent"), [(4, four_ranks, 3 * 3 * 80), (8, eight_ranks, 0)])
def test_refusals_on_every_rank(worlds, ranks, table, sent):
    assert worlds(ranks).run(missing_words, table, sent) == [[]] * ranks


# -- values that are accepted -----------------------------------------------------------------------------------------


def test_arguments_of_masks_are_kept_as_plain_numbers():
    accepted = [
        ("documents", np.array([0, 3, 8]), (0, 3, 8)),
        ("documents", [0, torch.tensor(3), np.int64(8)], (0, 3, 8)),
        ("documents", range(0, 9, 4), (0, 4, 8)),
        ("documents", [np.array([0, 8]), torch.tensor([0, 4, 8]), (0, 1, 8)], ((0, 8), (0, 4, 8), (0, 1, 8))),
        ("window", torch.tensor([2, 0]), (2, 0)),
        ("window", [torch.tensor(2), None], (2, None)),
        ("window", [None, None], None),
        ("causal", np.bool_(False), False),
    ]
    for name, argument, stored in accepted:
        mask = AttentionMask(**{name: argument})
        actual = getattr(mask, name)
        assert actual == stored and type(actual) is type(stored), argument
        numbers = actual if isinstance(actual, tuple) else ()
        assert all(type(number) in (int, tuple, type(None)) for number in numbers), argument
        assert hash(mask) == hash(AttentionMask(**{name: stored})) and mask == AttentionMask(**{name: stored})


def test_numpy_numbers_are_accepted():
    assert UPipe(ALONE, heads_per_stage=np.int64(2)).heads_per_stage == 2
    assert Teams(4, torch.tensor(2), "p2p_intra").ring_size == 1
    q, k, v = (torch.randn(shape) for shape in (Q, KV, KV))
    plain = Local()(q, k, v, mask=CAUSAL, scale=0.5, softcap=2.0)
    assert torch.equal(Local()(q, k, v, mask=CAUSAL, scale=np.float32(0.5), softcap=np.int64(2)), plain)


def test_empty_batches_are_accepted():
    q, k, v = (torch.zeros(0, *shape[1:], requires_grad=True) for shape in (Q, KV, KV))
    for attend, mask in ((Local(), CAUSAL), (Local(), chunked(2)), (UPipe(ALONE), CAUSAL)):
        for kernel in ("cpu_flash", "dense"):
            out = attend(q, k, v, mask=mask, kernel=kernel)
            out.sum().backward()
            assert out.shape == q.shape and q.grad is not None


def axes_of_a_grid() -> None:
    one, other = mesh(ring=2, ulysses=2), mesh(ring=2, ulysses=2)
    ring, ulysses, all_ring = one["ring"], one["ulysses"], mesh(ring=4)
    Ulysses(ulysses, inner=Ring(ring))
    Ulysses(ring, inner=Ring(ulysses))
    groups = [DeviceMesh.from_group(axis.get_group(), "cpu") for axis in (ulysses, ring)]
    Ulysses(groups[0], inner=Ring(groups[1]))
    Ulysses(ulysses, inner=Ring(other["ring"]))
    Ulysses(all_ring["ulysses"], inner=Ring(all_ring["ring"]))


def test_axes_of_a_grid_are_accepted(worlds):
    worlds(4).run(axes_of_a_grid)
