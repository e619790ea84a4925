"""Options of the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from armillary.data.console import parse, refuse_removed
from armillary.models import Sampling
from armillary.train.config.overlay import check_limits
from armillary.train.config.sections import Count, CountOrNone, Several, TrainConfig

PROGRAM = "armillary-generate"
REMOVED = {
    "--parallel.tp": "it is --tp",
    "--parallel": "prompts are no longer sharded, and weights are sharded over all ranks; leave it out, or give --tp",
}
"""Flags of earlier versions, with what to write instead."""


@dataclass(frozen=True)
class Generate:
    """Continues prompts with a model that armillary-train has trained, or with a model in a Hugging Face folder.

    Four ways to start:
      # the newest checkpoint of a run, by greedy decoding
      armillary-generate outputs --prompt "def main("
      # several prompts, with tokens drawn at random
      armillary-generate outputs --prompt "import " "class " --tokens 1k --temperature 0.8 --top-p 0.95
      # a Hugging Face folder, and a prompt from a file or a pipe (-)
      armillary-generate path/to/folder --prompt-file book.txt
      # weights that exceed one device: each rank has a share of them, and computes the whole prompt
      torchrun --nproc-per-node 4 -m armillary.train.generate path/to/folder --prompt "import "

    Each rank reads only its shards of the weights; rank 0 prints. Greedy decoding gives the same tokens on any number
    of ranks. Text is printed as it is generated. Prompts are continued one after the other.
    """

    source: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run, one of its checkpoints (step-N), or a Hugging Face folder."""
    prompt: Several[str] = ()
    """Texts to continue; with --ids token ids, such as "5 17 9"."""
    prompt_file: Path | None = None
    """File with one more prompt; - is standard input."""
    tokens: Count = 200
    """New tokens for each prompt, at most."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: CountOrNone = None
    """Draw from this many of the most likely tokens."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens with this total probability."""
    seed: int = 0
    """Seed of the draws."""
    step: CountOrNone = None
    """Checkpoint of a run; by default the newest."""
    tokenizer: str | None = None
    """tokenizer.json, a folder with one, or "bytes"; by default the tokenizer of the run or the folder."""
    begin_of_document: str | None = None
    """Name of a token in front of each prompt; by default that of the store, or the tokenizer's own."""
    ids: bool = False
    """Read prompts and print continuations as token ids."""
    stop: bool = True
    """End at the tokenizer's end-of-document token, or at the end tokens in a Hugging Face folder."""
    json: bool = False
    """Print JSON at the end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the machine has a GPU for each of its ranks, else cpu."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: bfloat16 on cuda, else float32."""
    tp: Count = 1
    """Tensor-parallel ranks for heads, MLP and vocabulary; FSDP shards the weights over all other ranks."""

    @property
    def train(self) -> TrainConfig:
        """Device and precision, as a section of the trainer's configuration."""
        return TrainConfig(device=self.device, precision=self.precision)


def read_generate(argv: Sequence[str]) -> Generate:
    """Parses and checks the options.

    Raises:
        ValueError: an unknown flag, a value of the wrong kind or out of range, or no prompt.
    """
    refuse_removed(argv, REMOVED)
    options = parse(argv, Generate, PROGRAM)
    check_limits(options)
    Sampling(options.temperature, options.top_k, options.top_p)  # raises for values out of range
    if not options.prompt and options.prompt_file is None:
        raise ValueError('no prompt: give --prompt "...", or --prompt-file FILE (- for standard input)')
    return options


def prompts_of(options: Generate) -> list[str]:
    """Returns all prompts. Call it on rank 0, the only rank with standard input.

    A line break at the end of the file is not part of the prompt.

    Raises:
        ValueError: the file cannot be read, or a prompt is empty.
    """
    prompts, path = list(options.prompt), options.prompt_file
    if path is not None:
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"--prompt-file {path}: cannot be read ({reason})") from error
        prompts.append(text.removesuffix("\n"))
    if "" in prompts:
        raise ValueError("an empty prompt: give at least one token to continue")
    return prompts
