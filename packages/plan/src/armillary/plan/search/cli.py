"""`armillary-plan search`: runs the search, and prints its result as tables or JSON, or draws it as stacked bars."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import floor, log10
from pathlib import Path
from typing import Any

from armillary.attention.internal import methods_without_plan
from armillary.data.console import (
    Bar,
    Column,
    check_picture,
    gib,
    parse,
    picture,
    print_lines,
    print_table,
    print_written,
)
from armillary.plan.arguments import is_hybrid, model_size
from armillary.plan.latent_models import trainer_reads
from armillary.plan.memory.room import advice, policy_text
from armillary.plan.search.search import NEEDED, Choice, SearchOptions, SearchResult, best_of, search
from armillary.plan.search.trainer_config import command_line, write_choice

FIGURES = tuple(map(Column, ("step (s)", "MFU (%)", "device (GiB)", "host (GiB)")))
CHOICES = (
    *(Column(name, text=True) for name in ("attention", "mesh")),
    *FIGURES,
    *(Column(name, text=True, own_line=True) for name in ("keeps", "reason")),
)
STATE_LAYOUTS = (
    *(Column(name, text=True) for name in ("layout", "attention", "mesh")),
    *map(Column, ("step (s)", "sent by a rank (MB)")),
)
POLICIES = (Column("keeps", text=True), *FIGURES, Column("fits", text=True))
# Parts of a step that are shorter than this fraction of the slowest drawn step are not drawn.
DRAWN_SHARE = 0.002
PARTS = (Column("part of a step", text=True), Column("share (%)"), Column("time (ms)"))


def main(argv: Sequence[str], program: str) -> bool:
    options = parse(argv, SearchOptions, program)
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    gc.freeze()  # torch's millions of objects, which garbage collections during the search would visit: a quarter of it
    with Bar(quiet=options.json) as bar:
        result = search(options, partial(bar.show, "meshes and methods"))
    if result.fitting and options.out is not None:
        write_choice(result, options.out)
        print_written(options.out)
    if result.fitting and options.plot is not None:
        print_written(draw(result, options.plot))
    if options.json:
        print(json.dumps(as_dict(result), indent=2))
    else:
        show(result)
    return bool(result.fitting)


def as_dict(result: SearchResult) -> dict[str, Any]:
    """Returns all choices, with the parts of their times, as JSON values."""
    changes = {} if result.fitting else {"advice": advice(result.choices[0].job, result.cluster, result.room)}
    return changes | {
        "plan": {name: str(x) if isinstance(x, Path) else x for name, x in asdict(result.options).items()},
        "model": asdict(result.model),
        "cluster": asdict(result.cluster),
        "room": asdict(result.room),
        "tokens": result.length,
        "choices": [
            {
                "axes": choice.candidate.mesh.axes,
                "attention": asdict(choice.candidate.attention),
                "layout": choice.candidate.layout,
                "contiguous_states": choice.candidate.contiguous_states,
                "checkpointing": asdict(choice.job.checkpointing),
                "zero_stage": choice.job.zero_stage,
                "on_host": choice.job.on_host,
                "fits": choice.fits,
                "seconds": choice.time.seconds,
                "parts": choice.time.parts(),
                "mfu": choice.mfu,
                "sent_bytes": choice.sent_bytes,
                "sends_latents": choice.sends_latents,
                "device": choice.memory.device,
                "host": choice.memory.host,
                "reason": None if choice.fits and choice is result.fitting[0] else result.reason(choice),
                "command": command_line(result, choice) if trainer_reads(result.options.model) else None,
            }
            for choice in result.choices
        ],
    }


def show(result: SearchResult) -> None:
    """Prints the best choices; of the first also its time by part, other policies, and the command to train."""
    print_lines(*heading(result), "")
    best = result.fitting[: result.options.best]
    # Nothing fits: the choices that need the least memory, and the nearest changes that would fit.
    if not best:
        for choice in result.choices[:3]:
            print(f"{choice.candidate}: {result.reason(choice)}")
        print(f"nothing fits; {advice(result.choices[0].job, result.cluster, result.room)}")
        return
    first = best[0].time
    print_table(CHOICES, choice_rows(result, best))
    print("\nMFU: the model's FLOPs over the peak, for visible pairs under the mask and without recomputation")
    print("\nthe first choice's time, by part\n")
    print_table(
        PARTS,
        (
            [name, f"{100 * seconds / first.seconds:.1f}", f"{1000 * seconds:,.1f}"]
            for name, seconds in first.parts().items()
            if seconds > 0
        ),
    )
    print("\nits mesh and method under each checkpoint policy\n")
    print_table(POLICIES, policy_rows(result))
    if is_hybrid(result.model):
        print("\nthe best with each layout\n")
        print_table(STATE_LAYOUTS, layout_rows(result))
    print(f"\n{summary_of_hidden_choices(result)}\n")
    if trainer_reads(result.options.model):
        print(command_line(result, best[0], result.options.out))
    else:
        print(f"armillary-train does not read {result.options.model}; transformers train it, with ContextParallel")


def heading(result: SearchResult) -> list[str]:
    """Returns lines with the model, the cluster, the step, and the number of choices."""
    options = result.options
    rows = f"{options.rows} sequence{'s' if options.rows > 1 else ''} of {result.length:,} tokens"
    # Methods without formulas are left out of a search over all methods. A method that is named raises instead.
    unsupported = {} if options.attention else methods_without_plan(*NEEDED)
    return [
        f"{options.model}, {model_size(result.model)}, on {result.cluster.name}: a step of {rows}",
        f"{len(result.choices)} ways to run it, {len(result.fitting)} of which fit; predicted, not measured",
        *(f"left out: {name} has no {', '.join(functions)}" for name, functions in unsupported.items()),
    ]


def figures(choice: Choice, first: Choice) -> list[str]:
    """Returns the table cells for time, MFU and memory. Times have the decimals that give `first` four digits."""
    decimals = max(0, 3 - floor(log10(first.time.seconds)))
    memory = gib(choice.memory.device), gib(choice.memory.host)
    return [f"{choice.time.seconds:,.{decimals}f}", f"{100 * choice.mfu:.1f}", *memory]


def choice_rows(result: SearchResult, best: list[Choice]) -> Iterator[list[str]]:
    """Yields the table row of each choice. The first choice is the best, so it has no reason for being slower."""
    for choice in best:
        has_layouts = result.documents is not None or is_hybrid(result.model)
        layout = f", {choice.candidate.layout_name}" if has_layouts and choice.candidate.mesh.ring > 1 else ""
        sent = ", latents" if choice.sends_latents else ""
        names = f"{choice.candidate.attention}{layout}{sent}", str(choice.candidate.mesh)
        reason = "" if choice is best[0] else result.reason(choice)
        yield [*names, *figures(choice, best[0]), stored_text(choice), reason]


def stored_text(choice: Choice) -> str:
    """Describes checkpoints and where they are stored, ZeRO stage 2, and the optimizer if it is on the host."""
    policy = choice.job.checkpointing
    checkpoints = "no recompute" if policy.policy == "none" else policy_text(policy)
    chunked = ", chunked MLP" if policy.tiled else ""
    optimizer = ", optimizer on the host" if choice.job.on_host else ""
    stage = ", ZeRO-2" if choice.job.zero_stage == 2 else ""
    return f"{checkpoints}{chunked}{stage}{optimizer}"


def policy_rows(result: SearchResult) -> Iterator[list[str]]:
    """Yields a table row for the best choice under each policy, of the first choice's candidate; fitting ones first."""
    by_policy = dict[tuple[str, bool], list[Choice]]()
    for choice in result.policies:
        by_policy.setdefault((choice.job.checkpointing.policy, choice.job.checkpointing.offload), []).append(choice)
    for choices in by_policy.values():
        choice = best_of(choices, result.room)
        fits = "yes" if choice.fits else f"no: {result.room.comparison(choice.memory)}"
        yield [stored_text(choice), *figures(choice, result.fitting[0]), fits]


def layout_rows(result: SearchResult) -> Iterator[list[str]]:
    """Yields a table row for the fastest choice with each layout, on meshes with a ring (others have one layout)."""
    for layout in dict.fromkeys(choice.candidate.layout_name for choice in result.choices):
        for choice in result.fitting:
            candidate = choice.candidate
            if candidate.layout_name == layout and candidate.mesh.ring > 1:
                seconds, *_ = figures(choice, result.fitting[0])
                yield [
                    layout,
                    str(candidate.attention),
                    str(candidate.mesh),
                    seconds,
                    f"{choice.sent_bytes / 1e6:,.1f}",
                ]
                break


def summary_of_hidden_choices(result: SearchResult) -> str:
    """Returns the numbers of choices that are not shown, by reason."""
    slower = max(0, len(result.fitting) - result.options.best)
    limits = Counter(result.room.limit(choice.memory) for choice in result.choices if not choice.fits)
    too_large = [f"{count} need more memory on the {memory}" for memory, count in limits.most_common()]
    return "; ".join([f"{slower} more fit and are slower", *too_large])


def draw(result: SearchResult, path: Path) -> Path:
    """Draws a bar for each of the best choices that fit, stacked from the parts of its step, as a PNG.

    Returns its path.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    best = result.fitting[: result.options.best]
    with picture(path, (11, 2.2 + 0.5 * len(best)), "armillary-plan") as figure:
        axes = figure.subplots()
        # Each part of a step is drawn from the end of the parts before it.
        ends = [0.0] * len(best)
        for i, name in enumerate(best[0].time.parts()):
            widths = [choice.time.parts()[name] for choice in best]
            if max(widths) > DRAWN_SHARE * best[-1].time.seconds:
                axes.barh(range(len(best)), widths, left=ends, label=name, color=f"C{i}")
            ends = [a + b for a, b in zip(ends, widths, strict=True)]
        for i, choice in enumerate(best):
            axes.text(ends[i], i, f" {choice.mfu:.1%} MFU", va="center", fontsize=8)
        axes.set_yticks(range(len(best)), [f"{choice.candidate}\n{stored_text(choice)}" for choice in best], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("predicted step time (s)")
        axes.set_title("\n".join(heading(result)), fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return path
