"""The page on the papers: every difference has a reason, and the page is reproducible."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STORED = ROOT / "docs" / "benchmarks"


def test_every_difference_has_a_number():
    rows = json.loads((STORED / "papers.json").read_text())["rows"]
    page = (STORED / "papers.md").read_text()
    for row in rows:
        assert row["what"] in page, row
        if row["ratio"] != "-" and abs(float(row["ratio"]) - 1) > 0.0505:
            assert any(map(str.isdigit, row["why"])), row


@pytest.mark.long
def test_the_page_is_reproducible(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "papers.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "papers.md").read_text() == (STORED / "papers.md").read_text()
