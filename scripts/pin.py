"""Writes exact versions of everything that `uv lock` resolved into the root's `constraint-dependencies`.

`uv.lock` is not in git, because it records the download addresses of packages; versions are enough for another machine
to resolve the same set.

    uv run python scripts/pin.py --upgrade    # resolve to the newest allowed versions and pin them
    uv run python scripts/pin.py              # pin the current resolution
    uv run python scripts/pin.py --check      # exit with 1 if the pins differ from the current resolution
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = re.compile(r"^constraint-dependencies = \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="drop the pins and resolve again")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the pins differ")
    options = parser.parse_args()
    path = ROOT / "pyproject.toml"
    before = path.read_text()
    if options.upgrade:
        path.write_text(with_pins(before, []))
        try:
            uv("lock", "--upgrade")
        except BaseException:
            path.write_text(before)
            raise
    pins = resolved()
    if not options.check:
        path.write_text(with_pins(before, pins))
        uv("lock")
    elif odd := versions(PINS.findall(before)) ^ versions(pins):
        sys.exit(f"pyproject.toml: pinned or resolved, but not both: {', '.join(sorted(odd))}; run scripts/pin.py")


def resolved() -> list[str]:
    """An exact requirement with its marker for each package outside of the workspace."""
    exported = uv(
        "export",
        "--all-packages",
        "--all-groups",
        "--all-extras",
        "--no-emit-workspace",
        "--no-hashes",
        "--no-annotate",
    )
    lines = (line.strip() for line in exported.splitlines())
    return sorted(line for line in lines if re.match(r"^[\w.-]+==", line))


def versions(texts: list[str]) -> set[str]:
    """The name==version of each pin. Markers are ignored, because their text depends on uv's version."""
    return {version for text in texts for version in re.findall(r"[\w.-]+==[\w.+!-]+", text)}


def with_pins(text: str, pins: list[str]) -> str:
    """Returns the text of a pyproject.toml with `pins` as its constraint-dependencies."""
    lines = [f"    {pin!r}," if '"' in pin else f'    "{pin}",' for pin in pins]
    block = "\n".join(["constraint-dependencies = [", *lines, "]", ""])
    if not PINS.search(text):
        raise SystemExit("pyproject.toml: no constraint-dependencies under [tool.uv] to write to")
    return PINS.sub(lambda _: block, text, count=1)


def uv(*arguments: str) -> str:
    return subprocess.run(["uv", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
