"""Invalid arguments of constructors and calls raise before any communication, with the value and the accepted ones."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    build_comm_plan,
    reference_attention,
)
from armillary.attention.methods.teams import Teams
from armillary.core import Axis, CommLedger, SequenceLayout
from armillary.core.testing import mesh

N = 8
ALONE = Axis.alone("ulysses")
CAUSAL = AttentionMask()

# -- masks ------------------------------------------------------------------------------------------------------------

MASKS: list[tuple[dict, str]] = [
    ({"documents": [[0, 3, 8], 5]}, r"boundaries \[\[0, 3, 8\], 5\] must start at 0 and rise"),
    ({"documents": [5, [0, 3, 8]]}, r"boundaries \[5, \[0, 3, 8\]\] must"),
    ({"documents": [[0, 3.7, 8]]}, r"\[0, 3.7, 8\] must"),
    ({"documents": [0.0, 8.0]}, r"\[0.0, 8.0\] must"),
    ({"documents": torch.tensor([0.0, 8.0])}, r"\[0.0, 8.0\] must"),
    ({"documents": np.array([0.0, 8.0])}, r"\[0.0, 8.0\] must"),
    ({"documents": [False, True]}, r"\[False, True\] must"),
    ({"documents": torch.tensor([False, True])}, r"\[False, True\] must"),
    ({"documents": "08"}, "'08' must"),
    ({"documents": 8}, "boundaries 8 must"),
    ({"documents": torch.tensor(8)}, "tensor 8 must"),
    ({"documents": {0: 3, 3: 8}}, "must start at 0"),
    ({"documents": []}, r"\[\] must"),
    ({"documents": [[]]}, r"\[\] must"),
    ({"documents": [0, None]}, "must start at 0"),
    ({"documents": [[0, 8], None]}, r"\[\[0, 8\], None\] must"),
    ({"documents": [0, [3, 40]]}, r"\[0, \[3, 40\]\] must"),
    ({"documents": [[0, 8], 8]}, r"\[\[0, 8\], 8\] must"),
    ({"documents": [torch.tensor([0]), torch.tensor([8])]}, r"\[0\] must"),
    ({"documents": torch.zeros(2, 2, 2, dtype=torch.long)}, "must start at 0"),
    ({"documents": [0, 5, 5]}, r"\[0, 5, 5\] must"),
    ({"documents": [0, 5, 4, 5]}, r"\[0, 5, 4, 5\] must"),
    ({"documents": torch.tensor([0, 5, 4, 5])}, r"\[0, 5, 4, 5\] must"),
    ({"documents": [0, 5, 5, 0]}, r"\[0, 5, 5, 0\] must"),
    ({"documents": torch.tensor([0, 0])}, r"\[0, 0\] must"),
    ({"documents": [[0, 5], [0, 0]]}, r"\[0, 0\] must"),
    ({"documents": [1, 5]}, r"\[1, 5\] must"),
    ({"window": 4}, r"window 4 must be"),
    ({"window": np.int64(4)}, r"window (np.int64\()?4\)? must be"),
    ({"window": torch.tensor(4)}, r"window tensor 4 must be"),
    ({"window": (2.0, 0)}, r"window \(2.0, 0\)"),
    ({"window": (math.inf, 0)}, r"window \(inf, 0\)"),
    ({"window": torch.tensor([2.0, 0.0])}, r"\[2.0, 0.0\]"),
    ({"window": (True, False)}, r"window \(True, False\)"),
    ({"window": (-1, 0)}, r"window \(-1, 0\)"),
    ({"window": (1, 2, 3)}, r"window \(1, 2, 3\)"),
    ({"window": ()}, r"window \(\)"),
    ({"window": "10"}, "window '10'"),
    ({"window": ("1", "0")}, r"window \('1', '0'\)"),
    ({"causal": "no"}, "causal='no'"),
    ({"causal": None}, "causal=None"),
    ({"causal": 0}, "causal=0"),
    ({"causal": torch.tensor([True])}, "True or False"),
]


@pytest.mark.parametrize(("options", "message"), MASKS, ids=lambda value: repr(value)[:40])
def test_invalid_masks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMask(**options)
    with pytest.raises(ValueError, match="causal" if "causal" in options else "document boundaries|window"):
        SequenceLayout.balanced(N, 2, **options)


@pytest.mark.parametrize(
    ("documents", "stored"),
    [
        ({"documents": np.array([0, 3, 8])}, (0, 3, 8)),
        ({"documents": torch.tensor([0, 3, 8], dtype=torch.int32)}, (0, 3, 8)),
        ({"documents": [torch.tensor(0), torch.tensor(8)]}, (0, 8)),
        ({"documents": [np.int32(0), np.int64(8)]}, (0, 8)),
        ({"documents": [0, torch.tensor(3), np.int64(8)]}, (0, 3, 8)),
        ({"documents": range(0, 9, 4)}, (0, 4, 8)),
        ({"documents": np.array([[0, 3, 8], [0, 4, 8]])}, ((0, 3, 8), (0, 4, 8))),
        ({"documents": [np.array([0, 8]), torch.tensor([0, 4, 8]), (0, 1, 8)]}, ((0, 8), (0, 4, 8), (0, 1, 8))),
        ({"documents": [[torch.tensor(0), torch.tensor(8)]]}, ((0, 8),)),
        ({"window": torch.tensor([2, 0])}, (2, 0)),
        ({"window": np.array([2, 0])}, (2, 0)),
        ({"window": [torch.tensor(2), None]}, (2, None)),
        ({"window": [None, None]}, None),
        ({"causal": np.bool_(False)}, False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_masks_are_kept_as_plain_numbers(documents, stored):
    mask = AttentionMask(**documents)
    ((name, _),) = documents.items()
    actual = getattr(mask, name)
    assert actual == stored and type(actual) is type(stored)
    plain = [side for row in ([actual] if isinstance(actual, tuple) else []) for side in row]
    assert all(type(number) in (int, tuple, type(None)) for number in plain)
    assert hash(mask) == hash(AttentionMask(**{name: stored})) and mask == AttentionMask(**{name: stored})


# -- constructors -----------------------------------------------------------------------------------------------------

MADE: list[tuple[Callable[[], object], str]] = [
    (lambda: Ring(None), "NoneType"),
    (lambda: Ring("ring"), "str"),
    (lambda: TokenRing(4), "int"),
    (lambda: WallFacer(["ring"], team=1), "list"),
    (lambda: AllGatherKV(object()), "object"),
    (lambda: Ulysses(None), "NoneType"),
    (lambda: UPipe({}), "dict"),
    (lambda: Ulysses(ALONE, inner=Ring), "inner=Ring"),
    (lambda: Ulysses(ALONE, inner="ring"), "inner=str"),
    (lambda: UPipe(ALONE, inner=ALONE), "inner=Axis"),
    (lambda: UPipe(ALONE, inner=Ulysses(ALONE)), "inner"),
    (lambda: UPipe(ALONE, heads_per_stage=0), "heads_per_stage=0"),
    (lambda: UPipe(ALONE, heads_per_stage=-2), "heads_per_stage=-2"),
    (lambda: UPipe(ALONE, heads_per_stage=2.0), r"heads_per_stage=2.0"),
    (lambda: UPipe(ALONE, heads_per_stage=True), "heads_per_stage=True"),
    (lambda: UPipe(ALONE, heads_per_stage="8"), "heads_per_stage='8'"),
    (lambda: UPipe(ALONE, prefetch="no"), "prefetch='no'"),
    (lambda: Ring(ALONE, backward="both"), r"backward='both'.*auto, keys, queries"),
    (lambda: Ring(ALONE, backward=None), "backward=None"),
    (lambda: WallFacer(ALONE, team=2), "team=2"),
    (lambda: WallFacer(ALONE, team=1.0), r"team=1.0"),
    (lambda: WallFacer(ALONE, team=True), "team=True"),
    (lambda: WallFacer(ALONE, team=None), "team=None"),
    (lambda: WallFacer(ALONE, team=1, placement="near"), r"placement='near'.*collect_intra, p2p_intra"),
    (lambda: WallFacer(ALONE, team=1, placement=1), "placement=1"),
    (lambda: WallFacer(ALONE, team=1, backward="k"), "backward='k'"),
    (lambda: WallFacer(ALONE, team=1, gather_keys=1), "gather_keys=1"),
    (lambda: Teams(4, torch.tensor(2.0), "collect_intra"), r"team=tensor 2.0"),
    (lambda: Local().layout(8, "spiral"), "'spiral'"),
    (lambda: Local().layout(8, None), "None"),
    (lambda: Local().layout(8.0), r"length=8.0"),
    (lambda: Local().layout(8, "balanced", mask=True), r"mask .*bool"),
    (lambda: build_attention("ring", None), r"mesh .*NoneType"),
    (lambda: build_attention("ring", "cpu"), r"mesh .*str"),
    (lambda: build_attention(None, None), "None"),
    (lambda: build_attention("rung", None), "'rung'"),
    (lambda: build_comm_plan(3, None), "3"),
]


@pytest.mark.parametrize(("make", "message"), MADE, ids=[message[:40] for _, message in MADE])
def test_invalid_constructor_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_integers_are_accepted():
    assert UPipe(ALONE, heads_per_stage=np.int64(2)).heads_per_stage == 2
    assert Teams(4, torch.tensor(2), "p2p_intra").ring_size == 1


# -- calls ------------------------------------------------------------------------------------------------------------


def tensors(**shapes: tuple[int, ...]) -> dict:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


GOOD = {"q": (2, N, 4, 8), "k": (2, N, 2, 8), "v": (2, N, 2, 8)}
CALLS: list[tuple[dict, str]] = [
    ({"mask": None}, r"mask .*None.*AttentionMask\(causal=False\)"),
    ({"mask": torch.ones(N, N, dtype=torch.bool)}, "mask is a Tensor"),
    ({"mask": True}, r"mask .*True"),
    ({"mask": "causal"}, r"mask .*'causal'"),
    ({"mask": AttentionMask}, r"mask .*type"),
    ({"layout": "zigzag"}, r"layout is 'zigzag'; .* attend.layout\(length, \"zigzag\"\)"),
    ({"layout": 4}, r"layout .*4"),
    ({"layout": [range(8)]}, r"layout .*list"),
    ({"key_layout": "contiguous"}, r"key_layout is 'contiguous'; .* attend.layout\(length, \"contiguous\"\)"),
    ({"layout": SequenceLayout.contiguous(N, 2)}, r"layout.*2 .*1"),
    ({"scale": math.nan}, "scale=nan"),
    ({"scale": math.inf}, "scale=inf"),
    ({"scale": -math.inf}, "scale=-inf"),
    ({"scale": "1"}, "scale='1'"),
    ({"scale": True}, "scale=True"),
    ({"scale": 1j}, "scale=1j"),
    ({"scale": torch.tensor(0.3)}, r"scale=tensor .*multiply q"),
    ({"softcap": math.inf}, "softcap=inf"),
    ({"softcap": math.nan}, "softcap=nan"),
    ({"softcap": 10**400}, "softcap=1000"),
    ({"softcap": 0}, "softcap 0"),
    ({"softcap": -1.0}, r"softcap -1.0"),
    ({"softcap": "50"}, "softcap='50'"),
    ({"softcap": True}, "softcap=True"),
    ({"softcap": torch.tensor(50.0)}, r"softcap=tensor 50.0"),
    ({"sinks": [0.0] * 4}, r"sinks .*list"),
    ({"sinks": 0.5}, r"sinks .*float"),
    ({"sinks": np.zeros(4)}, "sinks is a ndarray; a tensor is needed; .*torch.as_tensor"),
    ({"sinks": torch.zeros(3)}, r"sinks \(3,\).* 4 query heads"),
    ({"sinks": torch.zeros(1)}, r"sinks \(1,\).* 4 query heads"),
    ({"sinks": torch.zeros(())}, r"sinks \(\).* 4 query heads"),
    ({"sinks": torch.zeros(4, 3)}, r"sinks \(4, 3\).* 4 query heads"),
    ({"sinks": torch.zeros(4, 1)}, r"sinks \(4, 1\).* 4 query heads"),
    ({"sinks": torch.zeros(2, N, 4)}, r"sinks \(2, 8, 4\).* 4 query heads"),
    ({"sinks": torch.zeros(4, dtype=torch.long)}, r"sinks .*torch.int64"),
    ({"sinks": torch.zeros(2, 4, dtype=torch.long)}, r"sinks .*torch.int64"),
    ({"kernel": "abacus"}, r"'abacus'.*cpu_flash"),
    ({"kernel": 5}, r"kernel=5.*cpu_flash"),
    ({"kernel": True}, "kernel=True"),
    ({"return_lse": "no"}, "return_lse='no'"),
    ({"return_lse": 1}, "return_lse=1"),
    ({"q": np.zeros(GOOD["q"])}, "q is a ndarray; a tensor is needed; .*torch.as_tensor"),
    ({"k": None}, r"k .*NoneType"),
    ({"v": [[1.0]]}, r"v .*list"),
    ({"q": torch.zeros(GOOD["q"]).to_sparse()}, r"q has layout torch.sparse_coo; a dense \(strided\) tensor"),
    ({"q": torch.nested.nested_tensor([torch.zeros(N, 4, 8)])}, "q is a nested tensor; .* documents="),
    (
        tensors(q=(2, N, 4, 0), k=(2, N, 2, 0), v=(2, N, 2, 0)),
        "head dims",
    ),
    (tensors(v=(2, N, 2, 0)), "head dims"),
    (tensors(q=(2, N, 0, 8)), "head"),
    (tensors(k=(2, N, 0, 8), v=(2, N, 0, 8)), "head"),
    (tensors(q=(2, N, 8)), r"\[batch, tokens, heads, head dim\]"),
    (tensors(q=(2, N, 3, 8)), r"K.*H"),
    (
        tensors(q=(2, 4, N, 8), k=(2, 2, N, 8), v=(2, 2, N, 8)),
        r"transpose\(1, 2\)",
    ),
    (
        tensors(q=(2, 4, N, 8), k=(2, 4, N, 8), v=(2, 4, N, 8)) | {"layout": SequenceLayout.contiguous(N, 1)},
        r"8 .*4.*transpose\(1, 2\)",
    ),
    ({name: torch.zeros(shape, dtype=torch.int32) for name, shape in GOOD.items()}, r"torch.int32"),
    (
        {name: torch.zeros(shape, dtype=torch.complex64) for name, shape in GOOD.items()},
        r"torch.complex64",
    ),
    ({"mask": AttentionMask(documents=[0, 3, 9])}, r"documents.*row 0.*9.*8"),
    ({"mask": AttentionMask(documents=[[0, 8]] * 3)}, r"documents.*3.*2"),
]


@pytest.mark.parametrize(("wrong", "message"), CALLS, ids=[str(message)[:40] for _, message in CALLS])
@pytest.mark.parametrize("attend", [Local(), UPipe(ALONE)], ids=["local", "upipe"])
def test_invalid_call_arguments_raise(wrong, message, attend):
    arguments = tensors(**GOOD) | {"mask": CAUSAL} | wrong
    with pytest.raises(ValueError, match=message):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


class Plain:
    heads, key_heads = 4, 2

    def q(self, x, heads):
        return x.new_zeros(*x.shape[:2], len(heads), 8)

    def kv(self, x, heads):
        return self.q(x, heads), self.q(x, heads)

    def parameters(self):
        return []


OPTIONS = [case for case in CALLS if not {*case[0]} & {"q", "k", "v", "return_lse", "key_layout"}]
PROJECTED = [
    *OPTIONS,
    ({"x": np.zeros((2, N, 16))}, r"x .*ndarray"),
    ({"x": None}, r"x .*NoneType"),
    ({"x": torch.zeros(N, 16)}, r"x \(8, 16\).*\[batch, tokens, model dim\]"),
    ({"projections": None}, r"projections .*None.*heads, key_heads, q, kv, parameters"),
    ({"projections": lambda x: x}, r"projections .*function"),
]


@pytest.mark.parametrize(("wrong", "message"), PROJECTED, ids=[str(message)[:40] for _, message in PROJECTED])
@pytest.mark.parametrize("attend", [Local(), UPipe(ALONE)], ids=["local", "upipe"])
def test_invalid_projected_arguments_raise(wrong, message, attend):
    arguments = {"x": torch.zeros(2, N, 16), "projections": Plain(), "mask": CAUSAL} | wrong
    with pytest.raises(ValueError, match=message):
        attend.projected(arguments.pop("x"), arguments.pop("projections"), **arguments)


@pytest.mark.parametrize("wrong", [{"mask": None}, {"scale": math.nan}, {"softcap": math.inf}, {"mask": torch.ones(8)}])
def test_the_oracle_refuses_invalid_arguments(wrong):
    arguments = tensors(**GOOD) | {"mask": CAUSAL} | wrong
    with pytest.raises(ValueError):
        reference_attention(**arguments)


def test_numpy_numbers_are_accepted():
    q, k, v = (torch.randn(shape) for shape in GOOD.values())
    plain = Local()(q, k, v, mask=CAUSAL, scale=0.5, softcap=2.0)
    assert torch.equal(Local()(q, k, v, mask=CAUSAL, scale=np.float32(0.5), softcap=np.int64(2)), plain)


def test_empty_batches_are_accepted():
    q, k, v = (torch.zeros(0, *shape[1:], requires_grad=True) for shape in GOOD.values())
    for attend in (Local(), UPipe(ALONE)):
        for kernel in ("cpu_flash", "dense"):
            out = attend(q, k, v, mask=CAUSAL, kernel=kernel)
            out.sum().backward()
            assert out.shape == q.shape and q.grad is not None


# -- axes -------------------------------------------------------------------------------------------------------------


def refused(make: Callable[[], object]) -> str:
    """Returns the error on this rank; asserts that nothing was sent before it."""
    try:
        with CommLedger() as ledger:
            make()
    except ValueError as error:
        return str(error) if ledger.bytes() == 0 else "sent something"
    return "accepted"


def one_axis_twice() -> dict[str, str]:
    one, two = mesh(ring=2, ulysses=2), mesh(ring=4)
    ring, ulysses = one["ring"], one["ulysses"]
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))["all"]
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
    shuffled = DeviceMesh("cpu", [[0, 2], [3, 1]], mesh_dim_names=("u", "r"))
    wrong = {
        "itself": lambda: Ulysses(ulysses, inner=Ring(ulysses)),
        "itself in stages": lambda: UPipe(ring, inner=Ring(ring)),
        "around token_ring": lambda: Ulysses(ring, inner=TokenRing(ring)),
        "around all_gather": lambda: UPipe(ring, inner=AllGatherKV(ring)),
        "around wall_facer": lambda: Ulysses(two["ring"], inner=WallFacer(two["ring"], team=2)),
        "an axis": lambda: Ulysses(Axis.of(ulysses), inner=Ring(ulysses)),
        "by another name": lambda: Ulysses(two["ring"], inner=Ring(flat)),
        "a part of it": lambda: Ulysses(ulysses, inner=Ring(two["ring"])),
        "all of it": lambda: Ulysses(two["ring"], inner=Ring(ring)),
        "three deep": lambda: Ulysses(ring, inner=Ulysses(ulysses, inner=Ring(ring))),
        "across": lambda: Ulysses(ulysses, inner=Ring(crossed["b"])),
        "turned on some ranks": lambda: Ulysses(shuffled["u"], inner=Ring(ring)),
        "two axes": lambda: Ring(one["ring", "ulysses"]),
        "a group": lambda: Ring(ring.get_group()),
        "no such axes": lambda: build_attention("usp", flat),
    }
    right = {
        "usp": lambda: Ulysses(ulysses, inner=Ring(ring)),
        "the other way": lambda: Ulysses(ring, inner=Ring(ulysses)),
        "of groups": lambda: Ulysses(
            DeviceMesh.from_group(ulysses.get_group(), "cpu"),
            inner=Ring(DeviceMesh.from_group(ring.get_group(), "cpu")),
        ),
        "of two meshes": lambda: Ulysses(ulysses, inner=Ring(mesh(ring=2, ulysses=2)["ring"])),
        "of one rank": lambda: Ulysses(mesh(ring=4)["ulysses"], inner=Ring(two["ring"])),
    }
    dist.barrier()
    return {name: refused(make) for name, make in (wrong | right).items()}


def test_axes_of_a_composition_must_span_a_grid(worlds):
    messages = worlds(4).run(one_axis_twice)
    words = {"across": "run across each other", "turned on some ranks": "run across each other"}
    words |= {"two axes": "one mesh axis is needed, got 2", "a group": "DeviceMesh.from_group"}
    words |= {"no such axes": "no ring and ulysses; use build_mesh"}
    right = {"usp", "the other way", "of groups", "of two meshes", "of one rank"}
    for rank, actual in enumerate(messages):
        for name, message in actual.items():
            expected = "accepted" if name in right else words.get(name, "share ranks; two axes of one mesh are needed")
            assert expected in message, (rank, name, message)
    assert messages[0]["itself"].count("[0, 1]") == 2
