"""`armillary-check` passes all architectures that the report of `benchmarks/check_models.py` lists as right."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent


def rows() -> list[dict[str, object]]:
    return json.loads((ROOT / "docs/benchmarks/check.json").read_text())["rows"]


def benchmark():
    sys.path.append(str(ROOT / "benchmarks"))  # scripts import their neighbours
    spec = importlib.util.spec_from_file_location("check_models", ROOT / "benchmarks/check_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_report_lists_sixty_right_architectures():
    verdicts = [row["verdict"] for row in rows()]
    assert verdicts.count("right") >= 60
    assert "wrong" not in verdicts


@pytest.mark.long  # reproduces docs/benchmarks/check.md
@pytest.mark.parametrize("family", [row["model type"] for row in rows() if row["verdict"] == "right"])
def test_check_passes_right_architectures(worlds, family):
    outcome = benchmark().outcome(family, worlds)
    assert outcome["verdict"] == "right", outcome["reason"]
