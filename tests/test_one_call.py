"""Calls go down the import order: no file calls one that imports it, except through an interface."""

import sys
from pathlib import Path

import torch
from test_structure import reached

from armillary.attention import AttentionMask, Local, Ring, TokenRing, Ulysses
from armillary.attention.call.spec import AttentionMethod
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
            # Through torch, and through the module of ops: it runs what was defined as an op, for the op's caller.
            while caller is not None and module_of(caller.f_code.co_filename) in ("", "armillary.core.ops"):
                caller = caller.f_back
            if caller is not None:
                edges.add((module_of(caller.f_code.co_filename), called, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return edges


def calls_of(attend) -> set[tuple[str, str, str]]:
    """Returns the calls between files in forward and backward of a method."""
    q, k, v = (torch.randn(1, 16 // attend.shards, 2, 8, requires_grad=True) for _ in range(3))
    layout = attend.layout(16)

    def run() -> None:
        attend(q, k, v, mask=AttentionMask(documents=[0, 3, 9, 16]), layout=layout).sum().backward()

    return calls_between_files(run)


def climbs(edges: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Returns calls into a module that imports the caller's, other than of interface methods and local functions."""
    assert len(edges) > 10
    return {
        (caller, called, name)
        for caller, called, name in edges
        if caller != called
        and caller in reached(called)
        and name.rpartition(".")[2] not in INTERFACE
        and "<locals>" not in name
    }


def calls_of_methods() -> dict[str, set[tuple[str, str, str]]]:
    """Returns the calls of each method, on 4 ranks or on 2 x 2."""
    ring, both = mesh(ring=4)["ring"], mesh(ring=2, ulysses=2)
    methods = {"ring": Ring(ring), "token_ring": TokenRing(ring), "usp": Ulysses(both["ulysses"], Ring(both["ring"]))}
    return {name: calls_of(attend) for name, attend in methods.items()}


def test_calls_go_down(worlds):
    """Ranks return their calls, so that only this process parses the sources."""
    for calls in worlds(4).run(calls_of_methods):
        assert {name: climbs(edges) for name, edges in calls.items()} == {
            "ring": set(),
            "token_ring": set(),
            "usp": set(),
        }


def test_calls_of_one_rank_go_down():
    assert climbs(calls_of(Local())) == set()
