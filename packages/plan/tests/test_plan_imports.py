"""Commands refuse wrong arguments before they import what only a simulation or a run needs."""

import subprocess
import sys

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "armillary.train.trainer")
CHECK = """
import sys
from {module} import main
try:
    main(["--modle", "x"])
except SystemExit as stop:
    print(stop.code, [name for name in {slow} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("armillary.plan.cli", ("torch.distributed._tools", "armillary.train.trainer")),
        ("armillary.train.cli", SLOW),
    ],
)
def test_wrong_arguments_import_no_slow_module(module, slow):
    check = CHECK.format(module=module, slow=slow)
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "2 []" and "--modle" in result.stderr
