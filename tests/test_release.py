"""Metadata and READMEs of the packages, and the scripts of a release: its wheels, interface and compatibility."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
release = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/release.py")))
PACKAGES = [release.Package.read(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
BY_FOLDER = {package.folder.name: package for package in PACKAGES}
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.folder.name)


@pytest.fixture
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@each_package
def test_package_metadata_is_complete_and_versions_agree(package):
    assert release.problems(package, PACKAGES) == []
    project = package.project
    assert (project["authors"], project["license"]) == ([{"name": "The Armillary authors"}], "Apache-2.0")
    assert project["requires-python"] == BY_FOLDER["core"].project["requires-python"]
    assert project["classifiers"] == sorted(BY_FOLDER["core"].project["classifiers"])
    assert package.version == BY_FOLDER["core"].version and "urls" not in project
    assert (package.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@each_package
def test_readme_has_installation_and_is_self_contained(package):
    readme = (package.folder / package.project["readme"]).read_text()
    below = release.with_those_below(package, PACKAGES)
    assert f"\n    pip install {' '.join(f'./packages/{each.folder.name}' for each in below)}\n" in readme
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert [link for link in links if not re.match("https?://|#", link)] == []


def test_every_package_requires_numpy():
    """Without numpy, importing torch warns."""
    assert BY_FOLDER["core"].bound("numpy")
    assert all(BY_FOLDER["core"] in release.with_those_below(package, PACKAGES) for package in PACKAGES)


def test_problems_lists_wrong_metadata():
    core, data = BY_FOLDER["core"], BY_FOLDER["data"]
    newer = replace(core, project=core.project | {"version": "0.3.1", "keywords": []})
    assert release.problems(newer, [newer]) == [
        "no keywords",
        f"the changelog's newest heading is of {core.version}, the package of 0.3.1",
    ]
    (actual,) = release.problems(data, [newer, data])
    assert actual.endswith("whose version is 0.3.1; write ==0.3.1")
    dated = replace(core, changelog=f"# Changelog\n\n## {core.version} (2026-11-30)\n\n## 0.0.1 (unreleased)\n")
    assert release.problems(dated, PACKAGES, final=True) == []
    assert release.problems(dated, PACKAGES, tag=f"v{core.version}") == []
    assert "v9.9.9" in release.problems(dated, PACKAGES, tag="v9.9.9")[0]
    assert release.newest_section(dated) == "" and "__version__" in release.newest_section(core)
    undated = replace(core, changelog=f"# Changelog\n\n## {core.version} (unreleased)\n")
    assert release.problems(undated, PACKAGES, final=True) == ["the changelog says (unreleased)"]
    assert release.problems(replace(core, changelog=""), PACKAGES) == [
        f"the changelog's newest heading is of no version, the package of {core.version}"
    ]


def test_trial_installs_a_wheel_and_the_packages_below_it():
    wheels, scratch = Path("/wheels"), Path("/scratch")
    _, install, smoke = release.trial(BY_FOLDER["data"], PACKAGES, "lowest", wheels, scratch, "cpu")
    version = BY_FOLDER["core"].version
    assert [Path(word).name for word in install if word.endswith(".whl")] == [
        f"armillary_{name}-{version}-py3-none-any.whl" for name in ("core", "data")
    ]
    assert install[-3:] == ["torch==2.11.*", "--torch-backend", "cpu"]
    lowest = install[install.index("--resolution") + 1 : -3]
    assert lowest[0] == "lowest-direct" and {release.name_of(line) for line in lowest} >= {"numpy", "torch"}
    assert not any("armillary" in line for line in lowest)
    assert smoke[-1] == "armillary-data" and Path(smoke[-2]).is_file()
    _, install, _ = release.trial(BY_FOLDER["plan"], PACKAGES, "newest", wheels, scratch)
    wheel_count = sum(word.endswith(".whl") for word in install)
    assert install[-1] == "torch" and wheel_count == len(PACKAGES) - 3  # not integrations, check and armillary


def test_a_failed_trial_is_reported_with_its_output(capsys):
    fails = [sys.executable, "-I", "-S", "-c", "print('a cause'); raise SystemExit(3)"]
    assert not release.run_trial("core ", [fails], dry_run=False)
    assert "core FAILED" in (messages := capsys.readouterr().out) and "a cause" in messages
    assert release.run_trial("core ", [fails], dry_run=True)


# -- the public interface ---------------------------------------------------------------------------------------------


def face(root: Path, text: str) -> Path:
    """Writes a checkout with one package, whose face has the name `scale`."""
    package = root / "packages/one/src/armillary/one"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from armillary.one.inner import scale\n\n__all__ = ['scale']\n")
    (package / "inner.py").write_text(text)
    return root


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("def scale(x, by=2): ...", "def scale(x, by=2, *, dim=0): ...\ndef other(): ...", []),
        ("def scale(x, by=2): ...", "def scale(x): ...", ["armillary.one.scale: parameter was removed"]),
        ("def scale(x, by=2): ...", "def scale(x, factor, by=2): ...", ["parameter was added as required", "moved"]),
        ("class scale:\n    def of(x): ...", "class scale: ...", ["armillary.one.scale.of: public object was removed"]),
        ("class scale:\n    def _of(x): ...", "class scale: ...", []),
    ],
)
def test_changed_signatures_are_breaking_changes(scripts, tmp_path, before, after, changes):
    interface = importlib.import_module("interface")
    faces = [interface.read_faces(face(tmp_path / name, text)) for name, text in (("a", before), ("b", after))]
    actual = [description for _, description in interface.breakages(*faces)]
    assert bool(actual) == bool(changes) and all(any(change in each for each in actual) for change in changes)


def test_a_breaking_change_must_be_in_a_changelog(scripts):
    interface = importlib.import_module("interface")
    assert interface.is_stated("__version__") and not interface.is_stated("a_name_that_no_package_had")


# -- another release of torch -----------------------------------------------------------------------------------------


@pytest.fixture
def compatibility(scripts) -> ModuleType:
    return importlib.import_module("compatibility")


def required(compatibility, folder: Path, torch: str, *tests: str, with_tools: bool = True) -> tuple[str, set[str]]:
    """Returns the requirements of a run, and the names that have a pin."""
    compatibility.write_requirements(folder, torch, PACKAGES, tests, with_tools)
    pins = (folder / "pins.txt").read_text().splitlines()
    return (folder / "requirements.txt").read_text(), {pin.partition("==")[0] for pin in pins}


@pytest.mark.parametrize(
    ("torch", "requirement"), [("lowest", "torch==2.11.*"), ("2.13", "torch==2.13.*"), ("nightly", "torch")]
)
def test_runs_have_a_torch_the_packages_of_the_tests_and_all_below(compatibility, tmp_path, torch, requirement):
    text, pins = required(compatibility, tmp_path, torch)
    folders = re.findall(r"^-e \S+/packages/(\w+)", text, re.MULTILINE)
    assert sorted(folders) == ["attention", "core", "data", "models", "states", "train"]
    assert {"-c pins.txt", requirement} <= set(text.splitlines()) and re.search("^pytest>=", text, re.MULTILINE)
    assert "pytest" in pins and not pins & {"torch", "triton", "nvidia-nccl-cu13", "cuda-toolkit"}
    assert (tmp_path / "uv.toml").exists() == (torch != "2.13")


def test_the_lowest_versions_are_those_of_extras_too(compatibility, tmp_path):
    text, pins = required(compatibility, tmp_path, "lowest", "packages/check", "packages/data")
    assert re.search(r"^-e \S+/data\[datasets,parquet,tokenizers\]$", text, re.MULTILINE)
    assert re.search(r"^-e \S+/check\[transformers\]$", text, re.MULTILINE) and "packages/models" not in text
    assert not pins & {"numpy", "tokenizers", "transformers", "fsspec"}


def test_the_first_run_needs_neither_tools_nor_extras(compatibility, tmp_path):
    text, pins = required(compatibility, tmp_path, "lowest", with_tools=False)
    assert "pytest" not in text and "[" not in text and "fsspec" in pins and "numpy" not in pins


def test_a_pinned_run_has_all_packages_and_pins(compatibility, tmp_path):
    text, pins = required(compatibility, tmp_path, "pinned")
    assert {"torch", *(f"-e {package.folder}" for package in PACKAGES)} <= set(text.splitlines())
    assert {"torch", "transformers", "numpy"} <= pins


def test_a_run_replaces_its_row_of_the_page(compatibility, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n| Python | torch | tests | passed |\n|---|---|---|---|\n| 3.11.7 | 2.11.0 | core | 5 |\n\nEnd.\n"
    )
    monkeypatch.setattr(compatibility, "PAGE", page)
    monkeypatch.setattr(compatibility, "environment", lambda python: [sys.executable, "-c", "print('3.11.7 2.11.0')"])
    for failures in (1, 0):
        results = f'<testsuites><testsuite tests="9" failures="{failures}" errors="0" skipped="2"/></testsuites>'
        (tmp_path / "results.xml").write_text(results)
        compatibility.record(tmp_path, "3.11", "packages/core", code=failures)
        rows = [line for line in page.read_text().splitlines() if line.startswith("| 3.")]
        assert [row.split(" | ")[3:7] for row in rows] == [
            [str(7 - failures), str(failures), "2", ["passed", "failed"][failures]]
        ]
    assert page.read_text().startswith("# Title\n\n| Python") and page.read_text().endswith("|\n\nEnd.\n")


def test_the_site_has_a_folder_for_each_release_and_a_menu(tmp_path):
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for tag in ("v0.9.9", "v0.10.0", "v0.10.1", "v1.0.0rc1", "v0.10.1+later"):
        (tmp_path / "page").write_text(tag)
        git("add", "page"), git("commit", "-m", tag), git("tag", tag)
    build = ["sh", "-c", "mkdir site && mv page site/"]
    runpy.run_path(str(ROOT / "scripts/site.py"))["main"](tmp_path, build)
    site = tmp_path / "site"
    pages = {path.parent.name: path.read_text() for path in site.glob("*/page")}
    assert pages == {"0.9": "v0.9.9", "0.10": "v0.10.1", "dev": "v0.10.1+later"}
    menu = json.loads((site / "versions.json").read_text())
    titles = {entry["version"]: entry["title"] for entry in menu}
    assert list(titles.items()) == [("0.10", "0.10.1"), ("0.9", "0.9.9"), ("dev", "dev")]
    assert "url=0.10/" in (site / "index.html").read_text()
