"""Calls go down the import order: no file calls one that imports it, except through an interface."""

import sys
from pathlib import Path

import pytest
import torch
from test_structure import reached

from armillary.attention import AttentionMask, Local, Ring, TokenRing, Ulysses
from armillary.attention.call.interface import AttentionMethod
from armillary.attention.kernels.top_left import TopLeft
from armillary.core.testing import mesh

INTERFACE = {name for base in (AttentionMethod, TopLeft) for name in vars(base)}
"""Interface methods, which files below may call."""


def module_of(path: str) -> str:
    """Dotted module name of a source file of Armillary; "" for other files."""
    _, source, name = path.rpartition("/src/")
    return ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__") if source else ""


def calls_between_files(run) -> set[tuple[str, str, str]]:
    """Returns (caller, called module, called function) of all calls between Armillary's files during `run`."""
    edges = set()

    def profile(frame, event, _):
        if event == "call" and (called := module_of(frame.f_code.co_filename)).startswith("armillary.attention"):
            caller = frame.f_back
            while caller is not None and not module_of(caller.f_code.co_filename):  # through torch
                caller = caller.f_back
            if caller is not None:
                edges.add((module_of(caller.f_code.co_filename), called, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return edges


def climbs(attend) -> set[tuple[str, str, str]]:
    """Returns calls into a module that imports the caller's, other than of interface methods and local functions."""
    q, k, v = (torch.randn(1, 16 // attend.shards, 2, 8, requires_grad=True) for _ in range(3))
    layout = attend.layout(16)

    def run() -> None:
        attend(q, k, v, mask=AttentionMask(documents=[0, 3, 9, 16]), layout=layout).sum().backward()

    edges = calls_between_files(run)
    assert len(edges) > 10
    return {
        (caller, called, name)
        for caller, called, name in edges
        if caller != called
        and caller in reached(called)
        and name.rpartition(".")[2] not in INTERFACE
        and "<locals>" not in name
    }


METHODS = {
    "ring": lambda ranks: Ring(ranks["ring"]),
    "token_ring": lambda ranks: TokenRing(ranks["ring"]),
    "usp": lambda ranks: Ulysses(ranks["ulysses"], inner=Ring(ranks["ring"])),
}


def climbs_of(name: str) -> set[tuple[str, str, str]]:
    ranks = mesh(ring=2, ulysses=2) if name == "usp" else mesh(ring=4)
    return climbs(METHODS[name](ranks))


@pytest.mark.parametrize("name", METHODS)
def test_calls_go_down(worlds, name):
    assert worlds(4).run(climbs_of, name) == [set()] * 4


def test_calls_of_one_rank_go_down():
    assert climbs(Local()) == set()
