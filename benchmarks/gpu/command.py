"""Checks of this repository on the GPUs of a machine, in the order of a first session: 40 minutes on 8 of them.

    python benchmarks/gpu                        # all that fit this machine, and a table
    python benchmarks/gpu kernels step           # two of them
    python benchmarks/gpu --minutes 120          # the same checks with three times the time limits
    python benchmarks/gpu --fake                 # a rehearsal with tiny sizes, without a GPU

Checks that use NCCL run under both of torch's NCCL backends (TORCH_DIST_USE_NCCL2 1 and 0). Each check is a process,
which is killed at its time limit. Checks on several GPUs are skipped on a machine with one.

Needs torch 2.11 or newer and a GPU; the packages of this repository need not be installed. Reports are written to
docs/benchmarks, as gpu.md, gpu-CHECK.md and .json, or to --out; a rehearsal writes reports only with --out. --archive
packs them into one file. A measurement that the machine does not allow is reported as "not run", with the reason.
Exits with 1 if a check fails or exceeds its time limit, and with 2 if none could run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import report
import torch
import torch.distributed as dist

from armillary.data.console import Column, print_table
from gpu.check import Check, Row, Setting
from gpu.device import CpuDevice, CudaDevice

MODULES = (
    *("groups", "kernels", "merges", "steps", "ranks", "one_gpu", "exactness"),
    *("overlap", "memory", "shares", "costs", "baseline"),
)
ORDER = (
    *("groups", "kernels", "merge", "step", "conformance", "train"),  # correctness
    *("nccl-one-gpu", "deterministic", "sdpa-thread", "resume", "sanitizer"),
    *("hang", "fault", "mixed"),  # failures
    *("overlap", "queue", "ring-memory", "streams", "cudnn-threads"),  # assumptions of the planner and the simulator
    *("throughput", "memory", "upipe-memory", "mfu", "offload", "share", "length", "compile", "trace"),
    *("loss", "packed", "pinned", "merge-launch", "fsdp", "baseline"),  # parts of a step, and a plain loop
)
SESSION = 40
"""Minutes for all checks, with both NCCL backends."""
STARTING = 20.0
"""Seconds for the start of a check's process."""
NCCL2 = "TORCH_DIST_USE_NCCL2"
BACKENDS = {"nccl2": "1", "nccl-legacy": "0"}
"""Value of the variable for each backend of torch 2.15."""

Verdict = Literal["passed", "FAILED", "OUT OF TIME", "told", "left out"]


class Run(NamedTuple):
    """A check, under one of torch's NCCL backends if it uses NCCL."""

    check: Check
    backend: str | None = None

    @property
    def name(self) -> str:
        return self.check.name if self.backend is None else f"{self.check.name}, {self.backend}"


class Outcome(NamedTuple):
    """Result of a run.

    Args:
        seconds: its duration.
        reason: why it was killed or skipped.
    """

    rows: list[Row]
    seconds: float = 0.0
    ended: bool = True
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        if any(row.passed is False for row in self.rows):
            return "FAILED"
        if not self.ended:
            return "OUT OF TIME"
        if not any(row.ran for row in self.rows):
            return "left out"
        return "passed" if any(row.passed for row in self.rows) else "told"

    @property
    def measured(self) -> str:
        """The first row that failed, or else the last row, judged ones first."""
        failed = [row for row in self.rows if row.passed is False]
        judged = [row for row in self.rows if row.passed is not None]
        shown_row = (failed[:1] or judged[-1:] or self.rows[-1:] or [None])[0]
        figure = [] if shown_row is None else [f"{shown_row.what}: {figure_of(shown_row)}"]
        return "; ".join([*figure, *filter(None, [self.reason])])


def checks() -> dict[str, Check]:
    """All checks by name, in their order of execution."""
    all_checks = {check.name: check for module in MODULES for check in import_module(f"gpu.{module}").CHECKS}
    return {name: all_checks[name] for name in ORDER}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks of the command line. Returns the exit code."""
    all_checks = checks()
    options = parsed(all_checks, arguments)
    if reason := obstacle(options.fake):
        print(reason, file=sys.stderr)
        return 2
    began, outcomes = time.monotonic(), dict[str, Outcome]()
    for run in runs([all_checks[name] for name in options.chosen], options):
        if options.rows is None:
            print(f"\n{run.name}: {run.check.title}", flush=True)
        remaining = 60 * options.minutes - (time.monotonic() - began)
        outcomes[run.name] = outcome = here(run, options) if options.here else apart(run, options, remaining)
        if outcome.reason and options.rows is None:
            print(f"  {outcome.reason}", flush=True)
        write_rows(run, outcome, options)
        write_archive(options)  # after each check, because the session may be killed
    failed = [name for name, outcome in outcomes.items() if outcome.verdict in ("FAILED", "OUT OF TIME")]
    if options.rows is None:
        show(all_checks, outcomes, options)
        write_archive(options)
        executed = [name for name, outcome in outcomes.items() if outcome.verdict != "left out"]
        print(f"{len(executed) - len(failed)} of {len(executed)} checks passed", *failed[:1] and ["failed:"])
        print(*failed, sep="\n", end="\n" * bool(failed))
    return int(bool(failed))


def parsed(all_checks: dict[str, Check], arguments: Sequence[str] | None) -> Namespace:
    names = "\n".join(f"  {check.name:13} {check.title}" for check in all_checks.values())
    parser = ArgumentParser(
        "python benchmarks/gpu", description=f"{__doc__}\nChecks:\n{names}", formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("chosen", nargs="*", metavar="CHECK", help="default: all")
    parser.add_argument("--fake", action="store_true", help="rehearsal on the CPU, without judging speeds")
    parser.add_argument("--minutes", type=float, default=SESSION, help="duration of the session (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the reports (default: docs/benchmarks)")
    parser.add_argument("--archive", type=Path, metavar="FILE.tgz", help="also pack all reports into one file")
    parser.add_argument("--here", action="store_true", help="run in this process, with its NCCL backend")
    parser.add_argument("--rows", type=Path, help="with --here: write rows to this file and print no table")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.chosen if name not in all_checks]:
        parser.error(f"no check {', '.join(unknown)}; known: {', '.join(all_checks)}")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: must be above 0")
    if options.archive is not None and options.out is None and (options.fake or options.here):
        parser.error("--archive: no reports are written without --out in a rehearsal or with --here")
    options.chosen = options.chosen or list(all_checks)
    options.out = options.out or (None if options.fake or options.here else report.RESULTS)
    return options


def obstacle(fake: bool) -> str:
    """The reason why no check can run, or ""."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < (2, 11):
        return f"torch {torch.__version__}: 2.11 or newer is needed"
    return "" if fake or torch.cuda.is_available() else "no GPU is here; --fake tries all that needs none"


def runs(chosen: Sequence[Check], options: Namespace) -> Iterator[Run]:
    """Yields each check, twice if it uses NCCL and torch has two NCCL backends."""
    two_backends = (
        not options.here and (options.fake or gpus() > 1) and hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
    )
    for check in chosen:
        yield from (Run(check, backend) for backend in (BACKENDS if check.nccl and two_backends else (None,)))


def gpus() -> int:
    """GPUs of this machine, counted without starting CUDA."""
    return torch.cuda.device_count()


def here(run: Run, options: Namespace) -> Outcome:
    """Runs a check in this process, and prints its rows one by one."""
    began = time.monotonic()
    device = CpuDevice() if options.fake else CudaDevice()
    seconds = run.check.seconds * options.minutes / SESSION
    setting = Setting(device, options.fake, max(1, gpus()), seconds)
    rows, ended = list[Row](), True
    for row in rows_of(run.check, setting):
        rows.append(row)
        print(line(row), flush=True)
        ended = row.what != OVER
        if options.rows is not None:
            options.rows.write_text(json.dumps([row.as_dict() for row in rows]))
    reason = "" if ended else rows.pop().measured
    return Outcome(rows, time.monotonic() - began, ended, str(reason))


def apart(run: Run, options: Namespace, remaining: float) -> Outcome:
    """Runs a check in a process, which prints its rows and is killed with its children at the time limit.

    Args:
        remaining: seconds left of the session.
    """
    if not options.fake and gpus() < run.check.gpus:
        return Outcome([], reason=f"needs {run.check.gpus} GPUs, and {gpus()} is here")
    if remaining <= STARTING:
        return Outcome([], reason=f"the session's {options.minutes:g} minutes are over")
    limit, began = min(run.check.seconds * options.minutes / SESSION + STARTING, remaining), time.monotonic()
    environment = dict(os.environ) if run.backend is None else {**os.environ, NCCL2: BACKENDS[run.backend]}
    with TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows.json"
        command = [sys.executable, str(Path(__file__).parent), run.check.name, "--here", "--rows", str(rows_file)]
        command += [*["--fake"] * options.fake, "--minutes", str(options.minutes)]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        rows = [Row(**row) for row in json.loads(rows_file.read_text())] if rows_file.exists() else []
    seconds = time.monotonic() - began
    if code is None:
        return Outcome(rows, seconds, ended=False, reason=f"ended after {limit:.0f} s")
    if rows and rows[-1].what == OVER:
        return Outcome(rows[:-1], seconds, ended=False, reason=str(rows[-1].measured))
    if code != int(any(row.passed is False for row in rows)):
        rows.append(Row(f"{run.name} ended early", f"exit code {code}", passed=False))
    return Outcome(rows, seconds)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kills the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


OVER = "out of time"
"""Label of the last row of a check that was stopped at its time limit."""


def rows_of(check: Check, setting: Setting) -> Iterator[Row]:
    """Yields the rows of a check, with a last row for an error or a time-out. Frees the device's memory."""
    began = time.monotonic()
    try:
        for row in check.run(setting):
            yield row
            if time.monotonic() - began > setting.seconds:
                yield Row(OVER, f"stopped after {setting.seconds:g} s; what follows was not asked")
                return
    except Exception as error:
        traceback.print_exc()
        yield Row(f"{check.name} ended early", error_line(error), passed=False)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        setting.device.clean()


def error_line(error: Exception) -> str:
    """The error in one line, with the command that installs a missing package."""
    if isinstance(error, ModuleNotFoundError):
        return f"needs the package {error.name}, which is not installed here: pip install {error.name}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def line(row: Row) -> str:
    mark = {True: "ok", False: "FAILED", None: "--"}[row.passed]
    bar = "" if row.bar == "-" else f" ({row.bar}; {row.source})"
    return f"  {mark:6} {row.what}: {figure_of(row)}{bar}".rstrip()


def figure_of(row: Row) -> str:
    """The measured value of a row, with its unit."""
    figure: Any = f"{row.measured:.4g}" if isinstance(row.measured, float) else row.measured
    return f"{figure} {row.unit}".rstrip()


TABLE = (
    Column("check", text=True),
    Column("must hold", text=True),
    Column("measured", text=True, own_line=True),
    Column("verdict", text=True),
    Column("seconds"),
)


def show(all_checks: dict[str, Check], outcomes: dict[str, Outcome], options: Namespace) -> None:
    """Prints the table of all runs, and writes it as a report if all checks ran."""
    holds = [all_checks[name.partition(",")[0]].holds for name in outcomes]
    lines = [
        [name, bar, outcome.measured, outcome.verdict, f"{outcome.seconds:.0f}"]
        for (name, outcome), bar in zip(outcomes.items(), holds, strict=True)
    ]
    if options.here:
        return
    print()
    print_table(TABLE, lines)
    if options.out is not None and len(options.chosen) == len(all_checks):
        rows = [dict(zip([column.head for column in TABLE], cells, strict=True)) for cells in lines]
        report.write("gpu", "A session on GPUs", rows, notes(options), options.out)


def write_rows(run: Run, outcome: Outcome, options: Namespace) -> None:
    """Writes the report of a run that has rows, if there is a folder for reports."""
    if options.out is not None and outcome.rows:
        name = "-".join(filter(None, ("gpu", run.check.name, run.backend)))
        took = [f"{outcome.seconds:.0f} s", *filter(None, [outcome.reason])]
        report.write(name, run.name, [row.as_dict() for row in outcome.rows], [*notes(options), *took], options.out)


def write_archive(options: Namespace) -> None:
    """Packs the reports in the folder into `--archive`, which is complete at any time."""
    if options.archive is None:
        return
    options.archive.parent.mkdir(parents=True, exist_ok=True)
    partial_file = options.archive.with_name(f"{options.archive.name}.partial")
    with tarfile.open(partial_file, "w:gz") as archive:
        for path in sorted(options.out.glob("gpu*")):
            if path.suffix in (".md", ".json"):
                archive.add(path, path.name)
    partial_file.replace(options.archive)


def notes(options: Namespace) -> list[str]:
    """Notes about the machine."""
    if options.fake:
        return ["a rehearsal, without a GPU"]
    return [f"on {gpus()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"]
