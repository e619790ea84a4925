"""The page of results shows the stored measurements, and its commands run existing benchmarks."""

import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


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
