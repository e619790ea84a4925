"""The command line `armillary-check`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from importlib import import_module
from os import getcwd
from typing import Any, NoReturn

import torch

from armillary.check.architecture import check_architecture, default_method, document_boundaries
from armillary.check.facts import VerifyReport
from armillary.check.model import ModelReport, check_model, error_line
from armillary.check.probes import verify
from armillary.check.report import report_of_call
from armillary.check.step import Build, CheckRun
from armillary.core.internal import integer
from armillary.core.testing import RankFailed, Worlds

PROGRAM = "armillary-check"
DESCRIPTION = """Compares one training step on CPU ranks with the same step on one rank, and names the mistake.

  # a folder or config.json: a tiny random copy of the architecture
  armillary-check path/to/model --ring 2 --ulysses 2 --documents
  # a model type of transformers, with its defaults
  armillary-check gemma3_text --method token_ring --ring 4
  # your own: build() returns (model, step)
  armillary-check my_module:build --ranks 4 --tokens 512
  # its ranks alone, without one rank to compare with: the facts of `verify`
  armillary-check my_module:build --verify --json
  # for an issue: versions, mesh and bytes, nothing private
  armillary-check --report --ring 2 --ulysses 4 --tokens 4096

Exit codes: 0 right; 1 wrong; 2 if it could not be checked. Nothing needs a GPU or a network."""
RIGHT, WRONG, NOT_CHECKED = 0, 1, 2
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(NOT_CHECKED, f"{PROGRAM}: {message}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", help="folder, config.json, model type of transformers, or module:function of your own"
    )
    parser.add_argument("--ring", type=int, default=1, help="ranks on the sequence axis; default: 4 without --ulysses")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks on the head axis")
    parser.add_argument("--method", help="attention method; default: ring, ulysses, or usp for both axes")
    parser.add_argument("--ranks", type=int, help="number of ranks of module:function (default 4)")
    parser.add_argument("--tokens", type=int, default=64, help="length of the sequence (default %(default)s)")
    parser.add_argument("--documents", action="store_true", help="also check packed documents")
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--compile", action="store_true", help="also compile the model of module:function")
    parser.add_argument("--verify", action="store_true", help="verify the ranks of module:function by probes instead")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run (default %(default)g)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--report", action="store_true", help="print what an issue needs, and check nothing")
    options = parser.parse_args(argv)
    if (options.model is None) != options.report:
        parser.error("a model is needed" if options.model is None else "--report checks no model")
    return options


def main(argv: Sequence[str] | None = None, worlds: Worlds | None = None) -> None:
    """Entry point of `armillary-check`. Exits with 0 if all results are right, with 1 if one is wrong, and with 2 and a
    line that says why if the model cannot be checked.
    """
    options = parse(argv)
    try:
        for name in ("ring", "ulysses", "tokens", *(["ranks"] if options.ranks is not None else [])):
            integer(f"--{name}", getattr(options, name), minimum=1)
        if options.report:
            print(environment_report(options))
            return
        report = check(options, lambda line: print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True), worlds)
    except (ValueError, ImportError, RankFailed) as error:
        reason = error_line(error).removeprefix("ValueError: ") if isinstance(error, RankFailed) else str(error)
        print(f"{PROGRAM}: {' '.join(reason.split())}", file=sys.stderr)
        sys.exit(NOT_CHECKED)
    print(json.dumps({"model": options.model, **report.to_dict()}, indent=1) if options.json else report)
    sys.exit(report.exit_code if isinstance(report, VerifyReport) else RIGHT if report.right else WRONG)


def environment_report(options: argparse.Namespace) -> str:
    method = options.method or default_method(options.ring, options.ulysses)
    documents = document_boundaries(options.tokens) if options.documents else None
    return report_of_call(method, options.ring, options.ulysses, options.tokens, documents)


def check(
    options: argparse.Namespace, progress: Callable[[str], object], worlds: Worlds | None = None
) -> ModelReport | VerifyReport:
    """Checks the model that the options name.

    Raises:
        ValueError: options that do not apply to the model; a model that cannot be found or shrunk.
        RankFailed: a rank raised, for example because the model cannot be sharded, died or hung.
    """
    shared: dict[str, Any] = {
        "tokens": options.tokens,
        "documents": document_boundaries(options.tokens) if options.documents else None,
        "dtype": DTYPES[options.dtype],
        "timeout": options.timeout,
        "progress": progress,
        "worlds": worlds,
        "variants": ("recompute", "two micro-batches", *(("compile",) if options.compile else ())),
    }
    if ":" in options.model:
        if options.ring != 1 or options.ulysses != 1 or options.method is not None:
            raise ValueError(
                "--ring, --ulysses and --method are for Hugging Face models; for module:function give --ranks"
            )
        module, _, function = options.model.partition(":")
        sys.path.insert(0, getcwd())  # the working directory is searched first
        try:
            build = getattr(import_module(module), function)
        except Exception as error:  # any error of the user's module; a traceback would exit with 1, as a wrong model
            raise ValueError(f"{options.model}: {type(error).__name__}: {error}") from error
        if options.verify:
            return verify_model(build, options, worlds)
        return check_model(build, world_size=options.ranks or 4, **shared)
    if options.verify:
        raise ValueError("--verify is for module:function; copies of Hugging Face models are compared with one rank")
    if options.ranks is not None:
        raise ValueError("--ranks is for module:function; a Hugging Face model takes --ring and --ulysses")
    if options.compile:  # copies stay in float64 by a TorchFunctionMode, which dynamo does not trace
        raise ValueError("--compile is for module:function; copies of Hugging Face models are not compiled")
    return check_architecture(options.model, options.method, options.ring, options.ulysses, **shared)


def verify_model(build: Build, options: argparse.Namespace, worlds: Worlds | None) -> VerifyReport:
    """Runs `verify` on ranks, with a batch of random tokens."""
    ranks = integer("--ranks", options.ranks or 4, minimum=2)
    documents = document_boundaries(options.tokens) if options.documents else None
    run = CheckRun(
        ranks, integer("--tokens", options.tokens, minimum=ranks), documents=documents, dtype=DTYPES[options.dtype]
    )
    with closing(Worlds()) if worlds is None else nullcontext(worlds) as open_worlds:
        return open_worlds(ranks).run(verify_run, build, run, timeout=options.timeout)[0]


def verify_run(build: Build, run: CheckRun) -> VerifyReport:
    """Builds the model and verifies it. Called on every rank of a world."""
    torch.manual_seed(run.seed)
    training = build()
    if not isinstance(training, tuple):
        raise ValueError(
            f"build() returned a {type(training).__name__}; (model, step) or (model, step, reduce) is needed"
        )
    model, step, *reduce = training
    return verify(model.to(run.dtype).train(), run.batches()[0], step, reduce=reduce[0] if reduce else None)
