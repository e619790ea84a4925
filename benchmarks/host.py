"""Host time of an attention call: processor time of one rank, with a kernel that computes nothing.

    uv run python benchmarks/host.py                                  # every method, and torch's own ring beside them
    uv run python benchmarks/host.py --against ../before --pairs 5    # this checkout against another, in turns
    uv run python benchmarks/host.py --mask documents                 # causal unless given
    uv run python benchmarks/host.py --train-step --against ../before # functions of a trainer's step, here and there
    uv run python benchmarks/host.py --layer --against ../before      # a LLaMA block: ops, and calls of functions

One process is rank 0 of 8 in a fake process group, whose exchanges complete at once and send nothing; a shard has 64
tokens (T). The remaining time is that of Python and the dispatcher: microseconds of processor time per call, forward
and backward, median over calls. `functions` and `files` count the functions and files of this repository that a forward
enters, and `frames` its functions on the stack when the kernel is called.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # the import also registers the backend

sys.path.insert(0, str(Path(__file__).parent))
import report

from armillary.attention import AttentionMask, Method, build_attention
from armillary.attention.internal import Kernel
from armillary.core import build_mesh
from armillary.data.console.units import count_argument

TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 64, 32, 8, 128
MESHES = {
    "local": {},
    "ring": {"ring": 8},
    "token_ring": {"ring": 8},
    "wallfacer": {"ring": 8},
    "all_gather": {"ring": 8},
    "ulysses": {"ulysses": 8},
    "usp": {"ring": 2, "ulysses": 4},
    "upipe": {"ulysses": 8},
    "upipe+ring": {"ring": 2, "ulysses": 4},
}
MASKS: dict[str, Callable[[int], AttentionMask]] = {
    "causal": lambda length: AttentionMask(),
    "window": lambda length: AttentionMask(window=(length // 4, 0)),
    "documents": lambda length: AttentionMask(documents=[0, length // 7, length // 3, length // 2 + 5, length]),
}
LAYER_COUNTS = ("dispatched ops", "Python calls")
R = TypeVar("R")
HERE = str(Path(__file__).parent.parent / "packages")


class Nothing(Kernel):
    """Returns zeros and supports every band, so that a block is one call.

    Uninitialized memory would be faster, but its values can make the merge twice as slow.
    """

    name = "nothing"
    frames = 0

    def refuses(self, inputs: Any) -> None:
        return None

    def cut(self, tile: Any) -> tuple[Any, ...]:
        return (tile,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Any, scores: Any) -> tuple[Tensor, Tensor]:
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class FrameCounter(Nothing):
    """Also records the largest number of armillary's frames on the stack."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Any, scores: Any) -> tuple[Tensor, Tensor]:
        FrameCounter.frames = max(FrameCounter.frames, armillary_frames(sys._getframe(1)))
        return super().forward(q, k, v, band, scores)


def armillary_frames(frame: FrameType | None) -> int:
    """The number of armillary's frames from `frame` outwards."""
    count = 0
    while frame is not None:
        count += "/armillary/" in frame.f_code.co_filename
        frame = frame.f_back
    return count


def functions_and_files(run: Callable[[], object]) -> tuple[int, int]:
    """Returns the numbers of (functions, files) of armillary that a call enters."""
    entered = set[tuple[str, str, int]]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/armillary/" in code.co_filename and not code.co_name.startswith("<"):
            entered.add((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered), len({name for name, _, _ in entered})


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.zeros(1, TOKENS, h, HEAD_DIM, dtype=dtype, requires_grad=True) for h in heads]


def microseconds(
    calls: int, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]
) -> tuple[float, float]:
    """Median processor time of this thread (forward, backward) over calls after a warm-up."""
    forward_times, backward_times = list[float](), list[float]()
    for _ in range(calls + 5):
        start = time.thread_time_ns()
        out = forward()
        between = time.thread_time_ns()
        backward(out)
        forward_times.append((between - start) / 1e3)
        backward_times.append((time.thread_time_ns() - between) / 1e3)
    return median(forward_times[5:]), median(backward_times[5:])


def of_method(name: str, attend: Method, calls: int, mask: AttentionMask) -> dict[str, Any]:
    q, k, v = inputs()
    layout, kernel = attend.layout(TOKENS * attend.shards), Nothing()
    forward_time, backward_time = microseconds(
        calls,
        lambda: attend(q, k, v, mask=mask, layout=layout, kernel=kernel),
        lambda out: torch.autograd.grad(out, (q, k, v), torch.ones_like(out)),
    )
    watched, FrameCounter.frames = FrameCounter(), 0
    attend(q, k, v, mask=mask, layout=layout, kernel=watched)  # warm, like the calls of a training run
    functions, files = functions_and_files(lambda: attend(q, k, v, mask=mask, layout=layout, kernel=watched))
    counts = {"frames": FrameCounter.frames, "functions": functions, "files": files}
    return {"method": name, "forward us": forward_time, "backward us": backward_time} | counts


def of_torch(calls: int) -> dict[str, Any]:
    """torch's private context-parallel ring with a kernel that computes nothing. It takes tensors with heads first."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    group = build_mesh("cpu", ring=8)["ring"].get_group()
    q, k, v = (x.detach().transpose(1, 2) for x in inputs())

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def gradients(*_: Any, query: Tensor, key: Tensor, value: Tensor, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    def forward() -> Any:
        return cp._templated_ring_attention(group, 2, attend, q, k, v, is_causal=True, dropout_p=0.0)

    def backward(result: Any) -> Any:
        out, lse, *_ = result
        options = {"is_causal": True, "dropout_p": 0.0}
        return cp._templated_ring_attention_backward(group, 2, gradients, out, "grad_out", q, k, v, out, lse, **options)

    forward_time, backward_time = microseconds(calls, forward, backward)
    return {"method": "torch ring", "forward us": forward_time, "backward us": backward_time}


def of_train_step() -> dict[str, Any]:
    """Functions and files that the third step of the debug recipe enters in the main thread, with batches ready."""
    from armillary.train import Config, TrainConfig, prepare, process_group
    from armillary.train.step import train_step

    with tempfile.TemporaryDirectory() as output:
        config = Config(train=TrainConfig(device="cpu", output=Path(output)))
        with process_group(config) as device:
            run = prepare(config, device)
            batches = [next(run.training) for _ in range(3)]
            for step, batch in enumerate(batches[:2], start=1):
                train_step(run, step, [batch])
            functions, files = functions_and_files(lambda: train_step(run, 3, batches[2:]))
    return {"method": "train_step", "functions": functions, "files": files}


def measure(calls: int, kind: str) -> list[dict[str, Any]]:
    """Measures all methods, each on its mesh of a fake world of 8 (`local`: of 1), and torch's ring."""

    def measured(name: str, attend: Method) -> dict[str, Any]:
        return of_method(name, attend, calls, MASKS[kind](TOKENS * attend.shards))

    return [*of_each_method(measured), in_world(8, lambda: of_torch(calls))]


def layers(calls: int) -> list[dict[str, Any]]:
    """Measures a LLaMA block with each method."""
    from host_layer import of_layer

    def measured(name: str, attend: Method) -> dict[str, Any]:
        attend.kernel = Nothing()
        return {"method": name} | of_layer(attend, TOKENS, partial(microseconds, calls))

    return of_each_method(measured)


def of_each_method(measured: Callable[[str, Method], R]) -> list[R]:
    """Calls `measured` for each method in a fake world."""
    torch.set_num_threads(1)

    def of(name: str, axes: dict[str, int]) -> R:
        return in_world(8 if axes else 1, lambda: measured(name, build_attention(name, mesh_of(axes))))

    return [of(name, axes) for name, axes in MESHES.items()]


def mesh_of(axes: dict[str, int]) -> Any:
    return build_mesh("cpu", **axes)


def in_world(ranks: int, run: Callable[[], R]) -> R:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        return run()
    finally:
        dist.destroy_process_group()


def rows_of_checkout(checkout: Path, *flags: str) -> list[dict[str, Any]]:
    """Runs this script with `flags` in a process with the packages of `checkout`, and returns its rows."""
    path = os.pathsep.join(str(src) for src in sorted(checkout.resolve().glob("packages/*/src")))
    command = [sys.executable, __file__, *flags, "--json"]
    # glibc would return freed memory to the system after some calls and not after others, depending on the addresses;
    # the page faults that follow were 8% of a ring's forward in one checkout and none in the other.
    keep_memory = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
    env = os.environ | keep_memory | {"PYTHONPATH": path}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def counted(other: Path) -> list[dict[str, Any]]:
    """Counts of a block in the other checkout and in this one. Times are left out: they need alternating runs."""
    flags = ("--layer", "--calls", "1")
    pairs = zip(rows_of_checkout(other, *flags), rows_of_checkout(Path(HERE).parent, *flags), strict=True)
    return [
        {"method": after["method"]} | {name: f"{before[name]} -> {after[name]}" for name in LAYER_COUNTS}
        for before, after in pairs
    ]


def paired(other: Path, calls: int, pairs: int, kind: str) -> list[dict[str, Any]]:
    """Median ratios of this checkout to the other, from alternating processes."""
    flags = ("--calls", str(calls), "--mask", kind)
    runs = [(rows_of_checkout(Path(HERE).parent, *flags), rows_of_checkout(other, *flags)) for _ in range(pairs)]
    rows = list[dict[str, Any]]()
    for i, first in enumerate(runs[-1][0]):
        row: dict[str, Any] = {"method": first["method"]}
        for column in ("forward us", "backward us"):
            times, other_times = [run[0][i][column] for run in runs], [run[1][i][column] for run in runs]
            row |= {column: median(times), f"{column} before": median(other_times)}
            row |= {f"{column.split()[0]} ratio": report.median_ratio(times, other_times)}
        before = runs[-1][1][i]
        row |= {key: f"{before.get(key)} -> {first[key]}" for key in ("frames", "functions", "files") if key in first}
        rows.append(row)
    columns = list(rows[0])
    return [{column: row.get(column) for column in columns} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=count_argument(), default=50, help="calls of each method (default 50)")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in alternation with this one"
    )
    parser.add_argument("--pairs", type=count_argument(), default=5, help="runs of each checkout (default 5)")
    parser.add_argument("--train-step", action="store_true", help="only count functions and files of a trainer step")
    parser.add_argument("--layer", action="store_true", help="count and time a LLaMA block with each method instead")
    parser.add_argument("--mask", choices=MASKS, default="causal", help="mask of the calls (default causal)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON and write no report")
    options = parser.parse_args()
    if options.train_step:
        rows = [of_train_step(), *(rows_of_checkout(options.against, "--train-step") if options.against else [])]
    elif options.layer:
        rows = counted(options.against) if options.against else layers(options.calls)
    else:
        pairs = (options.calls, options.pairs, options.mask)
        rows = paired(options.against, *pairs) if options.against else measure(options.calls, options.mask)
    if options.json or options.train_step:
        print(json.dumps(rows))
        return
    columns = list(rows[0])
    rows = [{column: row.get(column) for column in columns} for row in rows]
    name = "host-layer" if options.layer else "host" if options.mask == "causal" else f"host-{options.mask}"
    subject = "a LLaMA block" if options.layer else f"a call, {options.mask}"
    title = f"Host time of {subject}, {TOKENS} tokens a shard, a kernel that computes nothing"
    print(report.write(name, title, rows))


if __name__ == "__main__":
    main()
