"""`python benchmarks/gpu`: see command.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sources = [ROOT / "benchmarks", ROOT, *sorted(ROOT.glob("packages/*/src"))]
sys.path[:1] = map(str, sources)  # runs without installing anything

from gpu.command import main  # noqa: E402 - that is on the path only now

if __name__ == "__main__":
    sys.exit(main())
