"""The command line: `armillary-generate`, or `torchrun -m armillary.train.generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from armillary.core import start_process_group
from armillary.data.console import Bar, exit_on_error
from armillary.data.parts import TextStreamer, TwoWayTokenizer
from armillary.models import GPT, Llama, stream
from armillary.train.generate.command import PROGRAM, Generate, prompts_of, read_generate
from armillary.train.generate.loading import TIMEOUT, load_model
from armillary.train.generate.source import find_source, find_tokenizer, stops_of
from armillary.train.parallel import choose_device
from armillary.train.runtime.health.ranks import Ranks


@dataclass(frozen=True)
class Continuation:
    """A prompt and its generated continuation.

    Args:
        prompt_ids: token ids of the prompt.
        ids: generated token ids, without the stop token.
        text: text of `ids`; None without a tokenizer.
    """

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `armillary-generate`. Prints one line and exits with 2 on invalid input."""
    with exit_on_error(PROGRAM):
        run(read_generate(sys.argv[1:] if argv is None else argv))


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
    # 3. All prompts are checked before the first one is continued.
    prompt_ids = [encode(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
    check_positions(model, max(map(len, prompt_ids)), options.tokens)
    stops = stops_of(source, tokenizer) if options.stop else []
    print_text = ranks.rank == 0 and not options.json
    continuations = [
        continue_prompt(model, prompt, ids, options, tokenizer, stops, print_text)
        for prompt, ids in zip(prompts, prompt_ids, strict=True)
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
        ValueError: the prompt has no tokens, tokens outside the model's vocabulary, or words that are not ids.
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


def check_positions(model: Llama | GPT, longest: int, tokens: int) -> None:
    """Raises ValueError if a GPT has too few learned positions for the longest prompt and `tokens` new tokens."""
    max_positions = model.config.max_positions
    if isinstance(model, GPT) and longest + tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest:,} tokens and --tokens {tokens:,}, but the model has learned {max_positions:,} "
            f"positions; give at most --tokens {max(max_positions - longest, 0):,} or a shorter prompt"
        )


def continue_prompt(
    model: Llama | GPT,
    prompt: str,
    prompt_ids: list[int],
    options: Generate,
    tokenizer: TwoWayTokenizer | None,
    stops: Sequence[int],
    print_text: bool,
) -> Continuation:
    """Generates the continuation of a prompt, the same on every rank.

    Args:
        prompt_ids: token ids of the prompt.
        stops: token ids that end the continuation.
        print_text: True: print the prompt, and each token as soon as it is generated.
    """

    def write(text: str) -> None:
        if print_text:
            print(text, end="", flush=True)

    tokens = stream(
        model,
        torch.tensor([prompt_ids], device=next(model.parameters()).device),
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
    return Continuation(prompt, prompt_ids, ids, None if tokenizer is None else streamer.text)
