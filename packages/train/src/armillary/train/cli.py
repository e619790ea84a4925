"""The command line, `armillary-train` or `torchrun -m armillary.train`: a recipe, overridden by a file and by flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from armillary.data.console import FAILED, exit_on_error, parse, parse_known, refuse_removed
from armillary.train import recipes
from armillary.train.config.check import GPT_FIELDS, PRETRAINED_FIELDS
from armillary.train.config.commented_toml import config_toml
from armillary.train.config.overlay import differences, flag, overlay_settings, read_settings
from armillary.train.config.sections import Config, ModelConfig

if TYPE_CHECKING:
    from armillary.train.watchdog import Watchdog


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and trains.

    Exit codes: 0 trained to the last step, or saved and stopped by a signal; 1 failed while training, after a line that
    names rank, step and error, or before because of the machine or another rank; 2 refused to start, with the reason in
    one line; 130 ^C; 143 or 138 ended by a second SIGTERM or SIGUSR1. torchrun prints the line last (`report_failure`).
    """
    watchdog: Watchdog | None = None
    with exit_on_error(PROGRAM, is_started=lambda: watchdog is not None and watchdog.training_started):
        command, overrides = read_command(sys.argv[1:] if argv is None else argv)
        if command.export_config:
            name = str(command.recipe)
            print(config_toml(name, recipe_config(name), command.run))
            return
        if command.dry_run:
            from armillary.train.dry_run import show_dry_run  # not on every rank of every run

            show_dry_run(command.run, command.ranks, command.json)
            return
        from armillary.train.loop import train, watchdog_of  # takes seconds, and wrong arguments need none of it

        watchdog = watchdog_of(command.run)
        try:
            train(command.run, watchdog, overrides)
        except Exception:
            if watchdog.explained:
                sys.exit(FAILED)
            raise


PROGRAM = "armillary-train"
# Functions that return a recipe's configuration, by the names that `--recipe` accepts.
RECIPES: dict[str, Callable[[], Config]] = {name: getattr(recipes, name) for name in recipes.__all__}
TASKS_REMOVED = "synthetic tasks are no longer trained on; leave it out (recall across ranks: benchmarks/recall.py)"
# Keys of earlier versions, with what to write instead: flags and files that have one are refused.
REMOVED = {
    "data.rows": "it is data.global_batch_size now",
    "data.document_mask": "it is data.documents now",
    "data.task": TASKS_REMOVED,
    "data.pairs": TASKS_REMOVED,
    "data.symbols": TASKS_REMOVED,
    "optimizer.on_host": "it is optimizer.cpu_offload now",
    "validation.tasks": TASKS_REMOVED,
}


@dataclass(frozen=True)
class Source:
    """The recipe and the file that flags override."""

    recipe: str | None = None
    """debug (default), llama3_{8b_{128k,1m,5m},70b_128k}, gpt_wallfacer_{3b,7b}, finetune, hybrid, my.mod:function."""
    config: Path | None = None
    """TOML file of armillary-plan, armillary-tune or your own, or an earlier run's config.json; may name the recipe."""


@dataclass(frozen=True)
class ConfiguredRun(Source):
    """A run's configuration: that of the recipe, overridden by the file, overridden by flags."""

    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


Options = TypeVar("Options", bound=ConfiguredRun)


@dataclass(frozen=True)
class Command(ConfiguredRun):
    r"""Trains a LLaMA or a GPT with context parallelism and FSDP2, under torchrun or on one process.

    Six ways to start:
      # a first run: 0.8 million parameters, one process
      armillary-train
      # a recipe on 8 GPUs, with your tokens
      torchrun --nproc-per-node 8 -m armillary.train --recipe llama3_8b_128k \
          --data.path STORE
      # long context: 8-way context parallelism, over heads (ulysses) and tokens (ring)
      torchrun --nproc-per-node 8 -m armillary.train --parallel.cp 8 \
          --data.sequence-length 128Ki
      # written by armillary-plan or armillary-tune
      torchrun --nproc-per-node 8 -m armillary.train --config planned.toml
      # mesh, shards and shapes of a run, without GPUs
      armillary-train --recipe llama3_8b_1m --dry-run
      # a file with every field and its comment, to edit
      armillary-train --recipe llama3_8b_1m --export-config

    The same command resumes from the newest checkpoint. The file overrides the recipe, and flags override both.
    SIGTERM or SIGUSR1 ends the run after the step, with a checkpoint; a second one, at least 3 seconds later, at once.
    """

    dry_run: bool = False
    """Show mesh, shards and shapes, and stop; memory and time: `armillary-plan run`."""
    ranks: int | None = None
    """Dry run: number of ranks; by default torchrun's, else the product of the axes."""
    json: bool = False
    """Dry run: print JSON."""
    export_config: bool = False
    """Print every field of the run with its comment, as TOML for --config, and stop."""
    trace: Path | None = None
    """Short for --log.trace."""


def read_command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """Returns the command and lines to print: the recipe's name, and the fields that differ from the recipe."""
    command, recipe = read_run(argv, Command, PROGRAM)
    if not command.dry_run and (command.ranks is not None or command.json):
        name = "json" if command.ranks is None else "ranks"
        raise ValueError(f"--{name} is for a dry run; add --dry-run, or leave it out")
    if command.trace is not None:
        log = replace(command.run.log, trace=command.trace)
        command = replace(command, run=replace(command.run, log=log))
    return command, [f"recipe: {command.recipe}", *(f"  {line}" for line in differences(recipe, command.run))]


def read_run(argv: Sequence[str], kind: type[Options], program: str) -> tuple[Options, Config]:
    """Parses the options of a command that has all flags of a run, and returns them with the recipe's configuration.

    Raises:
        ValueError: no such recipe, an error in a recipe, a file that cannot be read, an unknown key or flag, one of an
            earlier version (`REMOVED`) or without effect (`check_model_flags`), or a value of the wrong kind.
    """
    refuse_removed(argv, {f"--{flag(key)}": advice for key, advice in REMOVED.items()})
    # 1. The recipe: the flag's, else the file's, else debug.
    source = parse_known(argv, Source, program)
    settings = {} if source.config is None else read_settings(source.config)
    name = settings.pop("recipe", "debug")
    if not isinstance(name, str):
        raise ValueError(f"--config {source.config}: recipe = {name!r} must be a name")
    label = f"--config {source.config}: recipe = {name}"
    if source.recipe is not None:
        name, label = source.recipe, f"--recipe {source.recipe}"
    recipe = recipe_config(name, label)
    # 2. The file overrides the recipe, and flags override both.
    config = recipe if source.config is None else overlay_settings(recipe, settings, source.config, REMOVED)
    options = parse(argv, kind, program, kind(recipe=name, config=source.config, run=config))
    check_model_flags(argv, options.run.model)
    return options, recipe


def check_model_flags(argv: Sequence[str], model: ModelConfig) -> None:
    """Refuses flags of the model that have no effect, whatever their values."""
    # A configuration does not tell a flag with the default's value from none.
    if model.pretrained is not None:
        allowed, reason = PRETRAINED_FIELDS, f"the model in {model.pretrained} sets it"
    elif model.family == "gpt":
        allowed, reason = GPT_FIELDS, "a GPT has none"
    else:
        return
    names = {field.name for field in fields(ModelConfig)}
    for word in argv:
        prefix, _, key = word.partition("=")[0].partition("--model.")
        name = key.replace("-", "_")
        name = name if name in names else name.removeprefix("no_")
        if not prefix and name in names and name not in allowed:
            raise ValueError(f"--model.{key}: {reason}; leave it out")


def recipe_config(name: str, label: str | None = None) -> Config:
    """Returns the configuration of a recipe: a built-in one, or "my.module:function" of the working directory.

    Raises ValueError, which begins with `label`, for a recipe that does not exist, fails, or returns no `Config`.
    """
    label = label or f"--recipe {name}"
    module, colon, function = name.partition(":")
    if not colon and name not in RECIPES:
        raise ValueError(f"{label}: known are {', '.join(RECIPES)}; your own is my.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, which `python -m` searches, but a console script does not
    with recipe_errors(label):
        make_recipe = getattr(import_module(module), function, None) if colon else RECIPES[name]
    if not callable(make_recipe):
        raise ValueError(f"{label}: {module} has no function {function!r}")
    with recipe_errors(label):
        config = make_recipe()
    if not isinstance(config, Config):
        raise ValueError(f"{label}: it returns {type(config).__name__}, not a Config")
    return config


@contextmanager
def recipe_errors(label: str) -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{label}: {error}") from error
    except Exception as error:
        # The place is that of a syntax error, else the last frame outside of this file and importlib.
        frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
        places = [(x.filename, x.lineno) for x in frames if x.filename != __file__ and "importlib" not in x.filename]
        if isinstance(error, SyntaxError):
            places = [(error.filename, error.lineno)]
        place = f" at {places[-1][0]}:{places[-1][1]}" if places else ""
        raise ValueError(f"{label}: {type(error).__name__}{place}: {error}") from error
