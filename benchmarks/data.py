"""Preparing and loading data compared with common tools, alternating in one run; and the balance of layouts.

    python benchmarks/data.py                           all parts, a few minutes on 2 cores
    python benchmarks/data.py --only loading balance --repeat 9

`prepare` is timed against Hugging Face `datasets.map` with the same tokenizer, from the same JSONL to tokens on disk.
Both must count the same tokens. Loading is timed against torch's DataLoader over a memory map of the same file.
Balance is counted, not timed: (query, key) pairs that the slowest rank computes over the mean.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import torch
from report import median_ratio, write
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

from armillary.attention import AttentionMask
from armillary.attention.methods.wallfacer import Teams
from armillary.attention.tiling.grid import Grid
from armillary.core import SequenceLayout, attention_balance
from armillary.data import ByteTokenizer, PackedSequences, TokenStore, Vocabulary, open_store, python_corpus
from armillary.data.console.units import count_argument
from armillary.data.formats.store_folder import Part, StoreWriter
from armillary.data.prepare import Preparation, prepare
from armillary.data.text.tokenizer import decode_utf8, train_bpe

COPIES = 6
"""Copies of Python's source text, about 12 MB."""
ROW, ROWS, SHARDS = 2**17, 64, 8
"""Tokens of a row, number of rows, shards of a row."""


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeat", type=count_argument(), default=5)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    for name in options.only:
        with TemporaryDirectory() as folder:
            print(PARTS[name](Path(folder), options.repeat), flush=True)


def by_turns(runs: dict[str, Callable[[], int]], repeat: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Returns the seconds of alternating runs, and the result of each in an untimed first round."""
    results = {name: run() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds, results


# -- preparing --------------------------------------------------------------------------------------------------------


def preparing(folder: Path, repeat: int) -> str:
    texts = [decode_utf8(document.text)[0] for document in python_corpus()]
    (folder / "tokenizer.json").write_bytes(train_bpe(iter(texts), 8192).definition)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts * COPIES)
    (folder / "text.jsonl").write_text(lines)
    cores = len(os.sched_getaffinity(0))
    runs: dict[str, Callable[[], int]] = {}
    for workers in sorted({1, cores}):
        runs[f"prepare, {workers}"] = lambda workers=workers: by_prepare(folder, workers)
        runs[f"datasets.map, {workers}"] = lambda workers=workers: by_map(folder, workers)
    seconds, result = by_turns(runs, repeat)
    assert len(set(result.values())) == 1, f"numbers of tokens differ: {result}"
    tokens = next(iter(result.values()))
    rows: list[dict[str, Any]] = []
    for workers in sorted({1, cores}):
        prepare_seconds, map_seconds = seconds[f"prepare, {workers}"], seconds[f"datasets.map, {workers}"]
        rows.append(
            {
                "processes": workers,
                "prepare, million tokens/s": tokens / 1e6 / float(np.median(prepare_seconds)),
                "datasets.map, million tokens/s": tokens / 1e6 / float(np.median(map_seconds)),
                "times as fast": median_ratio(map_seconds, prepare_seconds),
            }
        )
    notes = [
        f"{len(lines) / 1e6:.0f} MB of JSONL, {tokens:,} tokens of a BPE of 8192; from file to files, start included"
    ]
    return write("data-prepare", "From JSONL to tokens", rows, notes)


def by_prepare(folder: Path, workers: int) -> int:
    shutil.rmtree(folder / "ours", ignore_errors=True)
    plan = Preparation([folder / "text.jsonl"], folder / "ours", tokenizer=str(folder / "tokenizer.json"))
    header = prepare(plan, workers)
    return header.tokens - header.documents  # without end-of-document tokens


def by_map(folder: Path, workers: int) -> int:
    for name in ("theirs", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    rows = datasets.load_dataset(
        "json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Threads of libraries compete with processes, so both sides have one thread per process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mapped = rows.map(
        lambda batch: {"input_ids": [result.ids for result in tokenizer.encode_batch_fast(batch["text"])]},
        batched=True,
        num_proc=workers if workers > 1 else None,
        remove_columns=["text"],
    )
    mapped.save_to_disk(str(folder / "theirs"))
    return sum(map(len, mapped.with_format("numpy")["input_ids"]))


# -- loading ----------------------------------------------------------------------------------------------------------


class MappedRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The common way: each rank reads full rows of concatenated tokens and keeps its shard."""

    def __init__(self, path: Path, layout: SequenceLayout, shard: int) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")
        self.positions = layout.positions(shard)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // ROW

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(self.tokens[row * ROW : (row + 1) * ROW + 1].astype(np.int64))
        return tokens[:-1][self.positions], tokens[1:][self.positions]


def loading(folder: Path, repeat: int) -> str:
    store = random_store(folder / "store", ROW * (ROWS + 1))
    rows: list[dict[str, Any]] = []
    for shards in (1, SHARDS):
        layout = SequenceLayout.zigzag(ROW, shards)
        balanced = lambda documents: SequenceLayout.balanced(ROW, SHARDS, documents=documents[0])  # noqa: E731
        packed = PackedSequences(store, layout=layout, shard=0, rows_per_batch=1)
        even = PackedSequences(store, layout=layout, shard=0, rows_per_batch=1, layout_for=balanced)
        mapped = MappedRows(folder / "store" / "tokens.bin", layout, 0)
        runs: dict[str, Callable[[], int]] = {"packed": lambda packed=packed: read(packed)}
        if shards > 1:
            runs["balanced"] = lambda even=even: read(even)
        for workers in (0, 2):
            loader = DataLoader(mapped, batch_size=1, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
            runs[f"loader, {workers}"] = lambda loader=loader: read(loader)
        seconds, _ = by_turns(runs, repeat)
        rows += [row_of(shards, name, seconds, packed, store) for name in runs]
    notes = [
        f"rows of {ROW:,} tokens, {ROWS} of them, tokens and labels as int64; the rank has one shard of them",
        "packed and balanced also give each row's document boundaries; the loader none, and labels across documents",
        "the file is in the page cache, so times are the host's cost of loading; bytes are those of tokens read, a row",
    ]
    return write("data-loading", "From a token store to a rank's batches", rows, notes)


def row_of(
    shards: int, name: str, seconds: dict[str, list[float]], packed: PackedSequences, store: TokenStore
) -> dict[str, Any]:
    before = store.bytes_read
    packed.batch(0)
    read_by_us = store.bytes_read - before
    return {
        "shards": shards,
        "how": {"packed": "PackedSequences", "balanced": "the same, balanced layouts"}.get(name, f"Data{name} workers"),
        "million tokens/s": ROW * ROWS / 1e6 / float(np.median(seconds[name])),
        "times DataLoader's": median_ratio(seconds["loader, 0"], seconds[name]),
        "kB read a row": (2 * ROW if name.startswith("loader") else read_by_us) / 1e3,
    }


def read(batches: Any) -> int:
    """Reads the tokens of `ROWS` batches."""
    source = iter(batches)
    return sum(int(tokens_of(next(source))[0, 0]) for _ in range(ROWS))


def tokens_of(batch: Any) -> torch.Tensor:
    return batch.tokens if hasattr(batch, "tokens") else batch[0]


def random_store(path: Path, tokens: int) -> TokenStore:
    """Random tokens in documents of web-like lengths (log-normal with median 1,100)."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7, 1.5, tokens // 1000).astype(np.int64) + 2
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    data = rng.integers(0, 256, int(lengths.sum()), np.uint16)
    data[np.cumsum(lengths) - 1] = 256
    path.mkdir()
    with StoreWriter(path, np.dtype(np.uint16)) as writer:
        writer.add(Part(data, lengths, rng.integers(0, 2**63, len(lengths)).astype(np.uint64)))
        writer.finish(Vocabulary.of(ByteTokenizer()), {})
    return open_store(path)


# -- balance ----------------------------------------------------------------------------------------------------------

LENGTH = 2**20
Draw = Callable[[np.random.Generator], float]
MIXES: dict[str, Draw] = {
    "web text": lambda rng: rng.lognormal(7, 1.5) + 1,
    "code": lambda rng: 300 * (1 + rng.pareto(0.9)),
    "books among posts": lambda rng: rng.choice([500, 2_000, 8_000, 100_000, 300_000]),
    "one document of 3/5, one of 2/5": lambda rng: LENGTH * 3 // 5,
}
"""Functions that draw the length of the next document."""


def masks() -> dict[str, AttentionMask]:
    """Masks by name: documents of each mix, and other kinds."""
    rng, document_masks = (
        np.random.default_rng(0),
        {n: AttentionMask(documents=boundaries(d)) for n, d in MIXES.items()},
    )
    web = boundaries(MIXES["web text"])
    answers = [0, *(1000 + end for end in web if end < LENGTH - 1000), LENGTH]  # web[0] is 0, the end of the prompt
    groups = [-1 if i % 9 == 0 else i - i % 9 for i in range(len(web) - 1)]
    images = [range(at, at + int(rng.choice([256, 576, 1024]))) for at in range(500, LENGTH - 2000, 2000)]
    visible = np.tril(rng.random((256, 256)) < 0.1) | np.eye(256, dtype=bool)
    return document_masks | {
        "window of 4096": AttentionMask(window=(4095, 0)),
        "a prompt of 1,000, answers": AttentionMask.tree(answers, [-1] + [0] * (len(answers) - 2)),
        "prompts, 8 answers each": AttentionMask.tree(web, groups),
        "prefixes of a third": AttentionMask.prefix(web, [int(size) // 3 for size in np.diff(web)]),
        "chunks of 8192": AttentionMask.chunked(8192),
        "images": AttentionMask.image_spans(images),
        "a tenth of blocks": AttentionMask.blocks(visible.tolist(), LENGTH // 256, causal=True),
    }


def balance(folder: Path, repeat: int) -> str:
    rows: list[dict[str, Any]] = []
    for name, mask in masks().items():
        for ranks in (8, 32):
            start = time.process_time()
            even = SequenceLayout.balanced(LENGTH, ranks, mask=mask)
            seconds = time.process_time() - start
            even_by_keys = SequenceLayout.balanced(LENGTH, ranks, mask=mask, balanced_by="keys")
            zigzag = SequenceLayout.zigzag(LENGTH, ranks)
            row: dict[str, Any] = {"mask": name, "ranks": ranks}
            for kind, layout, by_keys in (("zigzag", zigzag, zigzag), ("balanced", even, even_by_keys)):
                row[f"{kind}: Ring"] = attention_balance(layout, mask=mask)
                row[f"{kind}: TokenRing"] = attention_balance(by_keys, mask=mask, of_keys=True)
                row[f"{kind}: WallFacer, C = 2"] = in_teams(kind, Teams(ranks, 2, "collect_intra"), mask)
            spans = max(len(even.spans(shard)) for shard in range(ranks))
            rows.append(row | {"spans": spans, "ms to choose": round(1000 * seconds, 1)})
    notes = [
        f"slowest rank over mean, {LENGTH:,} tokens; Ring, and AllGatherKV, by a shard's queries, TokenRing by its "
        "keys, WallFacer by its team's queries and the keys of its ring; ms of processor time",
        "spans: of the shard that has most in Ring's balanced layout, as ms; zigzag has 2",
    ]
    return write("data-balance", "Balance of attention under each mask", rows, notes)


def boundaries(draw: Draw) -> list[int]:
    rng, ends = np.random.default_rng(0), [0]
    while ends[-1] < LENGTH:
        ends.append(min(LENGTH, ends[-1] + max(1, int(draw(rng)))))
    return ends


def in_teams(kind: str, teams: Teams, mask: AttentionMask) -> float:
    """Balance by the pairs of each two teams that meet in a ring of keys."""
    layout = teams.by_teams(teams.layout(LENGTH, kind, mask))
    grid, loads = Grid(layout, layout, mask), np.zeros(teams.ranks)
    for ring in teams.rings("keys"):
        for place, rank in enumerate(ring.ranks):
            blocks = (ring.query_key_shards(place, origin) for origin in range(len(ring.ranks)))
            loads[rank] = sum(grid.pairs(*block, batch=1) for block in blocks)
    return float(loads.max() / loads.mean())


PARTS = {"prepare": preparing, "loading": loading, "balance": balance}

if __name__ == "__main__":
    main()
