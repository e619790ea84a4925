"""The command line: `armillary-generate`, or `torchrun -m armillary.train.generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from armillary.core import start_process_group
from armillary.data.console.exit import exit_on_error
from armillary.data.progress import Bar
from armillary.data.text.streamer import TextStreamer, TwoWayTokenizer
from armillary.models import GPT, Llama, stream
from armillary.train.generate.command import PROGRAM, Generate, prompts_of, read_generate
from armillary.train.generate.loading import TIMEOUT, load_model
from armillary.train.generate.source import find_source, find_tokenizer, stops_of
from armillary.train.parallel import choose_device
from armillary.train.runtime.health.ranks import Ranks


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens after it, up to a stop token. `text` is None without a tokenizer."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-generate`. Exits with 2 and one line on invalid input."""
    with exit_on_error(PROGRAM):
        run(read_generate(sys.argv[1:] if argv is None else argv))


def run(options: Generate) -> list[Continuation]:
    """Continues all prompts; rank 0 prints. Every rank must call it, within a process group or without one.

    Raises:
        ValueError: no such model, no tokenizer, an invalid prompt, or more tokens than the model has positions.
    """
    # 1. Model folder and tokenizer.
    source = find_source(options.source, options.step)
    tokenizer = None if options.ids else find_tokenizer(source, options.tokenizer, options.begin_of_document)
    if tokenizer is None and not options.ids:
        raise ValueError(f"{options.source}: no tokenizer is known; name one by --tokenizer, or give tokens by --ids")
    # 2. The process group, and the sharded model.
    device, owns_group = choose_device(options.train, "--device"), not dist.is_initialized()
    if owns_group:
        start_process_group(device.type, TIMEOUT)
    ranks = Ranks(TIMEOUT)
    prompts = ranks.on_first(lambda: prompts_of(options))
    with Bar("loading", quiet=options.json or ranks.rank > 0):
        model, step = load_model(options, source, device, ranks)
    # 3. All prompts are checked before the first one is continued.
    rows = [encode(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
    check_positions(model, rows, options.tokens)
    stops = stops_of(source, tokenizer) if options.stop else []
    print_text = ranks.rank == 0 and not options.json
    continuations = [
        continue_prompt(model, prompt, row, options, tokenizer, stops, print_text)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    if options.json and ranks.rank == 0:
        report = {"source": str(options.source), "step": step, "prompts": [asdict(item) for item in continuations]}
        print(json.dumps(report, indent=2))
    ranks.close()
    if owns_group:
        dist.destroy_process_group()
    return continuations


def encode(prompt: str, tokenizer: TwoWayTokenizer | None, vocabulary: int) -> list[int]:
    """Returns the token ids of a prompt. Without a tokenizer the prompt lists the ids themselves.

    Raises:
        ValueError: no numbers, no tokens, or tokens outside the model's vocabulary.
    """
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


def check_positions(model: Llama | GPT, rows: Sequence[Sequence[int]], tokens: int) -> None:
    """Raises ValueError if a GPT has too few positions for any prompt, before the first one is continued."""
    longest, max_positions = max(map(len, rows)), model.config.max_positions
    if isinstance(model, GPT) and longest + tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest:,} tokens and --tokens {tokens:,}, but the model has learned {max_positions:,} "
            f"positions; give at most --tokens {max(max_positions - longest, 0):,} or a shorter prompt"
        )


def continue_prompt(
    model: Llama | GPT,
    prompt: str,
    row: list[int],
    options: Generate,
    tokenizer: TwoWayTokenizer | None,
    stops: Sequence[int],
    print_text: bool,
) -> Continuation:
    """Generates the tokens after a prompt, the same on every rank; prints each at once if `print_text`."""

    def write(text: str) -> None:
        if print_text:
            print(text, end="", flush=True)

    tokens = stream(
        model,
        torch.tensor([row], device=next(model.parameters()).device),
        new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=stops,
    )
    write(prompt)
    streamer, ids = TextStreamer(tokenizer, write), list[int]()
    for token in map(int, tokens):
        if token in stops:
            break
        ids.append(token)
        streamer.put(token)
    streamer.end()
    write("\n")
    return Continuation(prompt, row, ids, None if tokenizer is None else streamer.text)
