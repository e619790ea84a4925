"""The table of what came of all contenders, as text and as a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outcome import OUTCOMES, Outcome
from setting import MASKS, Setting

Found = Mapping[str, Any]
"""One contender: its name, note, versions, why it could not be run ("" if it could), and outcomes."""

SHOWN = {"right": "", "wrong": " WRONG"}
"""How a kind is called in a cell, if not by its name."""


def outcomes(result: Found) -> list[Outcome]:
    return [Outcome(**each) for each in result["outcomes"]]


def cell(chosen: Iterable[Outcome]) -> str:
    """How many of each kind: "36" are all right, "12, 6 WRONG"; "-" if none was offered."""
    count = Counter(each.outcome for each in chosen)
    return ", ".join(f"{count[kind]}{SHOWN.get(kind, f' {kind}')}" for kind in OUTCOMES if count[kind]) or "-"


def rows(results: Sequence[Found]) -> list[dict[str, str]]:
    """One for each contender and layout; a column for each mask."""
    made: list[dict[str, str]] = []
    for each in results:
        every = [(Setting.read(one.setting), one) for one in outcomes(each)]
        for layout in dict.fromkeys(setting.layout for setting, _ in every):
            entries = [(setting, one) for setting, one in every if setting.layout == layout]
            cells = {mask: cell(one for setting, one in entries if setting.mask == mask) for mask in MASKS}
            made.append({"contender": each["name"], "layout": layout} | cells | {"of limit": share(entries)})
        if not every:
            made.append({"contender": each["name"], "layout": "-"} | dict.fromkeys((*MASKS, "of limit"), "not run"))
    return made


def share(entries: Iterable[tuple[Setting, Outcome]]) -> str:
    """The largest error of all that are right, as a share of its limit."""
    right = [one.worst for _, one in entries if one.outcome == "right"]
    return f"{max(right):.2f}" if right else "-"


def text(results: Sequence[Found]) -> str:
    """A table for a terminal, of no more than 100 columns: a line for each mask that was tried."""
    head = f"{'contender':36}{'layout':12}{'mask':11}outcomes"
    return "\n".join(
        [
            head,
            *(
                f"{row['contender']:36}{row['layout']:12}{mask:11}{row[mask]}"
                for row in rows(results)
                for mask in MASKS
                if row[mask] != "-"
            ),
        ]
    )


def groups(result: Found, kind: str) -> list[list[Outcome]]:
    """Outcomes of one kind that belong together: wrong under the same mask, rough in the same dtype, the same words."""
    grouped: dict[str, list[Outcome]] = {}
    for each in outcomes(result):
        setting = Setting.read(each.setting)
        alike = {"rough": setting.dtype, "refused": re.sub(r"\d+", "", each.said)}.get(kind, setting.mask)
        if each.outcome == kind:
            grouped.setdefault(alike, []).append(each)
    return list(grouped.values())


def where(chosen: Sequence[Outcome], every: Sequence[Outcome]) -> str:
    """What these cases have in common, of what not all of the contender's have: "window, 2 or 4 ranks"."""
    parts: list[str] = []
    for index, unit in enumerate(("", "", " heads", "", " ranks")):
        values, known = ({each.setting.split("/")[index]: None for each in some} for some in (chosen, every))
        parts += [" or ".join(values) + unit] if len(values) < len(known) else []
    return ", ".join([*parts, f"{len(chosen)} cases"])


def figures(chosen: Sequence[Outcome]) -> str:
    """The largest error of each tensor, over all these cases."""
    names = list(dict.fromkeys(name for each in chosen for name in each.errors))
    worst = {name: max(each.errors.get(name, (0.0, 0.0))[0] for each in chosen) for name in names}
    return ", ".join(f"{name} {error:.2g}" for name, error in worst.items()) or chosen[0].said.replace("`", "'")


def command(name: str, case: str) -> str:
    return f'uv run python benchmarks/scoreboard --only "{name}" --case {case}'


def markdown(data: Mapping[str, Any]) -> str:
    """All of it, for docs/scoreboard.md."""
    result: list[Found] = data["contenders"]
    cases = sum(len(each["outcomes"]) for each in result)
    parts = [f"`uv run python benchmarks/scoreboard`, {data['machine']}: {cases} cases.", _table(rows(result))]
    shown = {"wrong": "Wrong", "rough": "Rough", "hung": "Hung", "crashed": "Crashed", "refused": "Refused"}
    for kind, title in shown.items():
        lines = [line for each in result for line in _listed(each, kind)]
        parts += [f"### {title}", "\n".join(lines)] if lines else []
    parts += ["### Calls", "\n".join(_called(each) for each in result)]
    return "\n\n".join(parts) + "\n"


def _listed(result: Found, kind: str) -> list[str]:
    lines: list[str] = []
    for chosen in groups(result, kind):
        worst = max(chosen, key=lambda each: each.worst)
        again = f"\n  `{command(result['name'], worst.setting)}`" if kind != "refused" else ""
        lines.append(f"- **{result['name']}** ({where(chosen, outcomes(result))}): {figures(chosen)}{again}")
    return lines


def _called(result: Found) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    reason = f" Not run here: {result['why']}" if result["why"] else ""
    return f"- **{result['name']}** ({versions}; {result['date']}): {result['note']}.{reason}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
