"""A temporary environment for each set of pinned requirements, made by uv."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from contender import HERE, Contender

ROOT = HERE.parent.parent
OURS = [str(ROOT / "packages" / name / "src") for name in ("core", "attention")]


def environment(cls: type[Contender], folder: Path) -> str:
    """The Python of a contender: this one without requirements, else one in `folder`, created once."""
    if not cls.requirements:
        return sys.executable
    requirements = "".join(sorted((*cls.requirements, *cls.alone)))
    home = folder / f"env-{sha256(requirements.encode()).hexdigest()[:12]}"
    python = home / "bin" / "python"
    if home.exists():
        return str(python)
    install = ["uv", "pip", "install", "--quiet", "--python", str(python)]
    _run(folder, "uv", "venv", "--quiet", "--no-project", str(home))
    _run(folder, *install, *cls.requirements)
    if cls.alone:
        _run(folder, *install, "--no-deps", *cls.alone)
    return str(python)


def _run(folder: Path, *command: str) -> None:
    # Outside of the workspace, which pins other versions. DS_BUILD_OPS=0 builds DeepSpeed without CUDA.
    process = subprocess.run(
        command, cwd=folder, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.strip()}")


def variables(cls: type[Contender]) -> dict[str, str]:
    """Our sources on the path, no GPU, one thread per rank, and flash-attn's stand-in where a contender takes it."""
    paths = [str(HERE), str(ROOT), *OURS, *([str(HERE / "standin")] if cls.standin else [])]
    quiet = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
