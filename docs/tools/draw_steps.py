"""Draws the steps of an attention method, as a page to play through or as a picture: the pages of docs/steps.md.

draw_steps.py     the command line
step_frames.py    the sends and blocks of each step, from the communication plan
step_drawing.py   a frame as SVG
step_page.py      an HTML page of all frames, or an SVG file; its template and styles are in templates/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from step_drawing import Drawing, MaskCells
from step_frames import join_frames, timeline
from step_page import MethodSteps, comparison, html_page, svg_file

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import MethodOptions, NamedMethod, Placement, named_method
from armillary.attention.methods.ring import Backward
from armillary.core.internal import writing
from armillary.data.console import exit_on_error, parse
from armillary.plan.arguments import amount
from armillary.train.config import Count, CountOrNone, check_limits

PROGRAM = "python docs/tools/draw_steps.py"
MOST_RANKS = 64
"""Maximum number of ranks in a picture."""
TOKENS_PER_RANK = 8
"""Tokens per rank of the default sequence: a zigzag layout has two chunks of four tokens on each rank."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class StepsOptions:
    """Draws the steps of an attention method: transfers, and the part of the mask that each rank computes meanwhile.

    Ways to start:
      # a page to step through, or all steps as one picture
      python docs/tools/draw_steps.py --attention wallfacer --team 2 --ranks 8 --out steps.html
      python docs/tools/draw_steps.py --attention ring --ranks 4 --out steps.svg
      # three methods side by side
      python docs/tools/draw_steps.py --attention ring wallfacer upipe --ranks 8 --out methods.svg
      # a tree of three segments, balanced over a head axis of 2 and a ring of 4
      python docs/tools/draw_steps.py --attention usp --ulysses 2 --documents 0 8 40 64 --parents -1 0 0 \\
          --layout balanced --out tree.html

    All pictures and numbers come from the method's communication plan.
    """

    out: Path | None = None
    """File to write: .html or .svg."""
    attention: tuple[str, ...] = ("ring",)
    """Methods, named as for --parallel.attention. Several are drawn side by side, as .svg."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 8
    ulysses: CountOrNone = None
    """Ranks on the head axis, for methods on both axes; by default the largest number up to half of the ranks that
    divides heads and ranks."""
    team: CountOrNone = None
    """wallfacer: team size (C)."""
    placement: Placement = "collect_intra"
    """wallfacer: whether the ranks of a team, or those of a ring, are neighbours."""
    heads_per_stage: CountOrNone = None
    """upipe: query heads per stage."""
    backward: Backward = "auto"
    """ring and wallfacer: whether keys or queries rotate in backward."""
    tokens: int | None = None
    """Sequence length over all ranks (N); by default the end of --documents, or 8 per rank. Pictures show only some
    positions of a long one."""
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    """Distribution of positions over sequence ranks."""
    full: bool = False
    """Full mask; by default a causal mask."""
    window: tuple[int, int] | None = None
    """Sliding window: number of keys before and after its own position that a query sees."""
    documents: tuple[int, ...] = ()
    """Boundaries of documents, from 0 to the number of tokens."""
    parents: tuple[int, ...] = ()
    """Makes the documents segments of a tree: the index of each segment's parent, or -1 if it has none."""
    prefixes: tuple[int, ...] = ()
    """Number of tokens at the start of each document that see each other in both directions."""
    chunk: CountOrNone = None
    """Causal attention within chunks of this many tokens."""
    heads: Count = 8
    """Query heads (H)."""
    kv_heads: CountOrNone = None
    """Key/value heads (K); by default as many as query heads."""
    head_dim: Count = 128
    """Head dim (D)."""
    rows: Count = 1
    """Sequences in the batch (B)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    frames: Count = 4
    """Maximum number of frames of each method, if several methods are drawn side by side."""
    json: bool = False
    """Print all numbers as JSON."""

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        if self.tokens is None:
            return self.documents[-1] if self.documents else TOKENS_PER_RANK * self.ranks
        return amount(self, "tokens")

    @property
    def mask(self) -> AttentionMask:
        """The mask that the flags describe.

        Raises:
            ValueError: flags that exclude each other.
        """
        special = [name for name in ("parents", "prefixes", "chunk") if getattr(self, name)]
        if len(special) > 1 or (special and self.full) or (self.window and special and special != ["parents"]):
            flags = [f"--{name}" for name in (*special, *(n for n in ("full", "window") if getattr(self, n)))]
            raise ValueError(f"{' and '.join(flags)} exclude each other: a mask is of one kind")
        documents = list(self.documents) or None
        if self.parents:
            return AttentionMask.tree(documents or [0, self.length], list(self.parents), self.window)
        if self.prefixes:
            return AttentionMask.prefix(documents or [0, self.length], list(self.prefixes))
        if self.chunk:
            return AttentionMask.chunked(self.chunk, documents)
        return AttentionMask(not self.full, self.window, documents)

    @property
    def mask_text(self) -> str:
        """The flags of the mask, such as "causal, window 4 0"."""
        names = ("window", "documents", "parents", "prefixes", "chunk")
        values = {name: getattr(self, name) for name in names if getattr(self, name)}
        texts = (f"{name} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in values.items())
        return ", ".join(["full" if self.full else "causal", *texts])


def main(argv: Sequence[str] | None = None) -> None:
    """Draws, and prints the bytes that each method sends. Exits with 2 and one line if arguments are wrong."""
    with exit_on_error(PROGRAM):
        options = parse(sys.argv[1:] if argv is None else argv, StepsOptions, PROGRAM)
        methods = plan_steps(options)
        if options.out is not None:
            write_steps(options, methods)
        if options.json:
            print(json.dumps(as_dict(options, methods), indent=2))
        else:
            show(options, methods)


def plan_steps(options: StepsOptions) -> list[MethodSteps]:
    """Returns the steps of each method.

    Raises:
        ValueError: a method that does not support the mask, the ranks or an option, or has no communication plan.
    """
    check_limits(options)
    if not options.attention:
        raise ValueError("--attention: at least one method is needed")
    return [method_steps(options, name, f"m{i}" if i else "") for i, name in enumerate(options.attention)]


def method_steps(options: StepsOptions, name: str, prefix: str = "") -> MethodSteps:
    """Returns the steps of one method. `prefix` is put before the ids of its shapes, to make them unique in a file."""
    method = named_method(name, options_for(options, name))
    ulysses = head_ranks(options, method)
    ring, length, mask = options.ranks // ulysses, options.length, options.mask
    layout = method.layout(length, ring, options.layout, mask)
    mask.pairs(length)  # refuses documents that do not end with the sequence
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    work = AttentionShape.of(
        layout,
        mask,
        heads=options.heads,
        kv_heads=kv_heads,
        head_dim=options.head_dim,
        dtype=DTYPES[options.dtype],
        batch=options.rows,
    )
    frames = timeline(method.comm_plan(work, ring, ulysses), options.heads, ulysses)
    # Only a few frames of each method fit side by side, so join steps that belong together.
    if len(options.attention) > 1:
        frames = join_frames(frames)
    drawing = Drawing(frames, MaskCells.of(layout, mask, ulysses), options.ranks, ulysses, prefix)
    mesh = f"ring {ring} x ulysses {ulysses}" if min(ring, ulysses) > 1 else f"{options.ranks} ranks"
    sizes = f"N {length:,}, H {options.heads}, K {kv_heads}, D {options.head_dim}, B {options.rows}, {options.dtype}"
    facts: dict[str, Any] = {"mesh": {"ring": ring, "ulysses": ulysses}, "length": length}
    facts |= {"mask": options.mask_text, "layout": options.layout}
    subtitle = f"{options.mask_text} mask, {options.layout} layout, {sizes}"
    return MethodSteps(f"{method}, {mesh}", subtitle, facts, frames, drawing)


def options_for(options: StepsOptions, name: str) -> MethodOptions:
    """Returns the options for a method. One of several methods gets only options that it has; one alone gets all."""
    all_options = MethodOptions(options.heads_per_stage, options.team, options.placement, options.backward)
    if len(options.attention) == 1:
        return all_options
    method = named_method(name)
    option_names = (*method.sequence.options, *(method.head.options if method.head else ()))
    return MethodOptions(**{option: value for option, value in all_options._asdict().items() if option in option_names})


def head_ranks(options: StepsOptions, method: NamedMethod) -> int:
    """Returns the number of ranks on the head axis.

    Raises:
        ValueError: --ulysses does not divide the ranks, or the method allows another number only.
    """
    if "ulysses" not in method.axes:
        ulysses = 1
    elif "ring" not in method.axes:
        ulysses = options.ranks
    else:
        common = gcd(options.heads, options.ranks)
        divisors = [u for u in range(1, max(2, options.ranks // 2 + 1)) if common % u == 0]
        ulysses = options.ulysses or divisors[-1]
    if options.ulysses not in (None, ulysses) or options.ranks % ulysses:
        raise ValueError(f"--ulysses {options.ulysses}: {method.name} on {options.ranks} ranks takes {ulysses}")
    return ulysses


def write_steps(options: StepsOptions, methods: Sequence[MethodSteps]) -> None:
    """Writes the file that `--out` names.

    Raises:
        ValueError: a suffix other than .html and .svg, or several methods as .html.
        OSError: the file cannot be written.
    """
    assert options.out is not None
    match options.out.suffix.lower(), len(methods):
        case ".html", 1:
            text = html_page(methods[0])
        case ".svg", 1:
            text = svg_file(methods[0])
        case ".svg", _:
            text = comparison(methods, options.frames)
        case ".html", _:
            raise ValueError(f"--out {options.out}: several methods are drawn as .svg")
        case _:
            raise ValueError(f"--out {options.out}: must end with .html or .svg")
    with writing(options.out):
        options.out.write_text(text, "utf-8")


def as_dict(options: StepsOptions, methods: Sequence[MethodSteps]) -> dict[str, Any]:
    """Returns all numbers as JSON values."""
    return {
        "plan": asdict(options) | {"out": options.out and str(options.out)},
        "methods": [method.as_dict for method in methods],
    }


def show(options: StepsOptions, methods: Sequence[MethodSteps]) -> None:
    """Prints the bytes that each method sends, and the name of the written file."""
    for steps in methods:
        print(f"{steps.title}: {steps.subtitle}")
        for totals in steps.frames[-1].sent_bytes:
            kind = totals.kind.replace("_", "-")
            print(f"  {totals.axis}, {kind}: {totals.total:,} bytes in all, {totals.busiest:,} of the busiest rank")
    print(f"written to {options.out}" if options.out else "--out FILE.html or FILE.svg draws the steps")


if __name__ == "__main__":
    main()
