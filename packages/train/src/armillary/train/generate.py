"""`armillary-generate`: text from a run's checkpoint or a Hugging Face folder. Several ranks shard the weights.

Under torchrun it is `torchrun -m armillary.train.generate`. `run` finds the model and its tokenizer on disk, loads each
rank's shards of the weights, and continues one prompt after the other, alike on every rank; rank 0 prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record

from armillary.core import build_mesh, start_process_group, world_size
from armillary.core.internal import read_json
from armillary.data import ByteTokenizer
from armillary.data.console import Bar, exit_on_error, one_line, parse, refuse_removed
from armillary.data.internal import TextStreamer, TwoWayTokenizer, has_tokenizer, read_tokenizer
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, Sampling, load_pretrained, pretrained_config, stream
from armillary.models.internal import CONFIG, ends_of_text, weight_map
from armillary.train.build import precision, shard_model
from armillary.train.checkpoint.checkpoints import SavedCheckpoint
from armillary.train.checkpoint.output_folder import COMPLETE, CheckpointFolder
from armillary.train.checkpoint.tensors_and_manifest import Damaged
from armillary.train.config.overlay import check_limits
from armillary.train.config.sections import Config, Count, CountOrNone, ParallelConfig, Several, TrainConfig
from armillary.train.device import choose_device
from armillary.train.ranks import Ranks
from armillary.train.run_tokenizer import TokenSource

PROGRAM = "armillary-generate"

# Time-out of collectives: long enough for the slowest rank to read its weights.
TIMEOUT = timedelta(minutes=30)

# Flags of earlier versions, with what to write instead.
REMOVED = {
    "--parallel.tp": "it is --tp",
    "--parallel": "prompts are no longer sharded, and weights are sharded over all ranks; leave it out, or give --tp",
}


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


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-generate`. Prints one line and exits with 2 on invalid input."""
    with exit_on_error(PROGRAM):
        run(read_generate(sys.argv[1:] if argv is None else argv))


def read_generate(argv: Sequence[str]) -> Generate:
    refuse_removed(argv, REMOVED)
    options = parse(argv, Generate, PROGRAM)
    check_limits(options)
    Sampling(options.temperature, options.top_k, options.top_p)  # raises for values out of range
    if not options.prompt and options.prompt_file is None:
        raise ValueError('no prompt: give --prompt "...", or --prompt-file FILE (- for standard input)')
    return options


@dataclass(frozen=True)
class Continuation:
    """A prompt and its continuation: `ids` without the stop token, and their text, None without a tokenizer."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str | None


def run(options: Generate) -> list[Continuation]:
    """Continues all prompts; rank 0 prints them. Every rank must call it. Starts a process group if there is none.

    Raises:
        ValueError: no model or tokenizer is found, a prompt is invalid, or the model has too few positions.
    """
    # 1. Model folder and tokenizer.
    source = find_source(options.source, options.step)
    tokenizer = None if options.ids else find_tokenizer(source, options.tokenizer, options.begin_of_document)
    # 2. The process group, and the model with its sharded weights.
    device, owns_group = choose_device(options.train, "--device"), not dist.is_initialized()
    if owns_group:
        start_process_group(device.type, TIMEOUT)
    ranks = Ranks(TIMEOUT)
    prompts = ranks.on_first(lambda: prompts_of(options))
    with Bar("loading", quiet=options.json or ranks.rank > 0):
        model, step = load_model(options, source, device, ranks)
    # 3. All prompts are checked before the first one is continued. A GPT has learned positions up to a maximum.
    prompt_ids = [encode(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
    longest, max_positions = max(map(len, prompt_ids)), model.config.max_positions
    if isinstance(model, GPT) and longest + options.tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest:,} tokens and --tokens {options.tokens:,}, but the model has learned "
            f"{max_positions:,} positions; give at most --tokens {max(max_positions - longest, 0):,} or a shorter "
            "prompt"
        )
    # 4. Tokens that end a text: those that the Hugging Face folder names, else the tokenizer's end of document.
    stops = ends_of_text(source.folder) if source.checkpoints is None else None
    if stops is None:
        stops = [] if tokenizer is None else [tokenizer.end_of_document]
    stops = stops if options.stop else []
    # 5. Continue one prompt after the other, the same on every rank. Rank 0 prints each token once it is generated.
    print_text, continuations = ranks.rank == 0 and not options.json, list[Continuation]()

    def write(text: str) -> None:
        if print_text:
            print(text, end="", flush=True)

    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        tokens = stream(
            model,
            torch.tensor([ids], device=device),
            new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop=stops,
        )
        write(prompt)
        streamer, new_ids = TextStreamer(tokenizer, write), list[int]()
        for token in map(int, tokens):
            if token in stops:  # the stop token itself is no part of the text
                break
            new_ids.append(token)
            streamer.put(token)
        streamer.end()
        write("\n")
        continuations.append(Continuation(prompt, ids, new_ids, None if tokenizer is None else streamer.text))
    if options.json and ranks.rank == 0:
        report = {"source": str(options.source), "step": step, "prompts": [asdict(item) for item in continuations]}
        print(json.dumps(report, indent=2))
    ranks.close()
    if owns_group:
        dist.destroy_process_group()
    return continuations


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Args:
        folder: a Hugging Face folder, or the output folder of a run.
        checkpoints: checkpoints of a run; None for a Hugging Face folder.
        step: step of the checkpoint; None: the newest intact one.
    """

    folder: Path
    checkpoints: CheckpointFolder | None = None
    step: int | None = None


def find_source(path: Path, step: int | None) -> ModelSource:
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; give the output folder of a run, or a Hugging Face folder")
    # 1. One checkpoint of a run.
    step_name = COMPLETE.fullmatch(path.name)
    if step_name and (path / "manifest.json").exists():
        if step not in (None, int(step_name[1])):
            raise ValueError(f"--step {step}: {path} is step {step_name[1]}; give the run's output folder")
        # The path is OUTPUT/checkpoint/step-N.
        return ModelSource(path.resolve().parent.parent, CheckpointFolder(path.parent), int(step_name[1]))
    # 2. The output folder of a run.
    if (path / "checkpoint").is_dir():
        checkpoints = CheckpointFolder(path / "checkpoint")
        steps = checkpoints.steps()
        if not steps:
            raise ValueError(f"{checkpoints.path}: no checkpoint in it yet")
        if step is not None and step not in steps:
            raise ValueError(f"--step {step}: {checkpoints.path} has {', '.join(map(str, steps))}")
        return ModelSource(path, checkpoints, step)
    # 3. A folder with a config.json, which Hugging Face and our runs write with different fields.
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if "model_type" in config:
        if step is not None:
            raise ValueError(f"--step {step}: {path} is a Hugging Face folder, and has no steps; leave it out")
        return ModelSource(path)
    if "train" in config:
        raise ValueError(f"{path}: the run has no checkpoint yet")
    raise ValueError(f"{path}: holds neither checkpoints of a run (checkpoint/step-N) nor a Hugging Face {CONFIG}")


def find_tokenizer(source: ModelSource, name: str | None, begin: str | None) -> TwoWayTokenizer:
    """Returns the tokenizer `name`, or that of the run or folder; `begin` names a token in front of each prompt."""
    if name == "bytes":
        return ByteTokenizer()
    if name is not None:
        return read_tokenizer(Path(name), begin)
    try:
        if source.checkpoints is not None:
            return TokenSource.read(source.folder).tokenizer(begin)[0]
        if has_tokenizer(source.folder):
            return read_tokenizer(source.folder, begin)
        raise ValueError("the folder has none")
    except ValueError as error:
        advice = "name one by --tokenizer, or give tokens by --ids"
        raise ValueError(f"{source.folder}: no tokenizer is known ({error}); {advice}") from error


def load_model(
    options: Generate, source: ModelSource, device: torch.device, ranks: Ranks
) -> tuple[Llama | GPT, int | None]:
    """Returns the model with its weights, and the step of its checkpoint (None for a Hugging Face folder). Collective.

    Raises ValueError on every rank if no checkpoint is intact, or weights or --tp do not fit the model.
    """
    # 1. A Hugging Face folder.
    folder = source.checkpoints
    if folder is None:
        weight_map(source.folder)  # raises for a folder without weights, before memory is allocated for them
        model = empty_model(options, pretrained_config(source.folder), device)
        ranks.on_all(lambda: load_pretrained(model, source.folder))
        return model, None
    # 2. A checkpoint: that of the step, or the newest intact one.
    if source.step is not None:
        try:
            checkpoint = SavedCheckpoint.open(folder, source.step, ranks)
        except Damaged as damage:
            raise ValueError(f"{folder.path_of(source.step)}: {damage}; give another --step") from damage
    else:
        checkpoint = SavedCheckpoint.newest(folder, ranks)
        if checkpoint is None:
            raise ValueError(f"{folder.path}: no checkpoint in it yet")
    step = checkpoint.manifest.step
    for damaged_step, fault in checkpoint.newer_faults.items() if ranks.rank == 0 else ():
        print(one_line(f"{PROGRAM}: step-{damaged_step}: {fault}; going back to step-{step}"), file=sys.stderr)
    model = empty_model(options, checkpoint.config(), device)
    state = get_model_state_dict(model)
    ranks.on_all(lambda: checkpoint.tensors.fill({"model": state}))
    set_model_state_dict(model, state)
    return model, step


def empty_model(options: Generate, sizes: LlamaConfig | GPTConfig, device: torch.device) -> Llama | GPT:
    ranks = world_size()
    if ranks % options.tp:
        raise ValueError(f"--tp {options.tp}: it must divide the number of ranks, {ranks}")
    # Ranks of `ring` share one text: they agree on its tokens, and FSDP shards the weights over them.
    config = Config(parallel=ParallelConfig(attention="ring"), train=options.train)
    mesh = build_mesh(device.type, ring=ranks // options.tp, tp=options.tp, timeout=TIMEOUT, high_priority=())
    model, _ = shard_model(sizes, config, mesh, precision(config, device))
    model.to_empty(device=device)
    return model


def prompts_of(options: Generate) -> list[str]:
    """Returns all prompts. Call it on rank 0, the only rank with standard input.

    A line break at the end of the file is not part of the prompt.
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


def encode(prompt: str, tokenizer: TwoWayTokenizer | None, vocabulary: int) -> list[int]:
    """Returns the token ids of a prompt. Without a tokenizer the prompt lists the ids themselves."""
    if tokenizer is not None:
        tokens = tokenizer.encode(prompt).tolist()
    else:
        try:
            tokens = [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError as error:
            raise ValueError(
                f'--prompt {prompt!r}: with --ids it must be numbers of tokens, such as "5 17 9"'
            ) from error
    if not tokens:
        raise ValueError(f"--prompt {prompt!r} has no tokens")
    if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
        raise ValueError(f"--prompt has token {unknown[0]}, and the model knows 0..{vocabulary - 1}; see --tokenizer")
    return tokens


if __name__ == "__main__":
    record(main)()  # writes an error to the file in which torchrun looks for the root cause of a failure
