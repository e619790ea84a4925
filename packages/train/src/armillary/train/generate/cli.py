"""The command line: `armillary-generate`, or `torchrun -m armillary.train.generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import start_process_group
from armillary.data.console.exit import ending
from armillary.data.progress import Bar
from armillary.data.text.streamer import TextStreamer, TwoWayTokenizer
from armillary.models import GPT, Llama, stream
from armillary.train.generate.command import PROGRAM, Generate, prompts_of, read_generate
from armillary.train.generate.loading import TIMEOUT, load_model
from armillary.train.generate.source import find_source, find_tokenizer, stops_of
from armillary.train.parallel import choose_device
from armillary.train.runtime.health.ranks import Ranks


@dataclass(frozen=True)
class Continued:
    """A prompt and what followed it, up to the token that ended it; no text without a tokenizer."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and generates; exits with 2 for what cannot be, with one line that says why."""
    with ending(PROGRAM):
        run(read_generate(sys.argv[1:] if argv is None else argv))


def run(asked: Generate) -> list[Continued]:
    """Continues all prompts; rank 0 prints. Every rank must call it, within a process group or without one.

    Raises:
        ValueError: no such model, no tokenizer, prompts that are none, or more tokens than the model has positions.
    """
    source = find_source(asked.source, asked.step)
    tokenizer = None if asked.ids else find_tokenizer(source, asked.tokenizer, asked.begin_of_document)
    if tokenizer is None and not asked.ids:
        raise ValueError(f"{asked.source}: no tokenizer is known; name one by --tokenizer, or give tokens by --ids")
    device, mine = choose_device(asked.train, "--device"), not dist.is_initialized()
    if mine:
        start_process_group(device.type, TIMEOUT)
    ranks = Ranks(TIMEOUT)
    prompts = ranks.on_first(lambda: prompts_of(asked))
    with Bar("loading", quiet=asked.json or ranks.rank > 0):
        model, step = load_model(asked, source, device, ranks)
    rows = [encode(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
    check_room(model, rows, asked.tokens)
    stops = stops_of(source, tokenizer) if asked.stop else []
    found = [
        continued(model, prompt, row, asked, tokenizer, stops, show=ranks.rank == 0 and not asked.json)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    if asked.json and ranks.rank == 0:
        print(json.dumps({"source": str(asked.source), "step": step, "prompts": list(map(asdict, found))}, indent=2))
    ranks.close()
    if mine:
        dist.destroy_process_group()
    return found


def encode(prompt: str, tokenizer: TwoWayTokenizer | None, vocabulary: int) -> list[int]:
    """The tokens of a prompt, whose numbers it has where there is no tokenizer.

    Raises:
        ValueError: no numbers, or tokens that the model does not know.
    """
    if tokenizer is not None:
        found = tokenizer.encode(prompt).tolist()
    else:
        try:
            found = [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError as error:
            raise ValueError(
                f'--prompt {prompt!r}: with --ids it must be numbers of tokens, such as "5 17 9"'
            ) from error
    if not found:
        raise ValueError(f"--prompt {prompt!r} has no tokens")
    if unknown := [token for token in found if not 0 <= token < vocabulary]:
        raise ValueError(f"--prompt has token {unknown[0]}, and the model knows 0..{vocabulary - 1}; see --tokenizer")
    return found


def check_room(model: Llama | GPT, rows: Sequence[Sequence[int]], tokens: int) -> None:
    """Refuses prompts for which a GPT has too few positions: all of them, before the first is continued."""
    longest, most = max(map(len, rows)), model.config.max_positions
    if isinstance(model, GPT) and longest + tokens > most:
        raise ValueError(
            f"a prompt of {longest:,} tokens and --tokens {tokens:,}, but the model has learned {most:,} positions; "
            f"give at most --tokens {max(most - longest, 0):,} or a shorter prompt"
        )


def continued(
    model: Llama | GPT,
    prompt: str,
    row: list[int],
    asked: Generate,
    tokenizer: TwoWayTokenizer | None,
    stops: Sequence[int],
    show: bool,
) -> Continued:
    """What follows a prompt, shown as it comes."""
    streamer = TextStreamer(tokenizer, write if show else lambda _: None)
    ids = list[int]()
    if show:
        write(prompt)
    for token in map(int, tokens_of(model, row, asked, stops)):
        if token in stops:
            break
        ids.append(token)
        streamer.put(token)
    streamer.end()
    if show:
        write("\n")
    return Continued(prompt, row, ids, None if tokenizer is None else streamer.text)


def tokens_of(model: Llama | GPT, row: list[int], asked: Generate, stops: Sequence[int]) -> Iterator[Tensor]:
    """The tokens that follow, the same on every rank."""
    device = next(model.parameters()).device
    return stream(
        model,
        torch.tensor([row], device=device),
        new_tokens=asked.tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        stop=stops,
    )


def write(text: str) -> None:
    print(text, end="", flush=True)
