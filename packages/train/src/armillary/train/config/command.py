"""The command line: a recipe, overridden by a file, overridden by flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Annotated

import tyro

from armillary.data.parsing import parse, parse_known
from armillary.train import recipes
from armillary.train.config import Config
from armillary.train.config.overlay import differences, overlaid, read_settings

PROGRAM = "armillary-train"
RECIPES: dict[str, Callable[[], Config]] = {name: getattr(recipes, name) for name in recipes.__all__}
"""The names that people type."""
RENAMED = {
    "data.rows": "data.global_batch_size",
    "data.document_mask": "data.documents",
    "optimizer.on_host": "optimizer.cpu_offload",
}
"""Keys of earlier versions."""


@dataclass(frozen=True)
class Source:
    """Where a configuration comes from, before flags override it."""

    recipe: str | None = None
    """debug (default), llama3_{8b_128k,8b_1m,8b_5m,70b_128k}, gpt_wallfacer_{3b,7b}, finetune or my.module:function."""
    config: Path | None = None
    """TOML file of armillary-plan, armillary-tune or your own, or the config.json of an earlier run."""


@dataclass(frozen=True)
class Command(Source):
    r"""Trains a LLaMA or a GPT with context parallelism and FSDP2, under torchrun or on one process.

    Five ways to start:
      # a first run: a million parameters, one process
      armillary-train
      # a recipe on 8 GPUs, with your tokens
      torchrun --nproc-per-node 8 -m armillary.train --recipe llama3_8b_128k \
          --data.path STORE
      # long context: 8-way context parallelism, over heads (ulysses) and tokens (ring)
      torchrun --nproc-per-node 8 -m armillary.train --parallel.cp 8 \
          --data.sequence-length 128Ki
      # what armillary-plan or armillary-tune chose
      torchrun --nproc-per-node 8 -m armillary.train --config planned.toml
      # mesh, shards and shapes of a run, without GPUs
      armillary-train --recipe llama3_8b_1m --dry-run

    The same command resumes from the newest checkpoint. The file overrides the recipe, and flags override both.
    """

    dry_run: bool = False
    """Show mesh, shards and shapes, and stop; memory and time: `armillary-plan run`."""
    ranks: int | None = None
    """Dry run: number of ranks; by default torchrun's, else the product of the axes."""
    json: bool = False
    """Dry run: print JSON."""
    trace: Path | None = None
    """Short for --log.trace."""
    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def read_command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """The command, and its overrides as lines to print: the recipe, and what differs from it.

    Raises:
        ValueError: no such recipe or file, an unknown key, or a value of the wrong kind.
    """
    source, recipe, config = read_source(argv, PROGRAM)
    command = parse(argv, Command, PROGRAM, Command(source.recipe, source.config, run=config))
    check_dry(command)
    if command.trace is not None:
        log = replace(command.run.log, trace=command.trace)
        command = replace(command, run=replace(command.run, log=log))
    return command, overrides(source, recipe, command.run)


def check_dry(command: Command) -> None:
    """Refuses flags of a dry run without --dry-run."""
    plain = Command()
    given = [name for name in ("ranks", "json") if getattr(command, name) != getattr(plain, name)]
    if given and not command.dry_run:
        raise ValueError(f"--{given[0]} is for a dry run; add --dry-run, or leave it out")


def read_source(argv: Sequence[str], program: str) -> tuple[Source, Config, Config]:
    """(recipe and file of a command line, the recipe's configuration, and that with the file's overrides).

    Raises:
        ValueError: no such recipe or file, an unknown key, or a value of the wrong kind.
    """
    source = parse_known(argv, Source, program)
    settings = {} if source.config is None else read_settings(source.config)
    named = settings.pop("recipe", "debug")
    if not isinstance(named, str):
        raise ValueError(f"--config {source.config}: recipe = {named!r} is no name")
    name = named if source.recipe is None else source.recipe
    found = find_recipe(name)
    with recipe_errors(name):
        recipe = found()
    if not isinstance(recipe, Config):
        raise ValueError(f"--recipe {name}: it returns {type(recipe).__name__}, not a Config")
    return replace(source, recipe=name), recipe, overlaid(recipe, settings, source.config or Path(), RENAMED)


def overrides(source: Source, recipe: Config, config: Config) -> list[str]:
    """The recipe's name, and a line for each field that differs from it."""
    return [f"recipe: {source.recipe}", *(f"  {line}" for line in differences(recipe, config))]


def find_recipe(name: str) -> Callable[[], object]:
    """The recipe of this name, or the function in "my.module:function", seen from the working directory.

    Raises:
        ValueError: there is none.
    """
    module, colon, function = name.partition(":")
    if not colon:
        if name not in RECIPES:
            raise ValueError(f"--recipe {name}: known are {', '.join(RECIPES)}; your own is my.module:function")
        return RECIPES[name]
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it; a script has not
    with recipe_errors(name):
        found = getattr(import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"--recipe {name}: {module} has no function {function!r}")
    return found


@contextmanager
def recipe_errors(recipe: str) -> Generator[None]:
    """Turns whatever a recipe's own code raises into a ValueError that says where."""
    try:
        yield
    except Exception as error:
        place = "" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}{location_of(error)}: "
        raise ValueError(f"--recipe {recipe}: {place}{error}") from error


def location_of(error: Exception) -> str:
    """File and line in the recipe's own code, neither ours nor Python's."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    found = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    ours = [frame for frame in found if Path(frame.filename) != Path(__file__)]
    last = next((frame for frame in reversed(ours) if "importlib" not in frame.filename), None)
    return "" if last is None else f" at {last.filename}:{last.lineno}"
