"""`python benchmarks/gpu`: see command.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:1] = [str(ROOT / "benchmarks"), *map(str, sorted(ROOT.glob("packages/*/src")))]  # nothing need be installed

from gpu.command import main  # noqa: E402 - that is on the path only now

if __name__ == "__main__":
    sys.exit(main())
