"""The public names, and the README's examples, on the test's ranks, whose process group stays."""

import re
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import armillary.core
from armillary.core.testing import mesh

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python[^\n]*\n(.*?)^```", README, re.M | re.S)


def run_examples(folder: Path) -> int:
    mesh(ring=2, ulysses=2)
    names: dict[str, object] = {}
    with chdir(folder), patch.object(dist, "destroy_process_group"):
        exec("\n".join(EXAMPLES), names)
    return names["ledger"].bytes()


def test_the_examples_run_on_four_ranks(worlds, tmp_path):
    assert worlds(4).run(run_examples, tmp_path) == [2 * 10 * 4] * 4


def test_public_names_are_few_and_importable():
    names = armillary.core.__all__
    assert sorted(set(names)) == names and len(names) <= 45
    assert all(hasattr(armillary.core, name) for name in names)
