"""Commands refuse wrong arguments before they import what only a simulation or a run needs."""

import subprocess
import sys

CHECK = """
import sys
from importlib import import_module

compiler = {"torch._dynamo", "torch._inductor"}
slow = compiler | {"torch.distributed.fsdp", "armillary.train.loop"}
for module, word, modules in (
    ("armillary.plan.cli", "serach", slow | {"torch.distributed.tensor"}),
    ("armillary.train.cli", "--modle", slow),
    ("armillary.plan.cli", "--modle", compiler | {"torch.distributed._tools", "armillary.train.loop"}),
):
    try:
        import_module(module).main([word, "x"])
    except SystemExit as stop:
        print(word, stop.code, sorted(modules & set(sys.modules)))
"""


def test_wrong_arguments_import_no_slow_module():
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["serach 2 []", "--modle 2 []", "--modle 2 []"]
    assert "serach" in result.stderr and result.stderr.count("--modle") >= 2
