"""Ranks that share a sequence: the same rows on all of them, and other random numbers on each."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from armillary.attention import AttentionMask, ContextParallel, sdpa_parallel
from armillary.core import SequenceLayout
from armillary.core.internal import compat
from armillary.core.testing import mesh

LENGTH = 24
VARIANTS = ("ids", "row", "order", "labels", "shift_labels", "documents", "mask", "layout", "labelled", "padding")


def arguments_of(variant: str | None, rank: int) -> dict:
    """Returns arguments of `shard`, of which `variant` differs on rank 1."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 11
    arguments: dict = {"ids": ids.clone()}
    differs = rank == 1
    match variant:
        case "ids":
            arguments["ids"] = torch.full_like(ids, rank)
        case "row":
            arguments["ids"][1, 5] += differs
        case "order":  # the same tokens
            arguments["ids"] = ids.flip(0) if differs else ids
        case "labels":
            arguments["labels"] = ids + differs
        case "shift_labels":
            arguments["shift_labels"] = ids + differs
        case "documents":
            arguments["documents"] = [0, 5 + differs, LENGTH]
        case "mask":
            arguments["mask"] = AttentionMask(causal=True, window=(7 + differs, 0))
        case "layout":
            arguments["layout"] = SequenceLayout.zigzag(LENGTH, 4) if differs else SequenceLayout.contiguous(LENGTH, 4)
        case "labelled":
            arguments["labelled"] = 20 + differs
        case "padding":
            arguments["attention_mask"] = (torch.arange(LENGTH) < 20 + differs).long().expand(2, -1)
        case None:
            pass
    return arguments


def error_of(action) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def errors_at_each_place(kind: str) -> list[list[str]]:
    """Returns the errors of this rank: for the first batch, and for a later one in each place that reads them."""
    rank, errors = dist.get_rank(), list[list[str]]()
    for variant in VARIANTS:
        cp = ContextParallel(kind, MESHES[kind]())
        errors.append([error_of(lambda cp=cp, v=variant: cp.shard(**arguments_of(v, rank)))])
    places = {
        "shard": lambda cp, batch: cp.shard(**arguments_of(None, rank)),
        "loss": lambda cp, batch: cp.loss(torch.zeros(2, batch.ids.shape[1], 11), batch),
        "reduce_gradients": lambda cp, batch: cp.reduce_gradients(nn.Linear(2, 2)),
        "block": lambda cp, batch: attend_in_block(cp, batch),
    }
    for place in places.values():
        cp = ContextParallel(kind, MESHES[kind]())
        cp.shard(**arguments_of(None, rank))
        batch = cp.shard(**arguments_of("row", rank))  # not read yet
        errors.append([error_of(lambda place=place, cp=cp, batch=batch: place(cp, batch))])
    return errors


def attend_in_block(cp, batch):
    q = torch.zeros(2, 4, batch.ids.shape[1], 8)
    with batch, sdpa_parallel(cp.method):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)


MESHES = {"ring": lambda: mesh(ring=4), "usp": lambda: mesh(ring=2, ulysses=2), "ulysses": lambda: mesh(ulysses=4)}


@pytest.mark.parametrize("kind", MESHES)
def test_other_rows_on_one_rank_raise_on_all_ranks(worlds, kind):
    for errors in worlds(4).run(errors_at_each_place, kind):
        for variant, (error,) in zip(VARIANTS, errors, strict=False):
            name = {"row": "ids", "order": "ids", "padding": "attention_mask"}.get(variant, variant)
            assert f"different {name} (" in error, variant
            groups = error.partition("(ranks ")[2]
            assert "1]" in groups or "[1" in groups, error
        assert all("different ids (ranks [0, 2, 3] have others than [1])" in error for (error,) in errors[-4:])


def lengths_differ() -> tuple[str, str]:
    cp, rank = ContextParallel("ring", mesh(ring=2)), dist.get_rank()
    cp.shard(torch.zeros(1, 16, dtype=torch.long))
    length = error_of(lambda: cp.shard(torch.zeros(1, 18 + 2 * rank, dtype=torch.long)))
    cp = ContextParallel("ring", mesh(ring=2))
    cp.shard(torch.zeros(1, 16, dtype=torch.long))

    def fail():
        with cp.shard(torch.full((1, 16), rank)):
            dist.barrier()
            raise RuntimeError("connection closed by peer")

    return length, error_of(fail)


def test_other_lengths_raise_at_once_and_a_failing_block_names_other_rows(worlds):
    for errors in worlds(2).run(lengths_differ):
        assert all("different ids (ranks [0] have others than [1])" in error for error in errors)


def bad_argument_on_one_rank() -> tuple[str, str]:
    cp = ContextParallel("ring", mesh(ring=2))
    ids = torch.zeros(1, 16, dtype=torch.long)
    cp.shard(ids)
    first = error_of(lambda: cp.shard(ids, labelled=0) if dist.get_rank() else cp.shard(ids))  # raises on rank 1 alone
    return first, error_of(lambda: cp.shard(ids))


def test_a_rank_that_raises_for_another_reason_takes_part(worlds):
    (_, later), (error, _) = worlds(2).run(bad_argument_on_one_rank)
    assert "different labelled" in error
    assert "different labelled" in later


def late_rank_and_reader() -> tuple[bool | None, int]:
    cp = ContextParallel("ring", mesh(ring=2))
    ids = torch.zeros(1, 16, dtype=torch.long)
    cp.shard(ids)
    store, pending = compat.default_store(), None
    store.delete_key("sharded")
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["sharded"])  # by rank 0
    cp.shard(ids, labelled=3)
    if dist.get_rank() == 0:
        pending = not cp.rows_check.newest.complete
        store.set("sharded", "")
    cp.shard(ids, labelled=3)
    # A reader's thread neither communicates nor reads.
    shapes = list[int]()
    other = ids if dist.get_rank() else ids[:, :10]  # for which the ranks' own thread would wait
    thread = threading.Thread(target=lambda: shapes.append(cp.shard(other, labelled=3).ids.shape[1]))
    thread.start()
    thread.join()
    return pending, shapes[0]


def test_nothing_waits_for_the_comparison(worlds):
    assert worlds(2).run(late_rank_and_reader) == [(True, 5), (None, 8)]


# -- random numbers ----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout, whose masks it keeps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.masks = list[torch.Tensor]()

    def block(self, x):
        y = F.dropout(x * self.weight, 0.5)
        self.masks.append((y == 0).clone())
        return y

    def forward(self, x, recompute=None):
        if recompute is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=recompute)


def draw(kind: str, sizes: dict[str, int], seeds_differ: bool) -> dict:
    cp = ContextParallel(kind, mesh(**sizes), data=[name for name in ("shard",) if name in sizes])
    model, ids = Dropping(), torch.zeros(1, 65, dtype=torch.long)
    results: dict = {"masks": [], "recomputed": [], "states": []}
    for step in range(2):
        torch.manual_seed(step + (dist.get_rank() if seeds_differ else 0))
        for recompute in (None, False, True):
            batch = cp.shard(ids)
            model.masks.clear()
            with batch:
                used(batch, cp)
                x = torch.ones(*batch.ids.shape, 8, requires_grad=True)
                y = model(x, recompute)
            results["masks"].append(model.masks[0])
            y.sum().backward()  # outside of the block
            results["recomputed"].append(model.masks[-1] if recompute is not None else model.masks[0])
            results["states"].append(torch.get_rng_state())
    return results


def state_after_a_block_without_draws() -> bool:
    cp, state = ContextParallel("ring", mesh(ring=2)), torch.get_rng_state()
    with cp.shard(torch.zeros(1, 16, dtype=torch.long)) as batch:
        used(batch, cp)
    return torch.equal(torch.get_rng_state(), state)


def test_a_block_that_draws_nothing_leaves_the_generator_as_it_was(worlds):
    assert worlds(2).run(state_after_a_block_without_draws) == [True, True]


def used(batch, cp):
    q = torch.zeros(1, 4, batch.ids.shape[1], 8)
    with sdpa_parallel(cp.method):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("ring", {"ring": 4}), ("usp", {"ring": 2, "ulysses": 2}), ("ring", {"shard": 2, "ring": 2})]
)
@pytest.mark.parametrize("seeds_differ", [False, True])
def test_dropout_is_independent_on_all_ranks_and_recomputes_repeat_it(worlds, kind, sizes, seeds_differ):
    ranks = worlds(4).run(draw, kind, sizes, seeds_differ)
    again = worlds(4).run(draw, kind, sizes, seeds_differ)
    masks = [mask for rank in ranks for mask in rank["masks"]]
    shape = min(mask.shape[1] for mask in masks)
    for i, a in enumerate(masks):  # of all ranks, steps and forwards
        for b in masks[:i]:
            assert 0.3 < float((a[:, :shape] == b[:, :shape]).float().mean()) < 0.7
    for rank, repeated in zip(ranks, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank["masks"], rank["recomputed"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(rank["masks"], repeated["masks"], strict=True))
        assert not torch.equal(rank["states"][0], rank["states"][1])
    if not seeds_differ:
        assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank["states"], ranks[0]["states"], strict=True))


def test_one_rank_draws_as_without_context_parallelism():
    cp, x = ContextParallel("ring", mesh()), torch.ones(1, 16, 8)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(3)
    with cp.shard(torch.zeros(1, 16, dtype=torch.long)) as batch:
        used(batch, cp)
        assert torch.equal(F.dropout(x, 0.5), expected)


def seed_inside() -> str:
    cp = ContextParallel("ring", mesh(ring=2))

    def step():
        with cp.shard(torch.zeros(1, 16, dtype=torch.long)) as batch:
            used(batch, cp)
            torch.manual_seed(0)

    return error_of(step)


def test_a_seed_inside_the_block_is_refused(worlds):
    assert all("torch.manual_seed" in error for error in worlds(2).run(seed_inside))
