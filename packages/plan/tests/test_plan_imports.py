"""Commands refuse wrong arguments before they import what only a simulation or a run needs."""

import subprocess
import sys

import pytest

COMPILER = ("torch._dynamo", "torch._inductor")
SLOW = (*COMPILER, "torch.distributed.fsdp", "armillary.train.trainer")
CHECK = """
import sys
from {module} import main
try:
    main(["{word}", "x"])
except SystemExit as stop:
    print(stop.code, [name for name in {slow} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("module", "word", "slow"),
    [
        ("armillary.plan.cli", "--modle", (*COMPILER, "torch.distributed._tools", "armillary.train.trainer")),
        ("armillary.plan.cli", "serach", (*SLOW, "torch.distributed.tensor")),
        ("armillary.train.cli", "--modle", SLOW),
    ],
)
def test_wrong_arguments_import_no_slow_module(module, word, slow):
    check = CHECK.format(module=module, word=word, slow=slow)
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "2 []" and word in result.stderr
