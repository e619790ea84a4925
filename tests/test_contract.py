"""The public contract of 0.1, as code of a user who wrote against it: this file stays as it is.

A later version may add names, parameters with defaults and results; what is here must go on working unchanged. Numbers
are compared in float64 with `reference_attention`, so that only rounding separates them.
"""

import runpy
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    Local,
    Ring,
    TokenRing,
    Ulysses,
    UPipe,
    WallFacer,
    build_attention,
    reference_attention,
    sdpa_parallel,
    sequence,
)
from armillary.core import CommLedger, SequenceLayout, build_mesh
from armillary.data import ByteTokenizer, Document, PackedSequences, TokenStore
from armillary.integrations import register_transformers
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig

NAMES = {
    "armillary.core": "build_mesh SequenceLayout CommLedger",
    "armillary.attention": "AttentionMask Local Ring TokenRing WallFacer AllGatherKV Ulysses UPipe reference_attention "
    "build_attention sdpa_parallel sequence",
    "armillary.integrations": "register_transformers",
    "armillary.models": "Llama LlamaConfig GPT GPTConfig",
    "armillary.data": "TokenStore PackedSequences ByteTokenizer Document open_store",
}

METHODS = (Local, Ring, TokenRing, WallFacer, AllGatherKV, Ulysses, UPipe)

LAYOUT = SequenceLayout.zigzag(10, 2)


def attend_signature(self, q, k, v, *, mask, layout=None, scale=None, sinks=None, softcap=None, key_layout=None,
                     kernel=None, return_lse=False): ...  # fmt: skip


def projected_signature(self, x, projections, *, mask, layout=None, scale=None, sinks=None, softcap=None,
                        kernel=None): ...  # fmt: skip


def reference_signature(q, k, v, *, mask, scale=None, sinks=None, softcap=None, query_positions=None,
                        key_positions=None, return_lse=False): ...  # fmt: skip


def build_attention_signature(name, mesh, heads_per_stage=None, team=None, placement="collect_intra",
                              backward="auto"): ...  # fmt: skip


def build_mesh_signature(device_type, *, replicate=1, shard=1, ring=1, ulysses=1, tp=1,
                         timeout=timedelta(minutes=10)): ...  # fmt: skip


def packed_signature(stores, *, layout, shard, rows_per_batch, weights=None, seed=0, replica=0, replicas=1,
                     reset_positions=False, layout_for=None, ahead=2): ...  # fmt: skip


SIGNATURES = [
    (build_mesh, build_mesh_signature),
    (SequenceLayout, lambda spans: ...),
    (SequenceLayout.contiguous, lambda length, shards: ...),
    (SequenceLayout.zigzag, lambda length, shards: ...),
    (SequenceLayout.striped, lambda length, shards, stripe=1: ...),
    (SequenceLayout.balanced, lambda length, shards, causal=True, window=None, documents=None: ...),
    (SequenceLayout.spans, lambda self, shard: ...),
    (SequenceLayout.positions, lambda self, shard: ...),
    (SequenceLayout.take, lambda self, x, shard, dim=1: ...),
    (SequenceLayout.join, lambda self, parts, dim=1: ...),
    (SequenceLayout.refine, lambda self, n: ...),
    (SequenceLayout.coarsen, lambda self, n: ...),
    (CommLedger.bytes, lambda self, axis=None, kind=None, phase=None: ...),
    (CommLedger.table, lambda self: ...),
    (AttentionMask, lambda causal=True, window=None, documents=None: ...),
    (Ring, lambda axis, backward="auto": ...),
    (TokenRing, lambda axis: ...),
    (WallFacer, lambda axis, team, placement="collect_intra", backward="auto", gather_keys=True: ...),
    (AllGatherKV, lambda axis: ...),
    (Ulysses, lambda axis, inner=None: ...),
    (UPipe, lambda axis, inner=None, heads_per_stage=None, prefetch=False: ...),
    (reference_attention, reference_signature),
    (build_attention, build_attention_signature),
    (sdpa_parallel, lambda attend: ...),
    (register_transformers, lambda attend, name="armillary": ...),
    (sequence, lambda *, layout=None, documents=None: ...),
    *((method.__call__, attend_signature) for method in METHODS),
    *((method.projected, projected_signature) for method in METHODS),
    *((method.layout, lambda self, length, kind="zigzag", mask=None: ...) for method in METHODS),
    *((model, lambda config, attention=None: ...) for model in (Llama, GPT)),
    *((model.forward, lambda self, ids, *, positions=None, mask=None, layout=None: ...) for model in (Llama, GPT)),
    *((model.from_pretrained, lambda folder, attention=None, dtype=None: ...) for model in (Llama, GPT)),
    *((model.save_pretrained, lambda self, folder, source=None, dtype=None: ...) for model in (Llama, GPT)),
    (TokenStore.of, lambda documents, tokenizer, name="documents": ...),
    (TokenStore.read, lambda self, document, start, stop, step=1: ...),
    (PackedSequences, packed_signature),
]


@pytest.mark.parametrize("package", NAMES)
def test_names(package):
    module = import_module(package)
    assert set(NAMES[package].split()) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(("function", "of_0_1"), SIGNATURES, ids=[function.__qualname__ for function, _ in SIGNATURES])
def test_signatures(function, of_0_1):
    """Each parameter with its name, default and place; new ones come after, with a default."""
    now, then = signature(function).parameters, signature(of_0_1).parameters
    assert {name: now[name].default for name in then} == {name: p.default for name, p in then.items()}
    positional = [name for name, p in then.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    assert list(now)[: len(positional)] == positional
    assert all(now[name].kind is Parameter.POSITIONAL_OR_KEYWORD for name in positional)
    assert all(now[name].kind not in (Parameter.POSITIONAL_ONLY, Parameter.VAR_KEYWORD) for name in then)
    added = [p for name, p in now.items() if name not in then]
    assert all(p.default is not Parameter.empty or p.kind.name.startswith("VAR") for p in added)


# -- layouts, masks, ledger --------------------------------------------------------------------------------------------


def test_layouts():
    assert (LAYOUT.length, LAYOUT.shards, LAYOUT.sizes) == (10, 2, (5, 5))
    assert LAYOUT.spans(0) == (range(3), range(8, 10))
    assert LAYOUT.spans(1) == (range(3, 8),)
    assert LAYOUT.positions(0).tolist() == [0, 1, 2, 8, 9]
    assert LAYOUT.positions(0).dtype == torch.int64
    assert SequenceLayout([[range(3), range(8, 10)], [range(3, 8)]]) == LAYOUT
    assert len({LAYOUT, SequenceLayout.zigzag(length=10, shards=2)}) == 1
    assert SequenceLayout.contiguous(5, 2).spans(1) == (range(3, 5),)
    assert SequenceLayout.striped(10, 4).spans(1)[0].step == 4
    assert SequenceLayout.striped(10, 2, stripe=3).positions(1).tolist() == [3, 4, 5, 9]
    assert SequenceLayout.balanced(16, 2, documents=[0, 6, 16]).sizes == (8, 8)
    assert SequenceLayout.balanced(16, 2, causal=False, window=(2, 2)).length == 16


def test_take_and_join():
    x = torch.arange(20.0).reshape(2, 10).requires_grad_()
    parts = [LAYOUT.take(x, shard) for shard in range(2)]
    assert parts[1].tolist() == [[3, 4, 5, 6, 7], [13, 14, 15, 16, 17]]
    assert torch.equal(LAYOUT.join(parts), x)
    LAYOUT.join(parts).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 10))
    assert torch.equal(LAYOUT.join([LAYOUT.take(x.T, shard, dim=0) for shard in range(2)], dim=0), x.T)


def test_refine_and_coarsen():
    fine = LAYOUT.refine(2)
    assert [fine.positions(shard).tolist() for shard in range(4)] == [[0, 1, 2], [8, 9], [3, 4, 5], [6, 7]]
    assert fine.coarsen(2) == LAYOUT


def test_masks():
    mask = AttentionMask(causal=True, window=(4, 0), documents=torch.tensor([0, 3, 10]))
    assert (mask.causal, mask.window, mask.documents) == (True, (4, 0), (0, 3, 10))
    assert {mask: "found"}[AttentionMask(True, [4, 0], [0, 3, 10])] == "found"
    assert replace(mask, window=None) == AttentionMask(documents=(0, 3, 10))
    assert AttentionMask(documents=[[0, 10], [0, 3, 10]]).documents == ((0, 10), (0, 3, 10))


@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_whom(causal):
    """i - left <= j <= i + right, j <= i if causal, and both in one document: read from weights on one-hot values."""
    mask = AttentionMask(causal, window=(2, 1), documents=[0, 4, 7])
    q, k = torch.zeros(1, 7, 1, 2), torch.zeros(1, 7, 1, 2)
    visible = Local()(q, k, torch.eye(7).reshape(1, 7, 1, 7), mask=mask)[0, :, 0] > 0
    document = [0, 0, 0, 0, 1, 1, 1]
    expected = [
        [i - 2 <= j <= i + 1 and (j <= i or not causal) and document[i] == document[j] for j in range(7)]
        for i in range(7)
    ]
    assert visible.tolist() == expected


def test_an_empty_ledger():
    with CommLedger() as ledger:
        pass
    assert ledger.bytes() == ledger.bytes(axis="ring", kind="p2p", phase="backward") == 0
    assert isinstance(ledger.table(), str)


# -- attention ---------------------------------------------------------------------------------------------------------


def qkv(length=26, keys=26, heads=8, key_heads=4):
    """q, k, v and the gradient of out, the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    shapes = (length, heads, 8), (keys, key_heads, 8), (keys, key_heads, 6), (length, heads, 6)
    return [torch.randn(2, *shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]


def check(attend, kind="zigzag", keys=26, **options):
    """out, lse and gradients of this rank are those of the reference on the whole sequence."""
    q, k, v, dout = qkv(keys=keys)
    options = {"mask": AttentionMask(), **options}
    out, lse = reference_attention(q, k, v, return_lse=True, **options)
    expected = out, lse, *torch.autograd.grad(out, (q, k, v), dout)
    layout, key_layout = attend.layout(26, kind=kind), attend.layout(keys, kind=kind)
    arguments = {"layout": layout, "return_lse": True, **({"key_layout": key_layout} if keys != 26 else {})}
    local = layout.take(q, attend.shard), *(key_layout.take(x, attend.shard) for x in (k, v))
    out, lse = attend(*local, **arguments, **options)
    result = out, lse, *torch.autograd.grad(out, local, layout.take(dout, attend.shard))
    for a, full, at in zip(result, expected, [layout] * 3 + [key_layout] * 2, strict=True):
        assert_close(a, at.take(full, attend.shard))


MASK = AttentionMask(causal=True, window=(9, 0), documents=[0, 11, 26])


def test_one_rank():
    q, k, v, _ = qkv()
    assert_close(Local()(q, k, v, mask=MASK), reference_attention(q, k, v, mask=MASK))
    sinks = torch.ones(8, dtype=torch.float64)
    check(Local(), mask=MASK, scale=0.3, softcap=2.0, sinks=sinks)
    check(Local(), keys=14, mask=AttentionMask(causal=False))


def build_everything():
    """A 2 x 2 mesh, and methods by hand and by name, on 2 x 2, 4 x 1 and 1 x 4 ranks."""
    both, rings, heads = build_mesh("cpu", ring=2, ulysses=2), build_mesh("cpu", ring=4), build_mesh("cpu", ulysses=4)
    assert both.mesh_dim_names == ("replicate", "shard", "ring", "ulysses", "tp")
    by_hand = [
        Ulysses(both["ulysses"], inner=Ring(both["ring"], backward="queries")),
        UPipe(both["ulysses"], inner=Ring(both["ring"], backward="keys"), heads_per_stage=4),
        UPipe(heads["ulysses"]),
        TokenRing(rings["ring"]),
        AllGatherKV(rings["ring"]),
        WallFacer(rings["ring"], team=2, placement="collect_intra"),
        WallFacer(rings["ring"], team=2, placement="p2p_intra", backward="queries"),
    ]
    by_name = [build_attention(name, rings) for name in ("ring", "token_ring", "wallfacer", "all_gather")]
    by_name += [build_attention(name, heads) for name in ("ulysses", "upipe")]
    pairs = "usp", "ulysses+ring", "upipe+wallfacer", "ulysses+token_ring", "upipe+all_gather"
    by_name += [build_attention(name, both) for name in pairs]
    by_name += [build_attention("upipe+ring", both, heads_per_stage=2, backward="keys")]
    by_name += [build_attention("wallfacer", rings, team=1, placement="p2p_intra")]
    return both, by_hand, by_name


def check_options(attend):
    """On 2 x 2 ranks: other masks, layouts, options, and a layout over the sequence axis alone."""
    assert (attend.shard, attend.shards) == (dist.get_rank(), 4)
    check(attend, mask=MASK, scale=0.3, softcap=2.0)
    check(attend, kind="contiguous", keys=14, mask=AttentionMask(causal=False))
    check(attend, kind="striped", mask=AttentionMask(documents=[[0, 26], [0, 7, 26]]))
    q, k, v, _ = qkv()
    coarse = SequenceLayout.zigzag(26, 2)
    fine = coarse.refine(2)
    assert fine == attend.layout(26, kind="zigzag")
    out = attend(*(fine.take(x, attend.shard) for x in (q, k, v)), mask=MASK, layout=coarse)
    assert_close(out, fine.take(reference_attention(q, k, v, mask=MASK), attend.shard))


def sinks_share(attend):
    """This rank's share of the gradient of the sinks."""
    q, k, v, dout = qkv()
    layout, sinks = attend.layout(26), torch.ones(8, dtype=torch.float64, requires_grad=True)
    out = attend(*(layout.take(x, attend.shard) for x in (q, k, v)), mask=MASK, layout=layout, sinks=sinks)
    return torch.autograd.grad(out, sinks, layout.take(dout, attend.shard))[0]


class Projections:
    """From x to heads, as a user of `attend.projected` writes it."""

    heads, key_heads = 8, 4

    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(16, 8, 16, dtype=torch.float64, generator=draw))

    def q(self, x, heads):
        return torch.einsum("bte,hde->bthd", x, self.weight[list(heads)])

    def kv(self, x, heads):
        keys, values = ([start + head for head in heads] for start in (8, 12))
        return tuple(torch.einsum("bte,hde->bthd", x, self.weight[chosen]) for chosen in (keys, values))

    def parameters(self):
        return [self.weight]


def projected_share(attend):
    """out and this rank's share of the gradient of the weights, from hidden states."""
    projections, layout = Projections(), attend.layout(26)
    x = torch.linspace(-1, 1, 2 * 26 * 16, dtype=torch.float64).sin().reshape(2, 26, 16)
    out = attend.projected(layout.take(x, attend.shard), projections, mask=MASK, layout=layout)
    full = reference_attention(projections.q(x, range(8)), *projections.kv(x, range(4)), mask=MASK)
    assert_close(out, layout.take(full, attend.shard))
    out.square().sum().backward()
    return projections.weight.grad, torch.autograd.grad(full.square().sum(), projections.weight)[0]


def check_bytes(attend):
    """A ring of 2 inside 2 head ranks, every pair visible: the closed forms of Ring and Ulysses."""
    q, k, v, _ = (x.float().detach() for x in qkv(heads=8, key_heads=4))
    layout = attend.layout(26)
    local = [layout.take(x, attend.shard) for x in (q, k, v)]
    with CommLedger() as ledger:
        attend(*local, mask=AttentionMask(causal=False), layout=layout)
    batch, tokens, key_heads, element = 2, 13, 2, 4
    sent = batch * tokens * key_heads * (8 + 6) * element
    assert ledger.bytes(axis="ring", kind="p2p", phase="forward") == ledger.bytes("ring") == sent
    assert ledger.bytes() == ledger.bytes(axis="ring") + ledger.bytes(kind="all_to_all")
    assert ledger.bytes(phase="backward") == ledger.bytes(kind="all_gather") == ledger.bytes(kind="reduce_scatter") == 0
    assert "ring" in ledger.table()


def check_sdpa(attend):
    """A model that calls torch's function is routed, and knows nothing of it."""
    q, k, v, _ = qkv(key_heads=8)
    layout = attend.layout(26)
    local = [layout.take(x, attend.shard).transpose(1, 2) for x in (q, k, v)]
    with sequence(layout=layout, documents=[0, 11, 26]), sdpa_parallel(attend):
        out = F.scaled_dot_product_attention(*local, is_causal=True)
    expected = reference_attention(q, k, v, mask=AttentionMask(documents=[0, 11, 26]))
    assert_close(out.transpose(1, 2), layout.take(expected, attend.shard))


def check_models(attend):
    """Both models on a shard give the logits of that shard."""
    torch.manual_seed(0)
    layout, ids = attend.layout(26), torch.arange(26)[None] % 17
    for model in (Llama(LLAMA, attend), GPT(GPT_SIZES, attend)):
        here = layout.take(ids, attend.shard)
        positions = layout.positions(attend.shard)
        logits = model(here, positions=positions, mask=AttentionMask(causal=True), layout=layout)
        full = type(model)(model.config)
        full.load_state_dict(model.state_dict())
        assert_close(logits, layout.take(full(ids), attend.shard), rtol=1e-4, atol=1e-5)


LLAMA = LlamaConfig(vocab_size=17, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48)
GPT_SIZES = GPTConfig(vocab_size=17, dim=32, layers=2, heads=4, max_positions=32)


def refused_by_every_rank(attend, axis):
    """Wrong arguments raise before anything is communicated."""
    layout = attend.layout(26)
    q, k, v, _ = (layout.take(x, attend.shard) for x in qkv())
    for wrong in ({"layout": None}, {"layout": SequenceLayout.zigzag(26, 3)}, {"softcap": -1.0}, {"mask": None}):
        with pytest.raises(ValueError):
            attend(q, k, v, **{"mask": MASK, "layout": layout, **wrong})
    with pytest.raises(ValueError):
        Ulysses(axis, inner=Ring(axis))
    for heads_per_stage in (0, 3):
        with pytest.raises(ValueError):
            UPipe(axis, heads_per_stage=heads_per_stage)


def everything_on_four_ranks():
    both, by_hand, by_name = build_everything()
    for attend in (*by_hand, *by_name):
        check(attend)
    usp, upipe = by_hand[:2]
    for attend in (usp, upipe):
        check_options(attend)
    check_bytes(usp)
    check_sdpa(usp)
    check_models(usp)
    refused_by_every_rank(usp, both["ulysses"])
    return sinks_share(usp), *projected_share(usp), *projected_share(upipe)


def test_four_ranks(worlds):
    ranks = worlds(4).run(everything_on_four_ranks)
    sinks, usp, full, upipe, _ = (torch.stack(shares) for shares in zip(*ranks, strict=True))
    assert_close(sinks.sum(0), sinks_share(Local()))
    assert_close(usp.sum(0), full[0])
    assert_close(upipe.sum(0), full[0])


def test_wrong_arguments():
    q, k, v, _ = qkv()
    for wrong in ((q, k[:, :, :3], v), (q, k, v[:, :5]), (q[0], k, v), (q, k[..., :4], v), (q.float(), k, v)):
        with pytest.raises(ValueError):
            Local()(*wrong, mask=MASK)
    for make in (SequenceLayout.contiguous, SequenceLayout.zigzag, SequenceLayout.striped, SequenceLayout.balanced):
        with pytest.raises(ValueError):
            make(3, 4)
    for wrong in ([[range(2)], [range(3, 4)]], [[range(3)], [range(2, 4)]], [[range(2)], []]):
        with pytest.raises(ValueError):
            SequenceLayout(wrong)
    for wrong in ({"causal": 1.5}, {"window": (-1, 0)}, {"documents": [0, 5, 5]}, {"documents": [1, 5]}):
        with pytest.raises(ValueError):
            AttentionMask(**wrong)
    with pytest.raises(ValueError):
        CommLedger().bytes(kind="broadcast")
    with pytest.raises(ValueError):
        build_mesh("cpu", ring=2)
    with pytest.raises(ValueError):
        Local().layout(26, kind="diagonal")


def test_reference_attention_is_differentiable():
    q, k, v, dout = (x[:, :3, :1] for x in qkv())
    out = reference_attention(q, k, v, mask=AttentionMask(causal=True))
    assert torch.equal(out[:, 0], v[:, 0])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out, (q, k, v), dout))


# -- models, data, commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Llama(LLAMA), lambda: GPT(GPT_SIZES)], ids=["llama", "gpt"])
def test_models(tmp_path, make):
    model, ids = make(), torch.arange(12).reshape(2, 6)
    logits = model(ids)
    assert logits.shape == (2, 6, 17)
    assert_close(model(ids, positions=torch.arange(6), mask=AttentionMask(causal=True)), logits)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} >= {".json", ".safetensors"}
    reloaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(reloaded(ids), logits)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), model.parameters(), strict=True))
    with pytest.raises(ValueError):
        model(ids[0])


def test_layers_call_their_attention():
    """attention(q, k, v, mask=, layout=): any function of that form."""
    shapes, local = [], Local()

    def attention(q, k, v, *, mask, layout):
        shapes.append((q.shape, k.shape, mask.causal))
        return local(q, k, v, mask=mask, layout=layout)

    Llama(LLAMA, attention)(torch.zeros(1, 5, dtype=torch.int64))
    assert shapes == [((1, 5, 4, 8), (1, 5, 2, 8), True)] * 2


def packed(shard, **options):
    documents = [Document(f"{i}", bytes(range(i, 2 * i + 5))) for i in range(20)]
    store = TokenStore.of(documents, ByteTokenizer())
    return PackedSequences(store, layout=LAYOUT, shard=shard, rows_per_batch=2, **options)


def test_packed_sequences():
    first, second = packed(0, seed=3), packed(1, seed=3)
    batches = list(zip(range(3), first, second, strict=False))
    _, a, b = batches[0]
    tokens, labels = (LAYOUT.join([getattr(a, name), getattr(b, name)]) for name in ("tokens", "labels"))
    known = labels[:, :-1] != -100
    assert torch.equal(labels[:, :-1][known], tokens[:, 1:][known])
    assert a.positions.tolist() == [LAYOUT.positions(0).tolist()] * 2
    assert a.documents == b.documents
    assert AttentionMask(documents=a.documents).documents is not None
    assert a.layout == LAYOUT
    state = first.state_dict()
    expected = next(first).tokens
    assert torch.equal(next(packed(0, seed=3).load_state_dict(state)).tokens, expected)
    with pytest.raises(ValueError):
        packed(2)


def test_token_stores():
    store = TokenStore.of([Document("a", b"one"), Document("b", b"three")], ByteTokenizer())
    assert (len(store), store.tokens, store.lengths.tolist()) == (2, 10, [4, 6])
    assert bytes(store.read(1, 0, 5).astype("u1")) == b"three"


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_commands(monkeypatch, capsys):
    """Console scripts of these names, and `python -m armillary.train`."""
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    assert all(callable(scripts[name].load()) for name in ("armillary-train", "armillary-plan", "armillary-tune"))
    monkeypatch.setattr(sys, "argv", ["armillary.train", "--help"])
    with suppress(SystemExit):
        runpy.run_module("armillary.train", run_name="__main__", alter_sys=True)
    assert "usage" in capsys.readouterr().out.lower()
