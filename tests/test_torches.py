"""scripts/torches.py: the environment for another release of torch."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def torches(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("torches")


@pytest.mark.parametrize(("release", "requirement"), [("lowest", "torch==2.11.*"), ("2.13", "torch==2.13.*")])
def test_all_packages_but_torchs_are_pinned(torches, tmp_path, release, requirement):
    packages = [torches.Package.read(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    torches.write_requirements(tmp_path, release, packages, with_tools=True)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    editable = [f"-e {ROOT / 'packages' / name}" for name in ("core", "attention", "data", "models", "train")]
    assert {"-c pins.txt", requirement, *editable} <= set(lines) and len(lines) == len(set(lines))
    assert any(line.startswith("pytest>=") for line in lines) and not any("packages/plan" in line for line in lines)
    names = {pin.partition("==")[0] for pin in (tmp_path / "pins.txt").read_text().splitlines()}
    assert {"numpy", "pytest", "safetensors"} <= names
    assert not names & {"torch", "triton", "nvidia-nccl-cu13", "cuda-toolkit"}


def test_the_first_run_needs_no_tools_of_tests(torches, tmp_path):
    packages = [torches.Package.read(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    torches.write_requirements(tmp_path, "lowest", packages, with_tools=False)
    assert "pytest" not in (tmp_path / "requirements.txt").read_text()
