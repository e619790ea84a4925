"""What a GPU is asked when one is at hand: twelve checks of at most 10 minutes each, expected beside measured.

    python benchmarks/gpu                        # all of them, the quick and basic ones first
    python benchmarks/gpu kernels step           # two of them
    python benchmarks/gpu --fake                 # without a GPU: every part that needs none, on tiny sizes

Needs torch 2.11 or newer and a GPU; nothing of this repository need be installed. Reports are written to
docs/benchmarks, as gpu-CHECK.md and .json, or to --out; a rehearsal writes none unless told where. Exit code 1 where a
check fails, 2 where nothing could be run.
"""

from __future__ import annotations

import sys
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist

from gpu.check import Check, Row, Setting
from gpu.device import CpuDevice, CudaDevice

MODULES = ("kernels", "steps", "ranks", "memory", "shares")
ORDER = (
    *("kernels", "step", "conformance", "throughput", "memory", "upipe-memory"),
    *("mfu", "offload", "share", "length", "compile", "trace"),
)
LIMIT = 600
"""Seconds of a check."""


def checks() -> dict[str, Check]:
    """All of them by name, in the order in which they are run."""
    every = {check.name: check for module in MODULES for check in import_module(f"gpu.{module}").CHECKS}
    return {name: every[name] for name in ORDER}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for."""
    known = checks()
    options = parsed(known, arguments)
    if why := obstacle(options.fake):
        print(why, file=sys.stderr)
        return 2
    setting = Setting(CpuDevice() if options.fake else CudaDevice(), options.fake)
    failed = [name for name in options.chosen if not passes(known[name], setting, options.out)]
    print(f"{len(options.chosen) - len(failed)} of {len(options.chosen)} checks passed", *failed[:1] and ["failed:"])
    print(*failed, sep="\n", end="\n" * bool(failed))
    return int(bool(failed))


def parsed(known: dict[str, Check], arguments: Sequence[str] | None) -> Namespace:
    names = "\n".join(f"  {check.name:13} {check.title}" for check in known.values())
    parser = ArgumentParser(
        "python benchmarks/gpu", description=f"{__doc__}\nChecks:\n{names}", formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("chosen", nargs="*", metavar="CHECK", help="by default all")
    parser.add_argument("--fake", action="store_true", help="a rehearsal on the CPU, which judges no speed")
    parser.add_argument("--out", type=Path, help="folder of the reports (default: docs/benchmarks)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.chosen if name not in known]:
        parser.error(f"no check {', '.join(unknown)}; known: {', '.join(known)}")
    options.chosen = options.chosen or list(known)
    options.out = options.out or (None if options.fake else report.RESULTS)
    return options


def obstacle(fake: bool) -> str:
    """Why nothing can be run, if so."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < (2, 11):
        return f"torch {torch.__version__}: 2.11 or newer is needed"
    return "" if fake or torch.cuda.is_available() else "no GPU is here; --fake tries all that needs none"


def passes(check: Check, setting: Setting, out: Path | None) -> bool:
    """Runs one, shows and stores its rows; whether none of them failed."""
    print(f"\n{check.name}: {check.title}", flush=True)
    began, rows = time.monotonic(), list[Row]()
    for row in guarded(check, setting, began):
        rows.append(row)
        print(line(row), flush=True)
    notes = [f"on {setting.device.name}; {time.monotonic() - began:.0f} s", *["a rehearsal"] * setting.fake]
    if out is not None:
        report.write(f"gpu-{check.name}", check.title, [row.as_dict() for row in rows], notes, out)
    return all(row.passed is not False for row in rows)


def guarded(check: Check, setting: Setting, began: float) -> Iterator[Row]:
    """The rows of a check, of which the last says how it ended if not well. What it held is given back."""
    try:
        for row in check.run(setting):
            yield row
            if time.monotonic() - began > LIMIT:
                raise TimeoutError(f"stopped after {LIMIT} s; what follows was not asked")
    except Exception as error:
        traceback.print_exc()
        yield Row(f"{check.name} ended early", said(error), passed=False)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        setting.device.clean()


def said(error: Exception) -> str:
    """In a line; of a package that is not there, what to do."""
    if isinstance(error, ModuleNotFoundError):
        return f"needs the package {error.name}, which is not installed here: pip install {error.name}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def line(row: Row) -> str:
    mark = {True: "ok", False: "FAILED", None: "--"}[row.passed]
    figure: Any = f"{row.measured:.4g}" if isinstance(row.measured, float) else row.measured
    bar = "" if row.bar == "-" else f" ({row.bar}; {row.source})"
    return f"  {mark:6} {row.what}: {figure} {row.unit}{bar}".rstrip()
