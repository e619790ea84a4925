"""Draws an attention mask, the shard of each rank, and the pairs that each rank computes at each step.

Examples:
  # three documents with a window of a token and the four before it
  python docs/tools/draw_mask.py --documents 0,5,12,32 --window 4,none --length 32 --out mask.png
  # the same documents on four ranks: zigzag shards, a ring
  python docs/tools/draw_mask.py --documents 0,5,12,32 --length 32 --layout zigzag --ranks 4 --out mask.png
  # a prompt of 8 tokens with two completions in a balanced layout; numbers as JSON too
  python docs/tools/draw_mask.py tree --ends 0,8,20,32 --parents none,0,0 --layout balanced --ranks 4 \\
      --out tree.png --json tree.json
  # other kinds, each with its own options
  python docs/tools/draw_mask.py prefix --documents 0,20,32 --prefixes 8,4 --out prefix.png
  python docs/tools/draw_mask.py chunked --size 8 --length 1M --out chunked.svg
  python docs/tools/draw_mask.py image-spans --spans 4:10,16:24 --length 32 --out images.png
  python docs/tools/draw_mask.py blocks --visible 100,110,101 --block 8 --out blocks.png
  python docs/tools/draw_mask.py slices --slice 0:16,0:8,none,none --slice 8:16,8:16,none,0 --out slices.png

Lists are separated by commas. "none" is an unbounded side of a window or band, or the parent of a root.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mask_cells import Shares, shares_of
from mask_picture import draw_mask

from armillary.attention import AttentionMask, Slice
from armillary.attention.internal import MethodOptions
from armillary.attention.mask import Blocks, SliceList, Tree, layout_of
from armillary.core import SequenceLayout
from armillary.core.internal import writing
from armillary.data.console import Column, exit_on_error, print_table, whole_number
from armillary.data.console.units import count_argument

PROGRAM = "python docs/tools/draw_mask.py"
NONE = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws the mask of the command line and prints its numbers. Returns the exit code."""
    options = parse_arguments(arguments)
    with exit_on_error(PROGRAM):
        mask = options.make(options)
        length = options.length or length_of(mask)
        layout = requested_layout(options, mask, length)
        method = MethodOptions(team=options.team)
        if options.out:
            draw_mask(mask, length, options.out, layout, options.method, options=method)
        work = layout and shares_of(mask, layout, options.method, options=method)
        show(mask, length, work)
        if options.json:
            mask_numbers = {"mask": repr(mask), "length": length, "pairs": mask.pairs(length)}
            with writing(options.json):
                options.json.write_text(json.dumps(mask_numbers | (work.as_dict if work else {}), indent=1) + "\n")
    return 0


def length_of(mask: AttentionMask) -> int:
    """Returns the number of tokens that the mask determines.

    Raises:
        ValueError: the mask fits any length.
    """
    pattern = mask.pattern
    if isinstance(pattern, SliceList):
        return max((max(each.queries.stop, each.keys.stop) for each in pattern.bands), default=1)
    if isinstance(pattern, Blocks):
        return pattern.length or pattern.block * len(pattern.visible)
    ends = pattern.ends if isinstance(pattern, Tree) else mask.boundaries()
    if ends is None:
        raise ValueError("--length is needed: a mask without documents fits a sequence of any length")
    return ends[-1]


def requested_layout(options: Namespace, mask: AttentionMask, length: int) -> SequenceLayout | None:
    """Returns the layout over `--ranks`; None without ranks."""
    return None if options.ranks is None else layout_of(options.layout, length, options.ranks, mask)


def show(mask: AttentionMask, length: int, work: Shares | None) -> None:
    """Prints the numbers of pairs, by rank and step."""
    print(f"{mask.pairs(length):,} of {length * length:,} pairs are visible")
    if work is None:
        return
    columns = [Column("rank"), Column("tokens"), Column("pairs"), Column("pairs by step", text=True)]
    steps = (", ".join(f"{pairs:,}" for pairs in rank_pairs) for rank_pairs in work.by_step)
    rows = zip(range(len(work.tokens)), work.tokens, work.by_rank, strict=True)
    print_table(columns, [(*(f"{n:,}" for n in row), text) for row, text in zip(rows, steps, strict=True)])
    print(f"max / mean of pairs: {work.imbalance:.3f}")


# -- the command line -------------------------------------------------------------------------------------------------


def tree_mask(options: Namespace) -> AttentionMask:
    parents = [-1 if parent is None else parent for parent in options.parents]
    return AttentionMask.tree(options.ends, parents, options.window)


Make = Callable[[Namespace], AttentionMask]
KINDS: dict[str, tuple[str, tuple[str, ...], Make]] = {
    "plain": (
        "causal, windows, documents (default)",
        ("documents", "window", "not_causal"),
        lambda x: AttentionMask(not x.not_causal, x.window, x.documents),
    ),
    "tree": ("a tree of segments", ("ends", "parents", "window"), tree_mask),
    "prefix": (
        "prefixes with bidirectional attention",
        ("documents", "prefixes"),
        lambda x: AttentionMask.prefix(x.documents or [0, x.length], x.prefixes),
    ),
    "chunked": (
        "causal within chunks",
        ("size", "origin", "documents"),
        lambda x: AttentionMask.chunked(x.size, x.documents, x.origin),
    ),
    "image-spans": (
        "images within text",
        ("spans", "documents", "window"),
        lambda x: AttentionMask.image_spans(x.spans, x.documents, x.window),
    ),
    "blocks": (
        "a table of blocks",
        ("visible", "block", "causal"),
        lambda x: AttentionMask.blocks(x.visible, x.block, x.length, x.causal),
    ),
    "slices": ("slices, one by one", ("slice",), lambda x: AttentionMask.of_slices(x.slice)),
}


def numbers(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",")]


def numbers_or_none(text: str) -> list[int | None]:
    return [None if part == NONE else whole_number(part) for part in text.split(",")]


def span(text: str) -> range:
    start, stop = map(whole_number, text.split(":"))
    return range(start, stop)


def spans(text: str) -> list[range]:
    return [span(part) for part in text.split(",")]


def one_slice(text: str) -> Slice:
    queries, keys, *bounds = text.split(",")
    low, high = (None if bound == NONE else whole_number(bound) for bound in bounds or (NONE, NONE))
    return Slice(span(queries), span(keys), low, high)


def table(text: str) -> list[list[bool]]:
    if not set(text) <= set("01,"):
        raise ValueError(f"{text!r}: rows of 0 and 1 are needed, such as 100,110,111")
    return [[cell == "1" for cell in row] for row in text.split(",")]


FLAGS: dict[str, dict[str, Any]] = {
    "documents": {"type": numbers, "metavar": "0,..,N", "help": "boundaries of documents"},
    "window": {"type": numbers_or_none, "metavar": "LEFT,RIGHT", "help": "keys that are seen on either side"},
    "not_causal": {"action": "store_true", "help": "later keys are seen too"},
    "causal": {"action": "store_true", "help": "hide later keys within visible blocks"},
    "ends": {"type": numbers, "required": True, "metavar": "0,..,N", "help": "boundaries of segments, depth first"},
    "parents": {"type": numbers_or_none, "required": True, "metavar": "none,0,..", "help": "parent of each segment"},
    "prefixes": {"type": numbers, "required": True, "metavar": "P,..", "help": "prefix tokens of each document"},
    "size": {"type": count_argument(), "required": True, "metavar": "C", "help": "tokens of a chunk"},
    "origin": {"default": "document", "choices": ("document", "row"), "help": "chunks count from its start"},
    "spans": {"type": spans, "required": True, "metavar": "A:B,..", "help": "positions of images"},
    "visible": {"type": table, "required": True, "metavar": "100,110,..", "help": "1 for a visible block of keys"},
    "block": {"type": count_argument(), "required": True, "metavar": "T", "help": "tokens of a block"},
    "slice": {
        "type": one_slice,
        "required": True,
        "action": "append",
        "metavar": "Q0:Q1,K0:K1,LOW,HIGH",
        "help": "queries, keys and the visible band; may be repeated",
    },
}


def parse_arguments(arguments: Sequence[str] | None) -> Namespace:
    """Parses the command line: the kind of mask, followed by its options."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*KINDS, "-h", "--help"):
        words.insert(0, "plain")
    parser = ArgumentParser(PROGRAM, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="KIND", required=True)
    for kind, (text, flags, make) in KINDS.items():
        command = commands.add_parser(kind, help=text, parents=[common_options()])
        command.set_defaults(make=make)
        for flag in flags:
            command.add_argument(f"--{flag.replace('_', '-')}", **FLAGS[flag])
    return parser.parse_args(words)


def common_options() -> ArgumentParser:
    """Options of all kinds."""
    parser = ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--length", type=count_argument(), metavar="N", help="tokens, if the mask does not determine them")
    add("--ranks", type=count_argument(), metavar="P", help="ranks of the sequence axis; draws their work too")
    add("--layout", default="zigzag", help="zigzag, contiguous, striped or balanced (default: zigzag)")
    add("--method", default="ring", help="attention method that assigns pairs to ranks (default: ring)")
    add("--team", type=count_argument(), help="team size of wallfacer")
    add("--out", type=Path, metavar="FILE", help="file of the picture: .png, .svg or .pdf")
    add("--json", type=Path, metavar="FILE", help="file for the numbers")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
