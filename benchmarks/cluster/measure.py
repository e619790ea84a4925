"""One rank of the emulated cluster: checks wires and contenders, then times the contenders in turns.

torchrun starts it in the rank's namespace; rank 0 writes the results of all ranks to a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Race, Shapes, race
from patterns import patterns
from predict import cell_sizes
from torch import Tensor

from armillary.attention import AttentionMask, Local, Method
from armillary.attention.plans import Send
from armillary.core import CommLedger, build_mesh
from armillary.data.console.units import count_argument

Turn = Callable[[], tuple[Tensor, ...]]
TOLERANCE = 1e-4
"""Limit of the relative error of float32 results."""
PAUSE = 0.05
"""Seconds before each turn, in which all ranks agree on its start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster")
    parser.add_argument("--tokens", type=count_argument(), required=True)
    parser.add_argument("--repeats", type=count_argument(), required=True)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = race(options.cluster, options.tokens, options.methods)
    methods = methods_of(chosen)
    results = {"wires": wires(chosen), "turns": [measure(methods, shapes, options.repeats) for shapes in chosen.shapes]}
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def methods_of(chosen: Race) -> dict[str, Method]:
    meshes = {axes: build_mesh("cpu", **dict(axes)) for axes in sorted({c.axes for c in chosen.contenders})}
    return {str(c): c.build(meshes[c.axes]) for c in chosen.contenders}


def wires(race: Race) -> list[dict[str, Any]]:
    """Measured and expected seconds of patterns of sends."""
    rows = []
    for name, sends in patterns(race.cluster).items():
        exchange(sends)
        seconds = min(elapsed(lambda sends=sends: exchange(sends)) for _ in range(3))
        rows.append({"sends": name, "seconds": seconds, "expected": race.cluster.transit(sends)})
    return rows


def exchange(sends: Sequence[Send]) -> None:
    """Runs all sends at once."""
    rank = dist.get_rank()
    # Receives first: gloo announces receives to senders on the connection that large sends would occupy.
    works = [dist.irecv(torch.empty(n, dtype=torch.uint8), source) for source, to, n in sends if to == rank]
    works += [dist.isend(torch.empty(n, dtype=torch.uint8), to) for source, to, n in sends if source == rank]
    for work in works:
        work.wait()


def measure(methods: dict[str, Method], shapes: Shapes, repeats: int) -> dict[str, Any]:
    """Returns by contender the seconds of each turn, processor seconds of all ranks, and sent bytes.

    Raises:
        RuntimeError: a contender's results are wrong. Raised before any timing.
    """
    turns = {name: turn_of(attend, shapes) for name, attend in methods.items()}
    errors = {name: worst(attend, turns[name], shapes) for name, attend in methods.items()}
    if wrong := {name: error for name, error in errors.items() if not error < TOLERANCE}:
        raise RuntimeError(f"{shapes}: wrong results, relative errors {wrong}")
    sent_bytes = {name: counted(turn) for name, turn in turns.items()}
    seconds = {name: list[float]() for name in turns}
    busy = {name: list[float]() for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            before = time.process_time()
            seconds[name].append(elapsed(turn))
            busy[name].append(sum(gathered(time.process_time() - before)))
    cells = {size: [elapsed(cell_of(shapes, size)) for _ in range(repeats)] for size in cell_sizes(shapes)}
    return {
        "shapes": vars(shapes),
        "seconds": seconds,
        "busy": busy,
        "cells": cells,
        "sent": sent_bytes,
        "errors": errors,
    }


def cell_of(shapes: Shapes, size: int) -> Callable[[], object]:
    """A call of forward and backward of `size` queries by `size` keys, all visible, without exchanges."""
    q, k, v, dout = (x[:, :size].clone() for x in inputs(shapes))
    for x in (q, k, v):
        x.requires_grad_()
    attend, mask = Local(), AttentionMask(causal=False)
    return lambda: torch.autograd.grad(attend(q, k, v, mask=mask), (q, k, v), dout)


def turn_of(attend: Method, shapes: Shapes) -> Turn:
    """A call of forward and backward of this rank's shard."""
    length = shapes.tokens * dist.get_world_size()
    layout = attend.layout(length, mask=shapes.mask)
    q, k, v, dout = (layout.take(x, attend.shard) for x in inputs(shapes))
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def turn() -> tuple[Tensor, ...]:
        out = attend(q, k, v, mask=shapes.mask, layout=layout)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    return turn


def inputs(shapes: Shapes) -> list[Tensor]:
    """q, k, v and dout of the full sequence, equal on every rank."""
    generator, length = torch.Generator().manual_seed(0), shapes.tokens * dist.get_world_size()
    heads = (shapes.heads, shapes.key_heads, shapes.key_heads, shapes.heads)
    return [torch.randn(1, length, h, shapes.head_dim, generator=generator) for h in heads]


def worst(attend: Method, turn: Turn, shapes: Shapes) -> float:
    """The largest error of out, dq, dk and dv on any rank, relative to the norm of the expected tensor."""
    q, k, v, dout = (x.requires_grad_() for x in inputs(shapes))
    out = Local()(q, k, v, mask=shapes.mask)
    right = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    layout = attend.layout(shapes.tokens * dist.get_world_size(), mask=shapes.mask)
    pairs = zip(turn(), (layout.take(x, attend.shard) for x in right), strict=True)
    errors = torch.tensor(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return float(errors)


def counted(turn: Turn) -> dict[str, float]:
    """Sent bytes: the maximum and the mean over ranks."""
    with CommLedger() as ledger:
        turn()
    sent_bytes = gathered(ledger.bytes())
    return {"most": max(sent_bytes), "mean": sum(sent_bytes) / len(sent_bytes)}


def elapsed(turn: Callable[[], object]) -> float:
    """Seconds from a common start until the last rank is done. All ranks read one clock."""
    start = max(gathered(time.monotonic())) + PAUSE
    time.sleep(max(0.0, start - time.monotonic()))
    turn()
    return max(gathered(time.monotonic())) - start


def gathered(value: float) -> list[float]:
    all_values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    all_values[dist.get_rank()] = value
    dist.all_reduce(all_values)
    return all_values.tolist()


if __name__ == "__main__":
    main()
