"""The table of all contenders' outcomes, as text and as a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outcome import OUTCOMES, Outcome
from setting import MASKS, Setting

ContenderResult = Mapping[str, Any]
"""One contender: name, note, versions, the reason why it could not run (or ""), and outcomes."""

SHOWN = {"right": "", "wrong": " WRONG"}
"""Text of an outcome in a cell, if it is not the outcome's name."""


def outcomes(result: ContenderResult) -> list[Outcome]:
    return [Outcome(**each) for each in result["outcomes"]]


def cell(chosen: Iterable[Outcome]) -> str:
    """Counts by outcome: "36" if all are right, "12, 6 WRONG"; "-" without cases."""
    count = Counter(each.outcome for each in chosen)
    return ", ".join(f"{count[kind]}{SHOWN.get(kind, f' {kind}')}" for kind in OUTCOMES if count[kind]) or "-"


def rows(results: Sequence[ContenderResult]) -> list[dict[str, str]]:
    """One row per contender and layout, one column per mask."""
    table_rows: list[dict[str, str]] = []
    for each in results:
        all_outcomes = [(Setting.read(one.setting), one) for one in outcomes(each)]
        for layout in dict.fromkeys(setting.layout for setting, _ in all_outcomes):
            entries = [(setting, one) for setting, one in all_outcomes if setting.layout == layout]
            cells = {mask: cell(one for setting, one in entries if setting.mask == mask) for mask in MASKS}
            table_rows.append(
                {"contender": each["name"], "layout": layout} | cells | {"of limit": largest_fraction(entries)}
            )
        if not all_outcomes:
            table_rows.append(
                {"contender": each["name"], "layout": "-"} | dict.fromkeys((*MASKS, "of limit"), "not run")
            )
    return table_rows


def largest_fraction(entries: Iterable[tuple[Setting, Outcome]]) -> str:
    """The largest fraction of its limit among right outcomes."""
    right = [one.worst for _, one in entries if one.outcome == "right"]
    return f"{max(right):.2f}" if right else "-"


def text(results: Sequence[ContenderResult]) -> str:
    """A table for a terminal, at most 100 columns wide, with a line per mask."""
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


def groups(result: ContenderResult, kind: str) -> list[list[Outcome]]:
    """Groups outcomes of one kind: wrong by mask, rough by dtype, refused by message."""
    grouped: dict[str, list[Outcome]] = {}
    for each in outcomes(result):
        setting = Setting.read(each.setting)
        group_key = {"rough": setting.dtype, "refused": re.sub(r"\d+", "", each.said)}.get(kind, setting.mask)
        if each.outcome == kind:
            grouped.setdefault(group_key, []).append(each)
    return list(grouped.values())


def common_properties(chosen: Sequence[Outcome], all_outcomes: Sequence[Outcome]) -> str:
    """The properties that distinguish the chosen cases from the contender's others: "window, 2 or 4 ranks"."""
    properties: list[str] = []
    for index, unit in enumerate(("", "", " heads", "", " ranks")):
        values, all_values = (
            {each.setting.split("/")[index]: None for each in some} for some in (chosen, all_outcomes)
        )
        properties += [" or ".join(values) + unit] if len(values) < len(all_values) else []
    return ", ".join([*properties, f"{len(chosen)} cases"])


def figures(chosen: Sequence[Outcome]) -> str:
    """The largest error of each tensor over the chosen cases."""
    names = list(dict.fromkeys(name for each in chosen for name in each.errors))
    worst = {name: max(each.errors.get(name, (0.0, 0.0))[0] for each in chosen) for name in names}
    return ", ".join(f"{name} {error:.2g}" for name, error in worst.items()) or chosen[0].said.replace("`", "'")


def command(name: str, case: str) -> str:
    return f'uv run python benchmarks/scoreboard --only "{name}" --case {case}'


def markdown(data: Mapping[str, Any]) -> str:
    """The generated part of docs/scoreboard.md."""
    result: list[ContenderResult] = data["contenders"]
    cases = sum(len(each["outcomes"]) for each in result)
    sections = [f"`uv run python benchmarks/scoreboard`, {data['machine']}: {cases} cases.", _table(rows(result))]
    shown = {"wrong": "Wrong", "rough": "Rough", "hung": "Hung", "crashed": "Crashed", "refused": "Refused"}
    for kind, title in shown.items():
        lines = [line for each in result for line in _outcome_lines(each, kind)]
        sections += [f"### {title}", "\n".join(lines)] if lines else []
    sections += ["### Calls", "\n".join(_call_line(each) for each in result)]
    return "\n\n".join(sections) + "\n"


def _outcome_lines(result: ContenderResult, kind: str) -> list[str]:
    lines: list[str] = []
    for chosen in groups(result, kind):
        worst = max(chosen, key=lambda each: each.worst)
        repeat_command = f"\n  `{command(result['name'], worst.setting)}`" if kind != "refused" else ""
        lines.append(
            f"- **{result['name']}** ({common_properties(chosen, outcomes(result))}): {figures(chosen)}{repeat_command}"
        )
    return lines


def _call_line(result: ContenderResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    reason = f" Not run here: {result['why']}" if result["why"] else ""
    return f"- **{result['name']}** ({versions}; {result['date']}): {result['note']}.{reason}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
