"""Caches live as long as their mask: a run with new documents at every step keeps the masks of few steps."""

import gc
import weakref
from copy import copy
from dataclasses import replace

import pytest
import torch

from armillary.attention import AttentionMask, Local, Ring, build_attention
from armillary.attention.call import spec
from armillary.attention.mask.attention_mask import BYTES_PER_NUMBER, MAX_BYTES, MAX_ENTRIES, BoundedCache
from armillary.attention.rings.topology import Reach
from armillary.attention.tiling import block_attention, grid
from armillary.core.testing import mesh

LENGTH = 48
STEPS = 10


def documents(step: int) -> tuple[int, ...]:
    """Returns different boundaries for every step."""
    return (0, *(end for end in range(1, LENGTH) if (step >> (end % 6)) & 1 or end == step % 47 + 1), LENGTH)


def alive(attend) -> int:
    """Counts the masks that are still referenced after the last step."""
    layout = attend.layout(LENGTH)
    masks = list[weakref.ref[AttentionMask]]()
    for step in range(STEPS):
        mask = AttentionMask(documents=documents(step), window=(30, None) if step % 2 else None)
        q, k, v = (torch.randn(1, layout.sizes[attend.shard], 4, 8, requires_grad=True) for _ in range(3))
        attend(q, k, v, mask=mask, layout=layout).sum().backward()
        masks.append(weakref.ref(mask))
    del mask
    gc.collect()
    return sum(mask() is not None for mask in masks)


def alive_by_method() -> dict[str, int]:
    """Counts live masks by method, on 2 x 2 ranks."""
    axes = mesh(ring=2, ulysses=2)
    names = ("ulysses+token_ring", "upipe+wallfacer")
    return {name: alive(build_attention(name, axes)) for name in names} | {"local": alive(Local())}


def test_masks_of_past_steps_are_freed_under_every_method(worlds):
    for counts in worlds(4).run(alive_by_method):
        assert counts and all(count <= MAX_ENTRIES for count in counts.values()), counts


def test_masks_of_many_documents_are_fewer():
    recent, many = BoundedCache[int, str](), AttentionMask(documents=range(MAX_BYTES // BYTES_PER_NUMBER // 3))
    for step in range(10):
        recent.add(step, f"value {step}", AttentionMask())
    assert len(recent.entries) == MAX_ENTRIES and recent.get(9) == "value 9" and recent.get(0) is None
    for step in range(10, 16):
        recent.add(step, f"value {step}", many)
    assert [key for key, *_ in recent.entries] == [14, 15]
    recent.add(16, "large", AttentionMask(documents=range(2 * MAX_BYTES // BYTES_PER_NUMBER)))
    assert [key for key, *_ in recent.entries] == [16]


def test_other_patterns_are_compared():
    mask = replace(AttentionMask.chunked(3), pattern=AttentionMask.chunked(4).pattern)
    assert mask == AttentionMask.chunked(4) != AttentionMask.chunked(3)
    assert hash(mask) == hash(AttentionMask.chunked(4)) and mask.pairs(8) == 20
    assert torch.equal(mask.numbers, AttentionMask.chunked(4).numbers)


PLANNED = [(Reach, "of"), (grid, "tile_array"), (spec, "kernel_calls"), (block_attention, "pack_calls")]
"""Functions that run on the host for a new mask and layout."""


def calls_of_first(attend, mask: AttentionMask, layout, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list]:
    """Returns the functions of `PLANNED` that a call and its backward run, and its results."""
    names = list[str]()
    with monkeypatch.context() as patch:
        for owner, name in PLANNED:
            function = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, name=name, function=function: names.append(name) or function(*a))
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, layout.sizes[attend.shard], 4, 8, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, mask=mask, layout=layout)
        out.square().sum().backward()
    return names, [out.detach(), q.grad, k.grad, v.grad]


def first_calls_of_steps(name: str, kind: str) -> dict[str, list[str]]:
    """Returns the host work of a step's first call with and without a plan, on 4 ranks."""
    monkeypatch = pytest.MonkeyPatch()
    if name == "ring, queries":
        attend = Ring(mesh(ring=4)["ring"], backward="queries")
    else:
        attend = build_attention(name, mesh(ring=4, ulysses=1) if name in ONE_AXIS else mesh(ring=2, ulysses=2))
    masks = [AttentionMask(documents=[documents(step), documents(step + 20)]) for step in range(3)]
    layouts = [attend.layout(LENGTH, kind, mask) for mask in masks]
    unplanned, _ = calls_of_first(attend, masks[0], layouts[0], monkeypatch)
    with torch.no_grad():  # the last call has no backward
        q, k, v = (torch.randn(2, layouts[2].sizes[attend.shard], 4, 8) for _ in range(3))
        attend(q, k, v, mask=masks[2], layout=layouts[2])
    attend.plan_ahead(AttentionMask(documents=masks[1].documents), layouts[1], rows=2)
    planned, results = calls_of_first(attend, masks[1], layouts[1], monkeypatch)
    # The same call without a plan.
    fresh = copy(attend)
    for got, expected in zip(results, calls_of_first(fresh, masks[1], layouts[1], monkeypatch)[1], strict=True):
        assert torch.equal(got, expected)
    return {"unplanned": unplanned, "planned": planned}


ONE_AXIS = ("ring", "token_ring", "wallfacer", "all_gather")


NAMES = [
    *((name, "zigzag") for name in ONE_AXIS),
    *((name, "balanced") for name in ("ring, queries", "usp", "upipe+ring")),
]


def each_first_call() -> list[dict[str, list[str]]]:
    return [first_calls_of_steps(name, kind) for name, kind in NAMES]


def test_planned_calls_do_no_host_work(worlds):
    for rank in worlds(4).run(each_first_call):
        for (name, kind), names in zip(NAMES, rank, strict=True):
            assert names["unplanned"] and names["planned"] == [], (name, kind)


def test_nothing_is_planned_before_the_first_call():
    attend = Local()
    attend.plan_ahead(AttentionMask(), attend.layout(8))
    assert attend.planned_specs.entries == []
