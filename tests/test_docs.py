"""The docs and READMEs: scripts run unmodified, and both sides of a page's first diff train alike.

A block with `title="train.py"` is part of that file. The blocks of a page without a title form one file. `console`
blocks have the commands that run the files. A page's first diff has the file's lines with `+`; a later diff changes
the resulting file.
"""

import ast
import math
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from launches import Launch, pages_agent, python, run_imports

from armillary.attention.kernels import EFFICIENCY, KERNELS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
IN_FLOAT64 = Path(__file__).parent / "listing_rank.py"
page_scripts = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/page_scripts.py")))
blocks, side, scripts = page_scripts.blocks, page_scripts.side, page_scripts.scripts


def changes(page: str) -> list[tuple[str, str]]:
    """Returns (file, diff) of each diff after the first of its file."""
    diffs = [(title, code) for language, title, code in blocks(page) if language == "diff" and title]
    return [diff for i, diff in enumerate(diffs) if diff[0] in [title for title, _ in diffs[:i]]]


def changed(script: str, diff: str) -> str:
    """Returns a script with all hunks of a diff applied. The old lines of a hunk must occur exactly once."""
    for hunk in diff.split("@@\n"):
        before, after = side(hunk, " -"), side(hunk, " +")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def commands(page: str) -> list[list[str]]:
    """Returns the commands of a page that run its files."""
    lines = [line for block in blocks(page) if block.language == "console" for line in block.code.splitlines()]
    split = [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]
    return [command for command in split if command[-1] in scripts(page)]


PAGES = [
    str(path.relative_to(ROOT))
    for path in [*DOCS.rglob("*.md"), *ROOT.glob("**/README.md")]
    if ".venv" not in path.parts
]
WITH_SCRIPTS = sorted(page for page in PAGES if scripts(page))
WITH_DIFFS = [page for page in WITH_SCRIPTS if any(b.language == "diff" and b.title for b in blocks(page))]
EXCERPTS = ["docs/one-call.md"]
"""Pages whose blocks quote the packages' code, in parts."""
ALONE = sorted(
    str(path.relative_to(ROOT))
    for path in DOCS.rglob("*.md")
    if any(block.language == "python" and not block.title for block in blocks(str(path.relative_to(ROOT))))
    and str(path.relative_to(ROOT)) not in EXCERPTS
)


for page in WITH_SCRIPTS:
    for script in scripts(page).values():
        run_imports(script)
"""In this module, because the server of forked processes imports it: transformers and diffusers take seconds each."""


def printed_lists(output: str) -> dict[str, list[float]]:
    """Returns the losses and norms in a script's output."""
    return {name: ast.literal_eval(values) for name, values in re.findall(r"^(losses|norms) (\[.*\])$", output, re.M)}


def run(program: list[str] | Callable[[], None], folder: Path) -> str:
    """Returns the output of a program, which must exit with 0."""
    with Launch(program, folder) as launch:
        code = launch.wait()
        assert code == 0, launch.printed
        return launch.printed


def run_in_float64(page: str, variants: list[dict[str, str]], folder: Path) -> list[dict[str, list[float]]]:
    """Runs the commands of a page on forked ranks, in float64; returns the lists that each variant of train.py printed.

    Scripts that write the model or the data run once, before the first variant.
    """
    folder.mkdir()
    for name, code in variants[0].items():
        (folder / name).write_text(code)
    results: list[dict[str, list[float]]] = []
    for program, *options, name in commands(page):
        ranks = options if program == "torchrun" else ["--nproc-per-node", "1"]
        agent = pages_agent(*ranks, script=name, wrapper=str(IN_FLOAT64))
        if name == "train.py":
            for files in variants:
                assert files | {name: ""} == variants[0] | {name: ""}
                (folder / name).write_text(files[name])
                results.append(printed_lists(run(agent, folder)))
        elif program == "python":
            run(agent, folder)
    return results


def write_scripts(page: str, folder: Path) -> dict[str, str]:
    """Writes the unmodified files of a page to a folder."""
    files = scripts(page)
    for name, code in files.items():
        assert "torch.distributed.destroy_process_group()" in code or "build_mesh" not in code, name
        (folder / name).write_text(code)
    return files


def program(page: str) -> str:
    """Returns the commands of a page and its code without comments, in which pages may differ."""
    return f"{commands(page)} {[ast.dump(ast.parse(code)) for code in scripts(page).values()]}"


@pytest.mark.parametrize("page", {program(page): page for page in WITH_SCRIPTS if page not in WITH_DIFFS}.values())
def test_scripts_run_by_the_commands_of_their_page(tmp_path, page):
    files = write_scripts(page, tmp_path)
    assert {command[-1] for command in commands(page)} == set(files)
    for program, *options, name in commands(page):
        if program == "torchrun":
            output = run(pages_agent(*options, script=name), tmp_path)
        else:
            assert (program, options) == ("python", [])
            output = run(python(name), tmp_path)
        if name == "train.py":
            results = printed_lists(output)
            assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in results.values())
            assert set(results) == {"losses", "norms"}


LIMITS = {
    "docs/fsdp2.md": 1e-9,
    "docs/transformers.md": 1e-6,  # Mistral's norms compute in float32
    "docs/trainer.md": 1e-6,
    "docs/accelerate.md": 1e-6,
    "docs/diffusers.md": 1e-9,
    "docs/plain-torch.md": 1e-9,
    "docs/adapters.md": 1e-6,
}


@pytest.mark.parametrize("page", WITH_DIFFS)
def test_changed_script_has_equal_losses_and_gradients(tmp_path, page):
    """Further changes apply to the changed script and run; the one of plain torch is an equivalent script."""
    files = scripts(page)
    further = [files | {name: changed(files[name], diff)} for name, diff in changes(page)]
    before, after, *results = run_in_float64(page, [scripts(page, " -"), files, *further], tmp_path / "listing")
    for name in ("losses", "norms"):
        assert len(before[name]) == 3
        assert after[name] == pytest.approx(before[name], rel=LIMITS[page])
    assert len(results) == len(further)
    for result in results:
        assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in result.values())
        if page == "docs/plain-torch.md":
            assert result["losses"] == pytest.approx(after["losses"], rel=1e-9)


@pytest.mark.parametrize("page", ALONE)
def test_blocks_without_a_title_run_alone(tmp_path, page):
    code = "".join(block.code for block in blocks(page) if block.language == "python" and not block.title)
    (tmp_path / "page.py").write_text(code)
    run(python("page.py"), tmp_path)


def test_page_of_masks_shows_all_its_pictures():
    shown = re.findall(r"\]\((pictures/\w+\.png)\)", (DOCS / "masks.md").read_text())
    generated = {"pictures/methods.svg", "pictures/steps"}  # on the page of steps
    pictures = {str(path.relative_to(DOCS)) for path in DOCS.glob("pictures/*")}
    assert sorted(shown) == sorted(pictures - generated)


def pages(entries: list[dict[str, object]]) -> Iterator[str]:
    """Yields the files of a navigation."""
    for entry in entries:
        for inner in entry.values():
            yield from [inner] if isinstance(inner, str) else pages(inner)


def test_scripts_shown_in_parts_are_whole_in_files_that_their_page_links():
    files = page_scripts.whole_scripts()
    assert {path.name: path.read_text() for path in page_scripts.FOLDER.iterdir()} == files  # scripts/page_scripts.py
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert all(f"](scripts/{name})" in text for name in files)


def test_navigation_names_each_page_once():
    assert sorted(pages(NAV)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_page_of_kernels_has_published_efficiencies():
    rows = dict(re.findall(r"^\| `(\w+)` (.*)", (DOCS / "kernels.md").read_text(), re.M))
    assert set(rows) == {kernel.name for kernel in KERNELS} and "as `flash_attn_2`" in rows["cuda_flash"]
    for (name, _), figures in EFFICIENCY.items():
        row = rows["flash_attn_2" if name == "cuda_flash" else name]
        assert all(f"{share:.0%}" in row for share in (figures.full, figures.causal, figures.backward))
