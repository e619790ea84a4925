"""Pages of results show the stored measurements: those of this machine, and the comparison with the papers."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS, STORED = ROOT / "docs/results", ROOT / "docs/benchmarks"


def laptop():
    sys.path.append(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("laptop", ROOT / "benchmarks" / "laptop.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["laptop"] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated_from_measurements():
    measured = json.loads((RESULTS / "results.json").read_text())
    benchmark = laptop()
    assert list(measured) == list(benchmark.PARTS)
    page = (RESULTS / "index.md").read_text()
    assert page == benchmark.page(measured)
    assert sum(actual["seconds"] for actual in measured.values()) < 660  # ten minutes, on two slow cores eleven
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (RESULTS / picture).exists()


def test_each_part_is_an_existing_benchmark():
    for part in laptop().PARTS.values():
        script = ROOT / part.command.split()[0]
        source = script / "__main__.py" if script.is_dir() else script
        options = re.findall(r"--[a-z]+", part.command)
        assert all(f'"{option}"' in source.read_text() for option in (*options, "--out")), part.command


def test_every_difference_from_a_paper_has_a_number():
    rows = json.loads((STORED / "papers.json").read_text())["rows"]
    page = (STORED / "papers.md").read_text()
    for row in rows:
        assert row["what"] in page, row
        if row["ratio"] != "-" and abs(float(row["ratio"]) - 1) > 0.0505:
            assert any(map(str.isdigit, row["why"])), row


@pytest.mark.long  # reproduces docs/benchmarks/papers.md
def test_the_page_of_papers_is_reproducible(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "papers.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "papers.md").read_text() == (STORED / "papers.md").read_text()
