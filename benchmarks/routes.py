"""Functions and files of this repository that three routes enter, and how far imports reach.

    uv run python benchmarks/routes.py           # writes docs/benchmarks/routes.md
    uv run python benchmarks/routes.py --list    # the functions, in the order in which they are entered

Two gloo ranks; rank 0 is counted, without functions of the standard library, torch and lambdas or comprehensions:

- a forward of `Ring`, the second with these shapes
- a training step of the debug recipe on ring 2 (forward, loss, backward, optimizer), the third
- a checkpoint that is saved while training goes on, the second: the training loop's call, and the thread that writes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import torch

sys.path.insert(0, str(Path(__file__).parent))
import report

from armillary.attention import AttentionMask, Ring
from armillary.core import build_mesh
from armillary.core.testing import World
from armillary.train import Config, DataConfig, ParallelConfig, SaveConfig, TrainConfig, train

PACKAGES = ("core", "attention", "states", "data", "models", "train", "plan", "integrations", "check")
STEP, SAVE = ("train_step",), ("Checkpoints.start", "Checkpoints._try_to_save")


class Route:
    """Records the functions that are entered during calls of its `entries`, in each thread; a name is a function's.

    Attributes:
        functions: (file, function) and how often it was entered, of the last call of each entry.
    """

    def __init__(self, *entries: str) -> None:
        self.entries, self.calls = entries, dict[str, Counter[tuple[str, str]]]()
        self._running = threading.local()

    @property
    def functions(self) -> Counter[tuple[str, str]]:
        return sum(self.calls.values(), Counter[tuple[str, str]]())

    @contextmanager
    def recorded(self) -> Generator[None]:
        sys.setprofile(self._watch)
        threading.setprofile(self._watch)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def _watch(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if "/armillary/" not in code.co_filename or event not in ("call", "return"):
            return
        stack: list[str] = self._running.__dict__.setdefault("stack", [])
        if code.co_qualname in self.entries:
            if event == "return":
                stack.pop()
                return
            stack.append(code.co_qualname)
            self.calls[code.co_qualname] = Counter()
        if event == "call" and stack and "<" not in code.co_name:
            self.calls[stack[0]][code.co_filename.rpartition("/armillary/")[2], code.co_qualname] += 1


def forward_of_ring() -> Counter[tuple[str, str]]:
    ring = Ring(build_mesh("cpu", ring=2)["ring"])
    layout, route = ring.layout(256), Route("Method.__call__")
    q, k, v = (torch.randn(1, layout.sizes[ring.shard], heads, 32, requires_grad=True) for heads in (4, 2, 2))
    for _ in range(2):
        with route.recorded():
            ring(q, k, v, mask=AttentionMask(), layout=layout)
    return route.functions


def training(output: str, entries: tuple[str, ...]) -> Counter[tuple[str, str]]:
    data = DataConfig(sequence_length=256)
    config = Config(
        data=data,
        parallel=ParallelConfig(ring=2, ulysses=1),
        train=TrainConfig(device="cpu", output=Path(output), steps=5),
        save=SaveConfig(every=2),
    )
    route = Route(*entries)
    with route.recorded():
        train(config)
    return route.functions


def reached(graph: grimp.ImportGraph, module: str) -> int:
    return len(graph.find_upstream_modules(module)) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions of each route, and write nothing")
    options = parser.parse_args()
    with World(2, timeout=600) as world, tempfile.TemporaryDirectory() as folder:
        routes: dict[str, Callable[[], list[Any]]] = {
            "a Ring forward": lambda: world.run(forward_of_ring),
            "a training step": lambda: world.run(training, f"{folder}/step", STEP),
            "a checkpoint save": lambda: world.run(training, f"{folder}/save", SAVE),
        }
        counted = {name: run()[0] for name, run in routes.items()}
    if options.list:
        for name, functions in counted.items():
            print(f"\n{name}", *(f"{n:6} {file}: {function}" for (file, function), n in functions.items()), sep="\n")
        return
    rows = [
        {"route": name, "functions": len(f), "files": len({file for file, _ in f}), "calls": f.total()}
        for name, f in counted.items()
    ]
    graph = grimp.build_graph(*(f"armillary.{name}" for name in PACKAGES))
    reach = {name: reached(graph, f"armillary.{name}") for name in ("attention.methods.ring", "train.loop")}
    modules = len([name for name in graph.modules if name.startswith("armillary.")])
    notes = [
        f"`armillary.{name}` reaches {count} of {modules} modules through imports." for name, count in reach.items()
    ]
    print(report.write("routes", "Routes: functions and files that run", rows, notes))
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
