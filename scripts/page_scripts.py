"""Writes docs/scripts: the scripts of pages that show them in parts, each in one file to copy.

A block with `title="train.py"` is part of that file. Of a page's first diff of a file, the file has the lines with `+`.

    uv run python scripts/page_scripts.py
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/scripts"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.M | re.S)


class Block(NamedTuple):
    language: str
    title: str
    code: str


def blocks(page: str) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall((ROOT / page).read_text())]


def side(diff: str, signs: str) -> str:
    """Returns one side of a diff: the lines that begin with one of these signs."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in (*signs, "\n"))


def scripts(page: str, signs: str = " +") -> dict[str, str]:
    """Returns the files of a page, with one side of its first diff."""
    files: dict[str, str] = {}
    titles: set[str] = set()
    for language, title, code in blocks(page):
        if title and not (language == "diff" and title in titles):
            files[title] = files.get(title, "") + (side(code, signs) if language == "diff" else code)
        titles |= {title} if language == "diff" else set()
    return files


def whole_scripts() -> dict[str, str]:
    """Returns the files of docs/scripts: each script that a page shows in several blocks, under the page's name."""
    files: dict[str, str] = {}
    for path in sorted(ROOT.glob("docs/*.md")):
        page = str(path.relative_to(ROOT))
        titles = [block.title for block in blocks(page)]
        files |= {
            f"{path.stem.replace('-', '_')}_{name}": code
            for name, code in scripts(page).items()
            if titles.count(name) > 1
        }
    return files


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, code in whole_scripts().items():
        (FOLDER / name).write_text(code)
        print(FOLDER / name)
