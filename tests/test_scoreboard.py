"""The page of benchmarks/scoreboard shows the stored outcomes of all contenders."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "scoreboard"))
from contender import contenders
from table import markdown

ROOT = Path(__file__).parent.parent
MARK = "<!-- written by benchmarks/scoreboard: what follows is its table -->\n"


def test_the_page_shows_the_stored_results():
    stored = json.loads((ROOT / "docs/benchmarks/scoreboard.json").read_text())
    assert (ROOT / "docs/scoreboard.md").read_text().partition(MARK)[2] == f"\n{markdown(stored)}"
    assert [each["name"] for each in stored["contenders"]] == list(contenders())
    own_methods = [each for each in stored["contenders"] if each["name"].startswith("armillary")]
    assert {outcome["outcome"] for each in own_methods for outcome in each["outcomes"]} == {"right"}
