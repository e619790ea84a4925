"""The README's examples run as they stand: the first alone, the second on ranks."""

from contextlib import chdir
from pathlib import Path

from armillary.core.testing import mesh

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = [part.split("```")[0] for part in README.split("```python\n")[1:]]


def run_examples(folder: Path) -> int:
    mesh(ring=2, ulysses=2)
    names: dict[str, object] = {}
    with chdir(folder):
        exec("\n".join(EXAMPLES), names)
    return names["ledger"].bytes()


def test_the_examples_run_on_four_ranks(worlds, tmp_path):
    assert worlds(4).run(run_examples, tmp_path) == [2 * 10 * 4] * 4
